// The groups received so far, which of them are open, and where everything is drawn.
// The counterpart of lazyviz/view/layout/coordinates.py.

import { placeLabels, type Label } from "../graph/edge-labels";
import { curve, place, type Placed, type Size } from "./layout";
import type { BoxData, GroupData } from "./types";

const CLOSED: Size = [216, 44]; // of what says no size
const GROUP_PADDING = [12, 40, 12] as const;
const LANE_PADDING = [12, 64, 14] as const;
const LANE_GAP = 8;
const LANE_MIN_WIDTH = 224;
const STACKED_HEIGHT = 1600; // higher lanes stay side by side: one below the other they would be out of sight

export interface Frame {
  box: BoxData;
  x: number;
  y: number;
  width: number;
  height: number;
  open: boolean;
  parent: string;
  barrier?: Size; // of a sync point: the left end and the length of its line across the lane
}

export interface Line {
  path: string;
  from: string;
  to: string;
  label: string;
  tip: { x: number; y: number; down: boolean };
  labelAt: Label | null;
}

export interface Arrangement {
  frames: Frame[];
  lines: Line[];
  width: number;
  height: number;
}

export class Scene {
  readonly groups = new Map<string, GroupData>();
  readonly open = new Set<string>();
  readonly boxes = new Map<string, BoxData>();
  readonly #parents = new Map<string, string>();

  readonly #first: readonly string[];

  constructor(
    readonly root: string,
    groups: readonly GroupData[],
    first: readonly string[],
  ) {
    this.#first = first;
    this.add(groups);
    this.collapseAll();
  }

  add(groups: readonly GroupData[]): void {
    for (const group of groups) {
      this.groups.set(group.id, group);
      for (const box of group.boxes) {
        this.boxes.set(box.id, box);
        this.#parents.set(box.id, group.id);
      }
    }
  }

  collapseAll(): void {
    this.open.clear();
    for (const id of this.#first) this.open.add(id);
  }

  /** Whether what is in the box is drawn, where the box is; lanes are open in every open step. */
  isOpen(id: string): boolean {
    return this.groups.has(id) && (this.open.has(id) || this.boxes.get(id)?.kind === "lane");
  }

  /** Whether all is here that opening the group shows: a step is shown with its lanes. */
  known(id: string): boolean {
    return this.groups.get(id)?.boxes.every((box) => box.kind !== "lane" || this.groups.has(box.id)) ?? false;
  }

  /** Whether a click may close the group; lanes stay open. */
  closable(id: string): boolean {
    return this.open.has(id) && this.boxes.get(id)?.kind !== "lane" && id !== this.root;
  }

  /** The innermost group at the box, itself included, that a click would close. */
  enclosing(id: string): string | undefined {
    let at: string | undefined = id;
    while (at !== undefined && !this.closable(at)) at = this.#parents.get(at);
    return at;
  }

  /** Opens all groups that are here, outer ones first, while no more than `limit` boxes are drawn. */
  openAll(limit: number): boolean {
    const queue = [this.root];
    let drawn = 0;
    for (let id = queue.shift(); id !== undefined; id = queue.shift()) {
      const group = this.known(id) ? this.groups.get(id) : undefined;
      if (!group) continue;
      if (drawn + group.boxes.length > limit && id !== this.root) return false;
      drawn += group.boxes.length;
      this.open.add(id);
      for (const box of group.boxes) if (box.group) queue.push(box.id);
    }
    return true;
  }

  /** The innermost box of an ancestor chain (outermost first) that is drawn now. */
  visible(chain: readonly string[]): string | null {
    let shown: string | null = null;
    for (const id of chain) {
      if (id !== this.root) shown = id;
      if (id !== this.root && !this.isOpen(id)) break;
    }
    return shown !== null && this.boxes.has(shown) ? shown : null;
  }

  /** Coordinates of everything drawn; the lanes of a step keep to `room` pixels of width. */
  arrange(room: number): Arrangement {
    const order: { id: string; group: GroupData; box: BoxData | null }[] = [];
    const root = this.groups.get(this.root);
    if (root) order.push({ id: this.root, group: root, box: null });
    for (let n = 0; n < order.length; n++) {
      for (const box of order[n]?.group.boxes ?? []) {
        const group = this.groups.get(box.id);
        if (group && this.isOpen(box.id)) order.push({ id: box.id, group, box });
      }
    }
    const size = new Map<string, Size>();
    const placed = new Map<string, Placed>();
    const sizeOf = (box: BoxData): Size => size.get(box.id) ?? box.size ?? CLOSED;
    for (const { id, group, box } of [...order].reverse()) {
      const [side, above, below] = paddingOf(box);
      const sizes = group.boxes.map(sizeOf);
      let result: Placed;
      if (group.row) {
        const [rows, stretched] = laneRows(sizes, room);
        result = rows;
        group.boxes.forEach((child, n) => size.set(child.id, stretched[n] ?? CLOSED));
      } else {
        const paths = (group.edges ?? []).map((edge) => edge[0]);
        result = place(group.layers ?? [], paths, sizes, group.flip ?? false);
      }
      placed.set(id, result);
      const least = box?.kind === "lane" ? LANE_MIN_WIDTH : CLOSED[0] + 2 * side;
      size.set(id, [
        side ? Math.max(result.width + 2 * side, least) : result.width,
        result.height + above + below,
      ]);
    }
    const frames: Frame[] = [];
    const lines: Line[] = [];
    const origin = new Map<string, Size>([[this.root, [0, 0]]]);
    for (const { id, group, box } of order) {
      const result = placed.get(id);
      const [width] = size.get(id) ?? [0, 0];
      let [left, top] = origin.get(id) ?? [0, 0];
      if (!result) continue;
      left += (width - result.width) / 2;
      top += paddingOf(box)[1];
      const rects = group.boxes.map((child, n): Frame => {
        const [w, h] = sizeOf(child);
        const x = left + (result.x[n] ?? 0);
        const y = top + (result.y[n] ?? 0);
        origin.set(child.id, [x, y]);
        const open = this.isOpen(child.id);
        const frame: Frame = { box: child, x, y, width: w, height: h, open, parent: id };
        if (child.kind === "sync") frame.barrier = [(origin.get(id)?.[0] ?? 0) + 6, width - 12];
        return frame;
      });
      frames.push(...rects);
      if (!group.row) lines.push(...linesOf(group, result, rects, left, top, paddingOf(box)[0]));
    }
    const [width, height] = size.get(this.root) ?? [0, 0];
    return { frames, lines, width, height };
  }

  parentOf(id: string): string | undefined {
    return this.#parents.get(id);
  }
}

/** Lanes side by side, in several rows where there is no room for one; also their stretched sizes. */
export function laneRows(sizes: readonly Size[], room: number): [Placed, Size[]] {
  const rows: number[][] = [];
  let used = 0;
  if (sizes.some((size) => size[1] > STACKED_HEIGHT)) room = Infinity;
  sizes.forEach(([width], lane) => {
    const row = rows.at(-1);
    if (row && used + LANE_GAP + width <= room) {
      row.push(lane);
      used += LANE_GAP + width;
    } else {
      rows.push([lane]);
      used = width;
    }
  });
  const widthOf = (row: readonly number[]): number =>
    row.reduce((sum, lane) => sum + (sizes[lane]?.[0] ?? 0), 0) + LANE_GAP * (row.length - 1);
  const total = Math.max(0, ...rows.map(widthOf));
  const x = sizes.map(() => 0);
  const y = sizes.map(() => 0);
  const stretched = [...sizes];
  let top = 0;
  for (const row of rows) {
    const tall = Math.max(0, ...row.map((lane) => sizes[lane]?.[1] ?? 0));
    const more = (total - widthOf(row)) / row.length;
    let left = 0;
    for (const lane of row) {
      const wide = (sizes[lane]?.[0] ?? 0) + more;
      x[lane] = left;
      y[lane] = top;
      stretched[lane] = [wide, tall];
      left += wide + LANE_GAP;
    }
    top += tall + LANE_GAP;
  }
  return [{ x, y, width: total, height: top - LANE_GAP, tops: [], bottoms: [] }, stretched];
}

function paddingOf(box: BoxData | null): readonly [number, number, number] {
  if (box === null) return [0, 0, 0];
  return box.kind === "lane" ? LANE_PADDING : GROUP_PADDING;
}

function linesOf(group: GroupData, placed: Placed, rects: Frame[], left: number, top: number, side: number): Line[] {
  const layers = group.layers ?? [];
  const edges = group.edges ?? [];
  const flip = group.flip ?? false;
  const level = new Map<number, number>();
  layers.forEach((layer, number) => layer.forEach((i) => level.set(i, number)));
  const drawn = edges.map(([path]): Size[] =>
    path.flatMap((i, step): Size[] => {
      const rect = rects[i];
      if (rect) {
        const below = (step === 0) !== flip;
        return [[rect.x + rect.width / 2, below ? rect.y + rect.height : rect.y]];
      }
      const row = flip ? layers.length - 1 - (level.get(i) ?? 0) : (level.get(i) ?? 0);
      const x = left + (placed.x[i] ?? 0) + 4;
      const ends: Size[] = [
        [x, top + (placed.tops[row] ?? 0)],
        [x, top + (placed.bottoms[row] ?? 0)],
      ];
      return flip ? ends.reverse() : ends;
    }),
  );
  const labels = placeLabels(
    edges.map(([path, text], n) => ({ points: drawn[n] ?? [], text, from: path[0] ?? -1, to: path.at(-1) ?? -1 })),
    group.boxes.map((box) => box.kind === "module" || box.kind === "step"),
    rects.map(({ x, y, width, height }) => [x, y, x + width, y + height]),
    group.boxes.map((box) => (box.repeats ? 6 : 0)), // a fold's further cards
    [left - side + 3, left + placed.width + side - 3],
    flip,
  );
  return edges.map(([path, label], n): Line => {
    const points = drawn[n] ?? [];
    const [x, y] = points.at(-1) ?? [0, 0];
    const down = (points.at(-2)?.[1] ?? 0) < y;
    return {
      path: curve([...points.slice(0, -1), [x, down ? y - 5 : y + 5]]),
      from: rects[path[0] ?? -1]?.box.id ?? "",
      to: rects[path.at(-1) ?? -1]?.box.id ?? "",
      label,
      tip: { x, y, down },
      labelAt: labels[n] ?? null,
    };
  });
}
