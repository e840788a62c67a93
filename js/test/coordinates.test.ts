// The browser's coordinates against the golden files that Python is held to as well.

import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { describe, expect, it } from "vitest";
import { curve, place, type Placed, type Size } from "../src/model/coordinates-from-layers";
import { Scene } from "../src/model/open-groups-and-layout";
import type { GroupData } from "../src/model/types";

const golden = (name: string): unknown =>
  JSON.parse(readFileSync(resolve(import.meta.dirname, `../../tests/view/layout/golden/${name}.json`), "utf8"));

const round = (value: number): number => Math.round(value * 1e6) / 1e6 + 0;

interface LayoutCase {
  sizes: Size[];
  flip: boolean;
  layers: number[][];
  paths: number[][];
  rails: number[][];
  placed: Placed;
}

describe("place", () => {
  const cases = Object.entries(golden("layout") as Record<string, LayoutCase>);
  it.each(cases)("computes the same coordinates of %s as Python", (_, { sizes, flip, layers, paths, rails, placed }) => {
    const found = place(layers, paths, sizes, flip, rails);
    expect(found.x.map(round)).toEqual(placed.x);
    expect(found.y.map(round)).toEqual(placed.y);
    expect(round(found.width)).toBe(placed.width);
    expect(round(found.height)).toBe(placed.height);
    expect(found.tops.map(round)).toEqual(placed.tops);
    expect(found.bottoms.map(round)).toEqual(placed.bottoms);
  });
});

interface PictureCase {
  root: string;
  room: number;
  groups: GroupData[];
  opened: string[];
  frames: [string, number, number, number, number][];
  lines: [string, [number, number, string] | null][];
  size: [number, number];
}

describe("Scene", () => {
  it.each(["picture", "picture-wrapped"])("draws %s where Python draws it", (name) => {
    const expected = golden(name) as PictureCase;
    const scene = new Scene(expected.root, expected.groups, expected.opened);
    const found = scene.arrange(expected.room);
    expect(found.frames.map(({ box, x, y, width, height }) => [box.id, ...[x, y, width, height].map(round)])).toEqual(
      expected.frames,
    );
    expect(found.lines.map(({ label, labelAt }) => [label, labelAt ? [round(labelAt[0]), round(labelAt[1]), labelAt[2]] : null])).toEqual(
      expected.lines,
    );
    expect([found.width, found.height].map(round)).toEqual(expected.size);
  });

  it("represents a hidden box by its innermost drawn ancestor", () => {
    const { root, groups } = golden("picture") as PictureCase;
    const lanes = groups.find((group) => group.id === root)?.boxes.map((box) => box.id) ?? [];
    const scene = new Scene(root, groups, [root, ...lanes]);
    const fold = groups.flatMap((group) => group.boxes).find((box) => box.repeats && box.phase === "forward");
    const member = groups.find((group) => group.id === fold?.id)?.boxes[0];
    const chain = [root, lanes[0] ?? "", fold?.id ?? "", member?.id ?? ""];
    expect(scene.visible(chain)).toBe(fold?.id);
    scene.open.add(fold?.id ?? "");
    expect(scene.visible(chain)).toBe(member?.id);
    scene.collapseAll();
    expect(scene.visible(chain)).toBe(fold?.id);
  });

  it("opens everything up to a limit", () => {
    const { root, groups } = golden("picture") as PictureCase;
    const scene = new Scene(root, groups, [root]);
    expect(scene.openAll(1000)).toBe(true);
    expect(scene.open.size).toBe(groups.length);
    scene.collapseAll();
    expect(scene.openAll(8)).toBe(false);
  });
});

describe("edges", () => {
  it("are straight if possible", () => {
    expect(curve([[0, 0], [0, 10]])).toBe("M0.0,0.0L0.0,10.0");
    expect(curve([[0, 0], [8, 10]])).toBe("M0.0,0.0C0.0,5.0 8.0,5.0 8.0,10.0");
  });
});
