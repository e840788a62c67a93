// Placement of edge labels: beside their line, without touching lines, boxes or other labels. The same algorithm as in
// lazyviz/view/layout/edge_labels.py, which documents it; both are tested with the same golden files.

import type { Size } from "./coordinates-from-layers";

type Rect = readonly [left: number, top: number, right: number, bottom: number];

const SIZE = 11;
const CHAR_WIDTH = 0.66;
const ROOM = 5;
const SAMPLES = 8;

export interface Labeled {
  points: readonly Size[];
  text: string;
  from: number;
  to: number;
}

export type Label = readonly [x: number, y: number, words: string];

export function placeLabels(
  edges: readonly Labeled[],
  groups: readonly boolean[],
  boxes: readonly Rect[],
  behind: readonly number[],
  bounds: Size,
  flip: boolean,
): (Label | null)[] {
  const leaving = new Map<number, Set<string>>();
  const arriving = new Map<number, number>();
  for (const { from, to, text } of edges) {
    leaving.set(from, (leaving.get(from) ?? new Set()).add(text));
    arriving.set(to, (arriving.get(to) ?? 0) + 1);
  }
  const strokes = edges.flatMap(({ points }) => strokesOf(points));
  const taken = [...boxes];
  const done = new Set<number>();
  return edges.map(({ points, text, from, to }) => {
    if (!groups[from] || !text || done.has(from)) return null;
    const same = leaving.get(from)?.size === 1;
    const heights: [Size, number][] = [];
    const [first, last] = [points[0], points.at(-1)];
    if (same && first) heights.push([first, flip ? -6 : 13 + (behind[from] ?? 0)]);
    if (arriving.get(to) === 1 && (same || groups[to]) && last) heights.push([last, flip ? 19 : -12]);
    for (const words of [text, text.split(" · ")[0] ?? ""]) {
      const wide = [...words].length * SIZE * CHAR_WIDTH;
      const at = free(heights, wide, strokes, taken, bounds);
      if (!at) continue;
      taken.push([at[0] - wide / 2, at[1] - 9, at[0] + wide / 2, at[1] + 3]);
      if (same) done.add(from);
      return [at[0], at[1], words];
    }
    return null;
  });
}

function free(heights: readonly [Size, number][], wide: number, strokes: readonly Rect[], taken: readonly Rect[], bounds: Size): Size | null {
  for (const [[x, y], down] of heights) {
    for (const middle of [x + ROOM + 2 + wide / 2, x - ROOM - 2 - wide / 2]) {
      const [left, right, top, bottom] = [middle - wide / 2, middle + wide / 2, y + down - 9, y + down + 3];
      if (left < bounds[0] || right > bounds[1]) continue;
      if (strokes.some(([l, t, r, b]) => left - ROOM < r && right + ROOM > l && top - 2 < b && bottom + 2 > t)) continue;
      if (taken.some(([l, t, r, b]) => left < r + 2 && right > l - 2 && top < b && bottom > t)) continue;
      return [middle, y + down];
    }
  }
  return null;
}

/** The line divided into short pieces, each as the rectangle around it. */
function strokesOf(points: readonly Size[]): Rect[] {
  const result: Rect[] = [];
  let [x, y] = points[0] ?? [0, 0];
  for (const [nx, ny] of points.slice(1)) {
    let [px, py] = [x, y];
    for (let sample = 1; sample <= SAMPLES; sample++) {
      const t = sample / SAMPLES;
      const qx = x + (nx - x) * (t * t * (3 - 2 * t));
      const qy = y + (ny - y) * (1.5 * t * (1 - t) + t * t * t);
      result.push([Math.min(px, qx), Math.min(py, qy), Math.max(px, qx), Math.max(py, qy)]);
      [px, py] = [qx, qy];
    }
    [x, y] = [nx, ny];
  }
  return result;
}
