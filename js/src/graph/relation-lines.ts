// Relations of the selected box: its inputs, its readers, activations that are saved for the backward pass, and the op
// that it is the gradient of. Each kind has its own color and line.

import { svg } from "../page/dom";
import type { Arrangement, Frame, Scene } from "../model/open-groups-and-layout";
import type { Relation } from "../model/types";

export const KINDS: Record<Relation["kind"], string> = {
  producer: "producers",
  consumer: "consumers",
  saved: "saved activations",
  gradient: "gradient partner",
};

const MOST_LINES = 3;

export type KindsShown = (readonly [kind: string, text: string])[];

/** Lines and rings around the box `selected`, and the kinds that occur. */
export function relationLines(
  relations: readonly Relation[],
  selected: Frame,
  frames: ReadonlyMap<string, Frame>,
  scene: Scene,
  { lines }: Arrangement,
): [SVGElement[], KindsShown] {
  const { id } = selected.box;
  const direct = new Set(lines.flatMap((line) => (line.from === id ? [line.to] : line.to === id ? [line.from] : [])));
  const drawn = new Set<string>();
  const kinds = new Set<Relation["kind"]>();
  const rings = new Map<Frame, number>();
  const elements: SVGElement[] = [];
  // Lines of the three strongest relations; rings show where the others are.
  const strongest = new Set([...relations].sort((a, b) => (b.bytes ?? 0) - (a.bytes ?? 0)).filter(({ chain }) => !direct.has(scene.visible(chain) ?? "")).slice(0, MOST_LINES));
  for (const relation of relations) {
    const { kind, chain, label } = relation;
    const near = scene.visible(chain);
    const to = near !== null ? frames.get(near) : undefined;
    if (!to || (to.box.kind === "lane" && to.open) || chain.includes(id) || drawn.has(kind + to.box.id)) continue;
    drawn.add(kind + to.box.id);
    kinds.add(kind);
    const nth = rings.get(to) ?? 0; // several around one box are concentric
    rings.set(to, nth + 1);
    const inset = 3 + 3 * nth;
    const ring = { x: to.x - inset, y: to.y - inset, width: to.width + 2 * inset, height: to.height + 2 * inset, rx: 8 + inset };
    const path = strongest.has(relation) ? [svg("path", { d: around(selected, to, frames, scene, elements.length % 4) })] : [];
    elements.push(svg("g", { class: `lz-relation lz-relation-${kind}`, "data-to": to.box.id }, svg("title", {}, `${KINDS[kind]}: ${label}`), ...path, svg("rect", ring)));
  }
  return [elements, [...kinds].map((kind) => [kind, KINDS[kind]] as const)];
}

/** A line with right angles: along each box's row to the edge of its lane, and vertical between the lanes. */
function around(from: Frame, to: Frame, frames: ReadonlyMap<string, Frame>, scene: Scene, nth: number): string {
  const [start, end] = [laneOf(from, frames, scene), laneOf(to, frames, scene)];
  const right = to.x >= from.x + from.width || start === end;
  const gutter = (lane: Frame, atRight: boolean): number => (atRight ? lane.x + lane.width + 1 : lane.x - 1) + (nth - 1.5) * 1.5;
  const out = gutter(start, right);
  const into = start === end ? out : gutter(end, !right);
  const [y, side] = leave(from, out, frames);
  const [last, arrive] = leave(to, into, frames);
  const points: [number, number][] = [[side, y], [out, y]];
  // If another lane is in between, the line passes above all lanes.
  if (Math.abs(into - out) > 20) points.push([out, start.y - 5 - nth], [into, start.y - 5 - nth]);
  points.push([into, last], [arrive, last]);
  return rounded(points);
}

function laneOf(frame: Frame, frames: ReadonlyMap<string, Frame>, scene: Scene): Frame {
  let at: string | undefined = frame.box.id;
  while (at !== undefined && frames.get(at)?.box.kind !== "lane") at = scene.parentOf(at);
  return frames.get(at ?? "") ?? frame;
}

/** A y coordinate without boxes between the box and `x`, if any, and the side where the line leaves the box. */
function leave(frame: Frame, x: number, frames: ReadonlyMap<string, Frame>): [y: number, side: number] {
  const right = x > frame.x + frame.width / 2;
  const side = right ? frame.x + frame.width : frame.x;
  const [low, high] = right ? [side, x] : [x, side];
  const free = (y: number): boolean => {
    for (const other of frames.values()) {
      if (!other.open && other !== frame && other.x < high && other.x + other.width > low && other.y - 2 < y && other.y + other.height + 2 > y) return false;
    }
    return true;
  };
  const heights = [0.5, 0.25, 0.75, 0.1, 0.9].map((share) => frame.y + frame.height * share);
  return [heights.find(free) ?? frame.y + frame.height / 2, side];
}

/** A path through the points with its corners rounded. */
function rounded(points: readonly (readonly [number, number])[]): string {
  const [first = [0, 0]] = points;
  let path = `M${first[0]},${first[1]}`;
  points.slice(1).forEach(([x, y], n) => {
    const [bx, by] = points[n] ?? [x, y];
    const next = points[n + 2];
    if (!next) {
      path += `L${x},${y}`;
      return;
    }
    const back = Math.min(6, Math.hypot(x - bx, y - by) / 2);
    const on = Math.min(6, Math.hypot(next[0] - x, next[1] - y) / 2);
    const toward = ([px, py]: readonly [number, number], by: number): string => {
      const long = Math.hypot(px - x, py - y) || 1;
      return `${(x + ((px - x) / long) * by).toFixed(1)},${(y + ((py - y) / long) * by).toFixed(1)}`;
    };
    path += `L${toward([bx, by], back)}Q${x},${y} ${toward(next, on)}`;
  });
  return path;
}
