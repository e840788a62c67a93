// Geometry of the memory chart: positions of the run horizontally, bytes vertically.

import type { Memory, Points } from "../model/types";

export const HEIGHT = 112; // unless the user makes it higher
const LEFT = 60;
const RIGHT = 8;
const TOP = 22;
const BOTTOM = 38;
export const TRACK = 12; // height of the bars of time, below the plot

/** The bound of a point's time, by its letter: compute, memory, or launch. */
export const BOUNDS: Record<string, string> = { c: "compute", m: "memory", l: "launch" };

/** The part of the memory chart that its cursor and the descriptions of points use. */
export interface Chart {
  readonly svg: SVGSVGElement;
  readonly plot: Plot;
  readonly memory: Memory;
  readonly points: Points;
  readonly count: number;
  readonly shown: boolean[];
  reading(point: number | null): string[];
}

/** The plot's rectangle and its scales: positions from `start` to before `stop`, and 0 to `most` bytes. */
export class Plot {
  readonly left = LEFT;
  readonly right: number;
  readonly top = TOP;
  readonly bottom: number;

  constructor(
    width: number,
    readonly start: number,
    readonly stop: number,
    readonly most: number,
    height = HEIGHT,
  ) {
    this.bottom = height - BOTTOM;
    this.right = Math.max(width - RIGHT, LEFT + 1);
  }

  x(position: number): number {
    return this.left + ((position - this.start) / Math.max(this.stop - this.start, 1)) * (this.right - this.left);
  }

  y(bytes: number): number {
    return this.bottom - (bytes / this.most) * (this.bottom - this.top);
  }

  /** The position at the coordinate `x`, limited to the plot. */
  position(x: number): number {
    const share = (x - this.left) / (this.right - this.left);
    const count = this.stop - this.start;
    return this.start + Math.min(Math.max(share, 0), 1) * count;
  }
}

/** The first position that a point represents; for the index after the last point, the end of the range. */
export function edge(points: Points, point: number): number {
  const [start, stop] = points.range;
  return start + Math.floor((point * (stop - start)) / Math.max(points.at.length, 1));
}

/** The point that represents a position. */
export function pointAt(points: Points, position: number): number {
  const [start, stop] = points.range;
  const count = points.at.length;
  let point = Math.floor(((position - start) * count) / Math.max(stop - start, 1));
  if (edge(points, point + 1) <= position) point++;
  return Math.min(Math.max(point, 0), count - 1);
}

/** The total bytes of each point, over the categories that are shown. */
export function totals(points: Points, shown: readonly boolean[]): number[] {
  return points.at.map((_, i) => points.bytes.reduce((sum, series, n) => sum + (shown[n] ? (series[i] ?? 0) : 0), 0));
}

/** The outline of the area between two step lines. */
export function area(plot: Plot, points: Points, below: number[], above: number[]): string {
  const x = (point: number): string => plot.x(edge(points, point)).toFixed(1);
  let path = `M${x(0)},${plot.y(above[0] ?? 0).toFixed(1)}`;
  for (let i = 0; i < above.length; i++) path += `V${plot.y(above[i] ?? 0).toFixed(1)}H${x(i + 1)}`;
  for (let i = above.length - 1; i >= 0; i--) path += `V${plot.y(below[i] ?? 0).toFixed(1)}H${x(i)}`;
  return `${path}Z`;
}

/** A step line, with gaps where nothing is known. */
export function steps(plot: Plot, points: Points, bytes: readonly (number | null)[]): string {
  let path = "";
  let drawn = false;
  bytes.forEach((size, i) => {
    const x = plot.x(edge(points, i)).toFixed(1);
    if (size !== null) path += `${drawn ? "V" : `M${x},`}${plot.y(size).toFixed(1)}H${plot.x(edge(points, i + 1)).toFixed(1)}`;
    drawn = size !== null;
  });
  return path;
}
