// Slice of the memory chart for a part of the run.

import type { Points } from "../model/types";
import { pointAt } from "./chart-geometry";

/** The known points of a part of the run, shown until finer ones arrive. */
export function slice(points: Points, start: number, stop: number): Points {
  const first = pointAt(points, start);
  const count = Math.min(stop - start, points.at.length);
  const picks = Array.from({ length: count }, (_, i) => pointAt(points, start + Math.floor((i * (stop - start)) / count)));
  const pick = <T>(list: readonly T[]): T[] => picks.map((point) => list[point] ?? list[first]) as T[];
  return {
    range: [start, stop],
    at: pick(points.at),
    bytes: points.bytes.map(pick),
    ops: pick(points.ops),
    ...(points.held && { held: pick(points.held) }),
  };
}
