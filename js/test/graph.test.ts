// Going about in the graph: keys, the view, what lights up, breadcrumbs.

import { describe, expect, it, vi } from "vitest";
import { Breadcrumbs } from "../src/graph/breadcrumbs";
import { LaneTitles } from "../src/graph/lane-titles";
import { keptBands } from "../src/graph/saved-activations";
import { Camera } from "../src/graph/camera";
import { provideDeferredPart } from "../src/page/load-deferred-bundle";
import * as deferred from "../src/deferred-bundle-entry";
import { svg } from "../src/page/dom";
import { neighbor } from "../src/graph/arrow-keys";
import { relationLines } from "../src/graph/relation-lines";
import { Scene } from "../src/model/open-groups-and-layout";
import type { BoxData, EdgeData, GroupData, Relation } from "../src/model/types";

provideDeferredPart(deferred); // as in a saved page

const box = (id: string, more: Partial<BoxData> = {}): BoxData => ({ id, kind: "op", label: id, sub: "", phase: "forward", ...more });

/** A forward lane: a -> m (b -> c, side by side d) -> e, and a backward lane: g -> f, drawn upwards. */
const groups: GroupData[] = [
  { id: "r", row: true, boxes: [box("F", { kind: "lane", group: 3 }), box("B", { kind: "lane", group: 2, phase: "backward" })] },
  { id: "F", boxes: [box("a"), box("m", { kind: "module", group: 3 }), box("e")], layers: [[0], [1], [2]], edges: [[[0, 1], "4"], [[1, 2], "4"]] },
  { id: "m", boxes: [box("b"), box("c"), box("d")], layers: [[0, 2], [1]], edges: [[[0, 1], "4"]] },
  { id: "B", boxes: [box("g", { phase: "backward" }), box("f", { phase: "backward" })], layers: [[0], [1]], edges: [[[0, 1], "4"]], flip: true },
];
const scene = (open: string[] = []): Scene => new Scene("r", groups, ["r", "F", "B", ...open]);

describe("arrow keys", () => {
  const walk = (open: string[], from: string, ...keys: ("Up" | "Down" | "Left" | "Right")[]): string => {
    const arrangement = scene(open).arrange(2000);
    return keys.reduce((at, key) => neighbor(arrangement, at, `Arrow${key}`) ?? at, from);
  };

  it("go along the edges in the direction in which they are drawn", () => {
    expect(walk([], "a", "Down")).toBe("m");
    expect(walk([], "a", "Down", "Down")).toBe("e");
    expect(walk([], "e", "Up")).toBe("m");
    expect(walk([], "g", "Up")).toBe("f"); // a backward lane is drawn upwards
  });

  it("go into an open group and out of it again", () => {
    expect(walk(["m"], "a", "Down", "Down")).toBe("b");
    expect(walk(["m"], "b", "Down")).toBe("c");
    expect(walk(["m"], "c", "Down")).toBe("e");
    expect(walk(["m"], "b", "Up")).toBe("m");
  });

  it("go between the boxes of a layer, and from lane to lane", () => {
    expect(walk(["m"], "b", "Right")).toBe("d");
    expect(walk(["m"], "d", "Left")).toBe("b");
    expect(["f", "g"]).toContain(walk([], "a", "Right"));
    expect(["a", "m", "e"]).toContain(walk([], "f", "Left"));
  });

  it("stay at the last box", () => {
    expect(walk([], "a", "Up")).toBe("a");
    expect(walk([], "a", "Left")).toBe("a");
  });

  it("reach every box from the first one", () => {
    const arrangement = scene(["m"]).arrange(2000);
    const seen = new Set(["a"]);
    for (const at of seen) {
      for (const key of ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"] as const) seen.add(neighbor(arrangement, at, key) ?? at);
    }
    expect([...seen].sort()).toEqual(["a", "b", "c", "d", "e", "f", "g", "m"]);
  });
});

describe("lanes without room", () => {
  const lanes: GroupData[] = [
    { id: "r", row: true, boxes: (["forward", "backward", "optimizer"] as const).map((phase) => box(phase[0] ?? "", { kind: "lane", group: 1, phase })) },
    ...(["f", "b", "o"] as const).map((id): GroupData => ({ id, boxes: [box(`${id}1`, { size: [290, 64] }), box(`${id}2`, { size: [290, 64] })], layers: [[0, 1]], edges: [] })),
  ];
  const widths = (made: Scene, seen: number): number[] => made.arrange(Infinity, seen).frames.filter(({ box: { kind } }) => kind === "lane").map(({ width }) => width);

  it("draw the optimizer as a rail, and narrow the other lanes", () => {
    const made = new Scene("r", lanes, ["r", "f", "b", "o"]);
    const [wide = 0] = widths(made, Infinity);
    expect(widths(made, 3 * wide + 16)).toEqual([wide, wide, wide]);
    expect(widths(made, 2 * wide + 68 + 16)).toEqual([wide, wide, 68]);
    const [forward = 0, backward = 0, rail] = widths(made, 900);
    expect([forward + backward + 68 + 16, rail]).toEqual([900, 68]);
    expect(forward).toBe(backward);
    // No room for two: the backward pass is a rail as well.
    expect(widths(made, 300).slice(0, 2)).toEqual([330, 68]);
  });

  it("leave room for the frames around them", () => {
    const inner = lanes.map((group) => (group.id === "r" ? { ...group, id: "s2" } : group));
    const frame = (id: string, inside: string): GroupData => ({ id, boxes: [box(inside, { kind: "step", group: 1 })], layers: [[0]], edges: [] });
    const made = new Scene("r", [frame("r", "s1"), frame("s1", "s2"), ...inner], ["r", "s1", "s2", "f", "b", "o"]);
    expect(made.arrange(Infinity, 900).width).toBeLessThanOrEqual(900);
  });

  it("open and close a rail without changing the others", () => {
    const made = new Scene("r", lanes, ["r", "f", "b", "o"]);
    const [forward, backward] = widths(made, 900);
    expect([made.isOpen("o"), made.closable("o"), made.visible(["r", "o", "o1"])]).toEqual([false, false, "o"]);
    made.turn("o", true);
    const opened = widths(made, 900);
    expect(opened.slice(0, 2)).toEqual([forward, backward]);
    expect(opened[2]).toBeGreaterThan(600);
    expect([made.isOpen("o"), made.enclosing("o1"), made.visible(["r", "o", "o1"])]).toEqual([true, "o", "o1"]);
    made.turn("o", false);
    expect(widths(made, 900)[2]).toBe(68);
    made.turn("o", true);
    made.collapseAll();
    expect(widths(made, 900)[2]).toBe(68);
    widths(made, Infinity);
    expect([made.isOpen("o"), made.closable("o")]).toEqual([true, false]);
  });
});

describe("rows", () => {
  const part = (id: string, name: string, phase: "forward" | "backward", more: Partial<BoxData> = {}): BoxData => box(id, { kind: "module", name, phase, size: [200, 44], ...more });
  const groups: GroupData[] = [
    { id: "r", row: true, boxes: [box("F", { kind: "lane", group: 2 }), box("B", { kind: "lane", group: 5, phase: "backward" })] },
    { id: "F", boxes: [box("x"), box("m", { kind: "module", group: 3, name: "m" })], layers: [[0], [1]], edges: [[[0, 1], ""]] },
    { id: "m", boxes: [part("a", "m.a", "forward"), part("b", "m.b", "forward", { label: "h.0–3", repeats: 4, size: [200, 64] }), part("c", "m.c", "forward")], layers: [[0], [1], [2]], edges: [[[0, 1], ""], [[1, 2], ""]] },
    {
      id: "B",
      boxes: [part("d", "", "backward"), part("e", "m.c", "backward"), part("f", "", "backward"), part("g", "m.h.3", "backward", { label: "h.3–0", repeats: 4 }), part("h", "m.a", "backward")],
      layers: [[0], [1], [2], [3], [4]],
      edges: [[[0, 1], ""], [[1, 2], ""], [[2, 3], ""], [[3, 4], ""]],
      flip: true,
    },
  ];
  const middles = (made: Scene): Map<string, number> => new Map(made.arrange(Infinity, 2000).frames.map(({ box: { id }, y, height }) => [id, y + height / 2]));

  it("of a module and of its backward part are at one height, also inside a frame", () => {
    const at = middles(new Scene("r", groups, ["r", "F", "B", "m"]));
    expect(at.get("h")).toBeCloseTo(at.get("a") ?? 0);
    expect(at.get("g")).toBeCloseTo(at.get("b") ?? 0);
    expect(at.get("e")).toBeCloseTo(at.get("c") ?? 0);
    expect((at.get("f") ?? 0) - (at.get("g") ?? 0)).toBeGreaterThan(44);
  });

  it("are not moved for duplicate names, nor over long distances", () => {
    const twice = groups.map((group) => (group.id === "B" ? { ...group, boxes: group.boxes.map((each) => (each.id === "d" ? { ...each, name: "m.c" } : each)) } : group));
    const usual = middles(new Scene("r", groups, ["r", "F", "B", "m"]));
    const at = middles(new Scene("r", twice, ["r", "F", "B", "m"]));
    expect(at.get("g")).toBeCloseTo(at.get("b") ?? 0);
    expect(at.get("c")).toBeLessThan(usual.get("c") ?? 0);
    const far = groups.map((group) => (group.id === "B" ? { ...group, boxes: group.boxes.map((each) => (each.id === "f" ? { ...each, size: [200, 900] as [number, number] } : each)) } : group));
    const apart = middles(new Scene("r", far, ["r", "F", "B", "m"]));
    expect((apart.get("e") ?? 0) - (apart.get("c") ?? 0)).toBeGreaterThan(400);
  });

  it("move with the frame around them if they are its first, which then has no hole", () => {
    const tall = part("z", "", "backward", { size: [200, 300] }); // above the counterpart of the first row
    const high = groups.map((group) => (group.id === "B" ? { ...group, boxes: [...group.boxes, tall], layers: [...(group.layers ?? []), [5]], edges: [...(group.edges ?? []), [[4, 5], ""] as EdgeData] } : group));
    const tops = (made: Scene): number => {
      const at = new Map(made.arrange(Infinity, 2000).frames.map(({ box: { id }, y }) => [id, y]));
      return (at.get("a") ?? 0) - (at.get("m") ?? 0);
    };
    const usual = tops(new Scene("r", groups, ["r", "F", "B", "m"]));
    const made = new Scene("r", high, ["r", "F", "B", "m"]);
    expect(tops(made)).toBe(usual);
    const at = middles(made);
    expect(at.get("h")).toBeCloseTo(at.get("a") ?? 0);
  });

  it("of two boxes are at the height of the upper counterpart, although their middles differ a little", () => {
    const pair: GroupData[] = [
      groups[0] ?? { id: "r", boxes: [] },
      { id: "F", boxes: [part("q", "q", "forward", { size: [200, 64] }), part("p", "p", "forward")], layers: [[0, 1]], edges: [] },
      { id: "B", boxes: [part("v", "q", "backward"), part("u", "", "backward", { size: [200, 250] }), part("t", "p", "backward")], layers: [[0], [1], [2]], edges: [[[0, 1], ""], [[1, 2], ""]], flip: true },
    ];
    const at = middles(new Scene("r", pair, ["r", "F", "B"]));
    expect(at.get("t")).toBeCloseTo(at.get("p") ?? 0);
  });

  it("keep their position when a box in the other lane is closed", () => {
    const made = new Scene("r", groups, ["r", "F", "B", "m"]);
    const before = middles(made);
    made.turn("m", false);
    const after = middles(made);
    for (const id of ["e", "g", "h"]) expect(after.get(id)).toBe(before.get(id));
  });
});

describe("saved activations", () => {
  const made = scene();
  const frames = new Map(made.arrange(2000).frames.map((frame) => [frame.box.id, frame]));
  const kept = [
    { from: ["r", "F", "m", "c"], to: ["r", "B", "g"], bytes: 64 * 2 ** 20, text: "64.0 MiB kept" },
    { from: ["r", "F", "a"], to: ["r", "B", "f"], bytes: 100, text: "100 B kept" },
  ];

  it("are bands between drawn boxes, as wide as their bytes; small ones are omitted", () => {
    const bands = keptBands(kept, 2 ** 27, made, frames);
    expect(bands.map((band) => band.querySelector("title")?.textContent)).toEqual(["64.0 MiB kept for backward"]);
    const m = frames.get("m");
    const path = bands[0]?.querySelector<SVGPathElement>(".lz-kept-band");
    expect(path?.getAttribute("d")).toContain(`M${(m?.x ?? 0) + (m?.width ?? 0)},${(m?.y ?? 0) + (m?.height ?? 0) / 2}`);
    expect(path?.style.strokeWidth).toBe("4px");
    expect(keptBands(kept, 1000, made, frames).length).toBe(2);
    expect(keptBands(kept, 2 ** 40, made, frames)).toEqual([]);
  });

  it("have no text if it does not fit", () => {
    const words = (apart: number): number => {
      const moved = new Map([...frames].map(([id, frame]) => [id, { ...frame, x: frame.x + (frame.box.phase === "backward" ? apart : 0) }]));
      return keptBands(kept, 2 ** 27, made, moved)[0]?.querySelectorAll("text").length ?? 0;
    };
    expect([words(0), words(400)]).toEqual([0, 1]);
  });
});

describe("lines out of an open group", () => {
  it("pass beside the boxes in between, and turn below them", () => {
    const wide = { size: [200, 44] as [number, number] };
    const made = new Scene("r", [
      { id: "r", row: true, boxes: [box("F", { kind: "lane", group: 2 })] },
      { id: "F", boxes: [box("m", { kind: "module", group: 3 }), box("y")], layers: [[0], [1]], edges: [[[0, 1], "", 1, [7]]] },
      { id: "m", boxes: [box("u", wide), box("v", wide), box("w", wide)], layers: [[0, 1], [2]], edges: [[[0, 2], ""], [[1, 2], ""]], gives: [[0, [7]]] },
    ], ["r", "F", "m"]);
    const { frames, lines } = made.arrange(Infinity, 2000);
    const at = new Map(frames.map((frame) => [frame.box.id, frame]));
    const [u, w] = [at.get("u"), at.get("w")];
    const points = lines.find(({ from }) => from === "m")?.points ?? [];
    const middle = (u?.x ?? 0) + 100;
    expect(middle).toBeLessThan(w?.x ?? 0); // the way is free, but a curve to the middle of the frame would not be
    expect(points[0]).toEqual([middle, (u?.y ?? 0) + 44]);
    const straight = points.filter(([x]) => x === middle);
    expect(straight.at(-1)?.[1]).toBeGreaterThan((w?.y ?? 0) + 44);
  });
});

describe("titles of lanes", () => {
  const frames = [
    { box: box("F", { kind: "lane", label: "Forward", sub: "6 ops" }), x: 0, y: 0, width: 400, height: 1000, open: true, parent: "r" },
    { box: box("B", { kind: "lane", label: "Backward", sub: "not reached: loss.backward()", phase: "backward" }), x: 408, y: 0, width: 400, height: 300, open: true, parent: "r" },
  ];
  const shown = (y: number): (string | null)[] => {
    const camera = { view: { x: 12, y, k: 1 }, width: 1000 } as Camera;
    const titles = new LaneTitles(camera);
    titles.draw(frames);
    return [...titles.element.children].map((each) => each.textContent);
  };

  it("are at the edge of the view while their lane's top is above it", () => {
    expect(shown(12)).toEqual([]);
    expect(shown(-100)).toEqual(["Forward6 ops", "Backwardnot reached"]);
    expect(shown(-400)).toEqual(["Forward6 ops"]); // the other lane has ended
  });
});

describe("Camera", () => {
  const camera = (): { made: Camera; element: SVGSVGElement; content: SVGGElement } => {
    const content = svg("g");
    const element = svg("svg", {}, content);
    const made = new Camera(element, content, () => undefined);
    made.width = 800;
    made.picture = { width: 1000, height: 600 };
    return { made, element, content };
  };

  it("keeps a box at its position on screen while the picture around it changes", () => {
    const { made } = camera();
    made.zoomBy(0.5, [0, 0]);
    const { x, k } = made.view;
    made.keep({ x: 100, y: 100, width: 10, height: 10 }, { x: 300, y: 150, width: 10, height: 10 });
    expect(made.view.x + 300 * made.view.k).toBeCloseTo(x + 100 * k);
  });

  it("zooms about the point under the pointer", () => {
    const { made } = camera();
    const point = (made.view.x - 200) / made.view.k;
    made.zoomBy(2, [200, 100]);
    expect((made.view.x - 200) / made.view.k).toBeCloseTo(point);
    made.zoomBy(1000);
    expect(made.view.k).toBe(4);
  });

  it("moves no further than necessary to show a box", () => {
    const { made } = camera();
    made.reveal({ x: 10, y: 20, width: 50, height: 20 });
    expect(made.view.x).toBe(2);
    const seen = made.view;
    made.reveal({ x: 100, y: 30, width: 50, height: 20 });
    expect(made.view).toEqual(seen);
  });

  it("pans with a pointer, which then does not click", () => {
    const { made, element } = camera();
    element.setPointerCapture = vi.fn();
    const clicked = vi.fn();
    element.addEventListener("click", clicked);
    const point = (type: string, x: number): PointerEvent => new PointerEvent(type, { pointerId: 1, isPrimary: true, clientX: x, clientY: 0 });
    element.dispatchEvent(point("pointerdown", 10));
    element.dispatchEvent(point("pointermove", 12));
    expect(made.view.x).toBe(0);
    element.dispatchEvent(point("pointermove", 60));
    element.dispatchEvent(point("pointerup", 60));
    element.dispatchEvent(new MouseEvent("click", { detail: 1 }));
    expect(made.view.x).toBe(50);
    expect(clicked).not.toHaveBeenCalled();
    element.dispatchEvent(new MouseEvent("click", { detail: 1 }));
    expect(clicked).toHaveBeenCalledOnce();
  });
});

describe("relations", () => {
  it("highlight the drawn box at the other end, each kind in its own way", () => {
    const closed = scene();
    const arrangement = closed.arrange(2000);
    const frames = new Map(arrangement.frames.map((frame) => [frame.box.id, frame]));
    const from = frames.get("e");
    const relations: Relation[] = [
      { kind: "producer", chain: ["r", "F", "m", "c"], label: "c" },
      { kind: "saved", chain: ["r", "B", "g"], label: "g" },
      { kind: "gradient", chain: ["r", "B", "g"], label: "g" },
    ];
    expect(from).toBeDefined();
    if (!from) return;
    const [lines, kinds] = relationLines(relations, from, frames, closed, arrangement);
    expect(lines.map((line) => line.getAttribute("data-to"))).toEqual(["m", "g", "g"]);
    expect(kinds.map(([kind]) => kind)).toEqual(["producer", "saved", "gradient"]);
    expect(lines[0]?.querySelector("path")).toBeNull(); // the edge is drawn already
    expect(lines[1]?.querySelector("path")).not.toBeNull();
  });
});

describe("Breadcrumbs", () => {
  it("name the groups around a box, and lead to them", () => {
    const go = vi.fn();
    const crumbs = new Breadcrumbs(scene(["m"]), { go, home: vi.fn() });
    crumbs.show("c");
    expect([...crumbs.element.querySelectorAll("li")].map((item) => item.textContent)).toEqual(["Graph", "F", "m", "c"]);
    crumbs.element.querySelectorAll("button")[2]?.click();
    expect(go).toHaveBeenCalledWith(["r", "F", "m"]);
  });
});
