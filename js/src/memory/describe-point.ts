// A point of the memory chart in words, for its tooltip and for screen readers.

import { BOUNDS, type Chart } from "./chart-geometry";
import { bytesText, seconds } from "../page/format";

/** The bytes of a point by category, and its time, as a sentence. */
export function describePoint({ memory, points, shown }: Chart, point: number): string {
  const sizes = memory.categories.map((category, n) => ({ name: category.label, bytes: points.bytes[n]?.[point] ?? 0 }));
  const all = sizes.reduce((sum, each) => sum + each.bytes, 0);
  const named = sizes.filter((each, n) => shown[n] && each.bytes > 0).map((each) => `${each.name} ${bytesText(each.bytes)}`);
  const held = points.held?.[point];
  const measured = held === null || held === undefined ? "" : ` · measured ${bytesText(held)}`;
  const { track, at } = points;
  const took = track?.seconds[point];
  const bound = BOUNDS[track?.bounds.charAt(point) ?? ""] ?? "";
  const time = took ? ` · ${at.length < points.range[1] - points.range[0] ? "its part of the run " : ""}${seconds(took)} projected, ${bound}-bound` : "";
  return ` · ${bytesText(all)} in all${measured}${named.length ? `: ${named.join(", ")}` : ""}${time}`;
}
