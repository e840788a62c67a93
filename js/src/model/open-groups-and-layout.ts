// Scene: the groups received so far, which of them are open, and the coordinates of everything drawn.
// The counterpart of lazyviz/view/layout/coordinates.py.

import { charWidth } from "../page/dom";
import { placeLabels, type Label } from "./edge-labels";
import { BOX_GAP, curve, LAYER_GAP, narrowed, place, pressed, type Area, type Placed, type Size } from "./coordinates-from-layers";
import type { BoxData, EdgeData, GroupData, ShapePart, Sizes } from "./types";

const CLOSED: Size = [216, 44]; // size of a closed box if Python sends none
const GROUP_PADDING = [12, 40, 12] as const;
const LANE_PADDING = [12, 64, 14] as const;
const LANE_GAP = 8;
const LANE_MIN_WIDTH = 224;
const LANE_LEAST = 330; // minimum width of a lane, in pixels
const RAIL_WIDTH = 68; // width of the optimizer and initialization lanes if not all lanes fit
const LEAST_OPEN = 190; // free pixels beside a box that are enough to open it there
const LEAST_INSIDE = 120; // minimum width of a group's content, in pixels; boxes are cut to fit
const MOST_GAP = 400; // maximum distance that a row is moved down to align with its backward counterpart
const MOST_PAIRS = 100; // maximum number of modules that are aligned with their backward counterparts
const SAME_ROW = 20; // vertical distance of the middles of boxes in different rows, at least
const MOST_ENDS = 3; // maximum number of ends of one line in an open group
const STACKED_HEIGHT = 1600; // lanes higher than this stay side by side, because stacked lanes would be out of sight

/** A box's name for screen readers, with its number of repeats. */
export function nameOf(box: BoxData): string {
  return box.repeats ? `${box.label} × ${box.repeats}` : box.calls ? `${box.label} · ${box.calls} calls` : box.label;
}

export interface Frame {
  box: BoxData;
  x: number;
  y: number;
  width: number;
  height: number;
  open: boolean;
  rail?: boolean; // the lane does not fit beside the others, and is drawn as a narrow rail, open or closed
  parent: string;
  barrier?: Size; // for a sync point: the left end and the length of its line across the lane
}

export interface Line {
  path: string;
  points: Size[];
  from: string;
  to: string;
  source: string; // the box inside the open group `from` where the line starts, otherwise `from`
  target: string;
  label: string;
  width: number; // grows with the bytes of the tensors
  failed: boolean; // the op that it leads to was rejected
  shape?: ShapePart[] | undefined; // shape of the tensor that it brings to the rejected op
  values: readonly number[]; // ids of the tensors
  tip: { x: number; y: number; down: boolean } | null;
  labelAt: Label | null;
}

type Rect = [x: number, y: number, width: number, height: number];

/** The content of an open group. */
interface Inside {
  placed: Placed;
  layers: number[][];
  edges: EdgeData[];
  rows: number[][]; // box numbers of each row, from the top
  rects: Rect[];
  inner: Map<string, Inside>; // open groups inside
  offset: number; // from the left of the frame to the content
  width: number; // width of the frame
  height: number;
}

/** A row of a group: the group's id, and the row's number from the top. */
type Row = readonly [group: string, row: number];

/** A box with the rows that it is in, outermost first. */
interface InRow {
  name: string;
  middle: number;
  rows: readonly Row[];
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
  readonly #rails = new Set<string>(); // lanes that do not fit and are drawn as rails
  readonly #unfolded = new Set<string>(); // rails that the user has opened

  readonly #gaps = new Map<string, number[]>(); // for each group, the gap above each of its rows
  #gapsFor = Infinity; // the visible width that the gaps were computed for

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

  /** Shows the bytes of another batch size in boxes and edges. */
  tellSizes({ boxes, edges }: Sizes): void {
    for (const [id, [sub, bytes]] of Object.entries(boxes)) Object.assign(this.boxes.get(id) ?? {}, { sub, bytes });
    for (const [id, labels] of Object.entries(edges)) {
      this.groups.get(id)?.edges?.forEach((edge, n) => {
        edge[1] = labels[n] ?? edge[1];
      });
    }
  }

  collapseAll(): void {
    this.open.clear();
    this.#unfolded.clear();
    for (const id of this.#first) this.open.add(id);
  }

  /** Whether the content of the box is drawn; lanes are open in every open step. */
  isOpen(id: string): boolean {
    return this.groups.has(id) && !this.#folded(id) && (this.open.has(id) || this.boxes.get(id)?.kind === "lane");
  }

  #folded(id: string): boolean {
    return this.#rails.has(id) && !this.#unfolded.has(id);
  }

  /** Opens or closes a group. A lane can be closed only if it then becomes a rail. */
  turn(id: string, open: boolean): void {
    if (open) this.open.add(id);
    else if (!this.#rails.has(id)) this.open.delete(id);
    if (!open) this.#unfolded.delete(id);
    else if (this.boxes.get(id)?.kind === "lane") this.#unfolded.add(id);
  }

  /** Whether all groups that opening this one shows have been received; a step is shown with its lanes. */
  known(id: string): boolean {
    return this.groups.get(id)?.boxes.every((box) => box.kind !== "lane" || this.groups.has(box.id)) ?? false;
  }

  /** Whether a click may close the group; lanes stay open where there is room for them. */
  closable(id: string): boolean {
    return this.#rails.has(id) ? !this.#folded(id) : this.open.has(id) && this.boxes.get(id)?.kind !== "lane" && id !== this.root;
  }

  /** The innermost group at the box, itself included, that a click would close. */
  enclosing(id: string): string | undefined {
    let at: string | undefined = id;
    while (at !== undefined && !this.closable(at)) at = this.#parents.get(at);
    return at;
  }

  /** Opens all received groups, outer ones first, until `limit` boxes are drawn. */
  openAll(limit: number): boolean {
    const queue = [this.root];
    let drawn = 0;
    for (let id = queue.shift(); id !== undefined; id = queue.shift()) {
      const group = this.known(id) ? this.groups.get(id) : undefined;
      if (!group) continue;
      if (drawn + group.boxes.length > limit && id !== this.root) return false;
      drawn += group.boxes.length;
      this.turn(id, true);
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

  /** The innermost box around this one, or itself, that is drawn now. */
  drawn(id: string): string {
    const chain: string[] = [];
    for (let at: string | undefined = id; at !== undefined; at = this.#parents.get(at)) chain.unshift(at);
    return this.visible(chain) ?? id;
  }

  /**
   * Coordinates of everything drawn. The lanes of a step are laid out in `room` pixels of width. If they are wider than
   * the visible width `seen`, lanes other than forward and backward become rails, and the others are narrowed as far as
   * possible. Without `seen`, the picture is the same as Python's.
   *
   * A box gets its position in the first picture, or when the group around it is first opened, and keeps it. An opened
   * group grows to the right, up to the end of its lane, and down.
   */
  arrange(room: number, seen = Infinity): Arrangement {
    this.#rails.clear();
    const base = this.#firstSizes(room, seen);
    if (seen !== this.#gapsFor) {
      this.#gapsFor = seen;
      this.#gaps.clear();
      if (seen < Infinity) this.#align([room, seen], base);
    }
    const all = this.#inside(this.root, null, Infinity, [room, seen], base);
    const frames: Frame[] = [];
    const lines: Line[] = [];
    const queue: { id: string; inside: Inside; box: BoxData | null; left: number; top: number; width: number }[] = [
      { id: this.root, inside: all, box: null, left: 0, top: 0, width: all.width },
    ];
    for (let n = 0; n < queue.length; n++) {
      const here = queue[n];
      const group = this.groups.get(here?.id ?? "");
      if (!here || !group) continue;
      const { id, inside, box, width } = here;
      const left = here.left + inside.offset;
      const top = here.top + paddingOf(box)[1];
      const rects = group.boxes.map((child, i): Frame => {
        const [x, y, w, h] = inside.rects[i] ?? [0, 0, ...CLOSED];
        const within = inside.inner.get(child.id);
        const frame: Frame = { box: child, x: left + x, y: top + y, width: w, height: h, open: Boolean(within), parent: id };
        if (within) queue.push({ id: child.id, inside: within, box: child, left: frame.x, top: frame.y, width: w });
        if (this.#rails.has(child.id)) frame.rail = true;
        if (child.kind === "sync") frame.barrier = [here.left + 6, width - 12];
        return frame;
      });
      frames.push(...rects);
      if (!group.row) lines.push(...linesOf({ ...group, layers: inside.layers, edges: inside.edges }, inside.placed, rects, left, top, paddingOf(box)[0]));
    }
    const at = new Map(frames.map((frame) => [frame.box.id, frame]));
    const inside = new Map<string, Area[]>(); // rectangles of boxes and texts
    const stands = (parent: string, area: Area): void => {
      const known = inside.get(parent);
      if (known) known.push(area);
      else inside.set(parent, [area]);
    };
    for (const frame of frames) stands(frame.parent, frame);
    for (const { from, labelAt } of lines) {
      const wide = (labelAt?.[2].length ?? 0) * charWidth(11);
      if (labelAt) stands(at.get(from)?.parent ?? "", { x: labelAt[0] - wide / 2, y: labelAt[1] - 10, width: wide, height: 13 });
    }
    const reaching = lines.flatMap((line) => this.#reaching(line, at, inside));
    return { frames, lines: toRefused(reaching, at), width: all.width, height: all.height };
  }

  /** Sizes in the first picture of the groups that are open from the start. */
  #firstSizes(room: number, seen: number): Map<string, Size> {
    const order: { group: GroupData; box: BoxData | null }[] = [];
    const first = new Set(this.#first);
    const root = this.groups.get(this.root);
    if (root) order.push({ group: root, box: null });
    for (let n = 0; n < order.length; n++) {
      for (const box of order[n]?.group.boxes ?? []) {
        const group = this.groups.get(box.id);
        if (group && (first.has(box.id) || box.kind === "lane")) order.push({ group, box });
      }
    }
    const size = new Map<string, Size>();
    for (const { group, box } of order.reverse()) {
      let sizes = group.boxes.map((child) => size.get(child.id) ?? child.size ?? CLOSED);
      if (group.row) {
        [, sizes] = laneRows(this.#narrowed(group, sizes, seen), room);
        group.boxes.forEach((child, n) => {
          size.set(child.id, sizes[n] ?? CLOSED);
          this.#press(child, size);
        });
      }
      if (box) size.set(box.id, outer(box, placeOf(group, sizes, room)));
    }
    return size;
  }

  /** Computes the gaps that align backward counterparts with their modules in the first picture. */
  #align(rooms: readonly [number, number], base: ReadonlyMap<string, Size>): void {
    const now = [...this.open];
    this.open.clear();
    for (const id of this.#first) this.open.add(id);
    const all = this.#inside(this.root, null, Infinity, rooms, base);
    this.open.clear();
    for (const id of now) this.open.add(id);
    const lanes = new Map<string, InRow[]>(); // rows of each phase's lane
    const within = new Map<string, Map<number, string[]>>(); // open groups in each row of a group
    const walk = (id: string, { rows, rects, inner }: Inside, top: number, above: readonly Row[], found: InRow[] | undefined): void => {
      rows.forEach((row, number) => {
        for (const i of row) {
          const box = this.groups.get(id)?.boxes[i];
          const rect = rects[i];
          if (!box || !rect) continue;
          const at: Row[] = [...above, [id, number]];
          const y = top + rect[1];
          const inside = inner.get(box.id);
          if (!inside) {
            if (box.name) found?.push({ name: keyOf(box), middle: y + rect[3] / 2, rows: at });
            continue;
          }
          const known = within.get(id) ?? new Map<number, string[]>();
          within.set(id, known.set(number, [...(known.get(number) ?? []), box.id]));
          const lane = box.kind === "lane" ? [] : found;
          if (box.kind === "lane") lanes.set(box.phase, lane ?? []);
          walk(box.id, inside, y + paddingOf(box)[1], lane === found ? at : [], lane);
        }
      });
    };
    if (this.groups.get(this.root)?.row) walk(this.root, all, 0, [], undefined);
    const gapOf = (id: string, row: number): number => this.#gaps.get(id)?.[row] ?? 0;
    const grown = (id: string, row: number): number => Math.max(0, ...(within.get(id)?.get(row) ?? []).map((group) => total(group)));
    const total = (id: string): number => {
      const rows = new Set([...(this.#gaps.get(id)?.keys() ?? []), ...(within.get(id)?.keys() ?? [])]);
      return [...rows].reduce((sum, row) => sum + gapOf(id, row) + grown(id, row), 0);
    };
    const middle = (box: InRow): number => {
      let y = box.middle;
      for (const [id, row] of box.rows) for (let n = 0; n <= row; n++) y += gapOf(id, n) + (n < row ? grown(id, n) : 0);
      return y;
    };
    const [ahead, back] = [onlyOnes(lanes.get("forward")), onlyOnes(lanes.get("backward"))];
    const done = new Set<string>();
    for (const [one, other] of ascending([...ahead].flatMap(([name, box]) => (back.has(name) ? [[box, back.get(name) ?? box] as const] : [])))) {
      const keys = [one, other].map((box) => String(box.rows.at(-1)));
      if (keys.some((key) => done.has(key))) continue;
      for (const key of keys) done.add(key);
      const lower = middle(one) - middle(other);
      if (Math.abs(lower) > MOST_GAP) continue; // keeping boxes in view matters more
      const { rows } = lower > 0 ? other : one;
      // The frame around a first row moves as a whole, so that it has no hole.
      const [id, row] = rows.findLast(([, n]) => n) ?? rows[0] ?? ["", 0];
      const gaps = this.#gaps.get(id) ?? [];
      gaps[row] = (gaps[row] ?? 0) + Math.abs(lower);
      this.#gaps.set(id, gaps);
    }
  }

  /** The sizes of lanes that fit into `seen` visible pixels, with the frames around them. */
  #narrowed(row: GroupData, sizes: readonly Size[], seen: number): Size[] {
    for (let at = this.#parents.get(row.id); at; at = this.#parents.get(at)) seen -= 24; // their padding
    const phases = row.boxes.map(({ phase }) => phase);
    const total = sizes.reduce((all, [wide]) => all + wide + LANE_GAP, -LANE_GAP);
    if (total <= seen) return [...sizes];
    const aside = (phase: string): boolean => /o[pt]/.test(phase); // "optimizer", "other"
    const least = phases.reduce((all, phase) => all + (aside(phase) ? RAIL_WIDTH : LANE_LEAST) + LANE_GAP, -LANE_GAP);
    const alone = least > seen && phases.includes("forward"); // there is room for only one lane
    const rail = (n: number): boolean => sizes.length > 1 && (aside(phases[n] ?? "") || (alone && phases[n] === "backward"));
    let rest = seen - LANE_GAP * (sizes.length - 1);
    let left = sizes.length;
    row.boxes.forEach(({ id }, n) => {
      if (!rail(n)) return;
      this.#rails.add(id);
      rest -= RAIL_WIDTH;
      left--;
    });
    // Narrow lanes keep their width, and the others share the rest.
    let most = Infinity;
    for (const [n, [wide]] of [...sizes.entries()].sort((a, b) => a[1][0] - b[1][0])) {
      if (rail(n)) continue;
      if (wide * left > rest) {
        most = Math.max(rest / left, LANE_LEAST);
        break;
      }
      rest -= wide;
      left--;
    }
    return sizes.map(([wide, tall], n) => [this.#folded(row.boxes[n]?.id ?? "") ? RAIL_WIDTH : rail(n) && phases[n] !== "backward" ? wide : Math.min(wide, rail(n) ? LANE_LEAST : most), tall]);
  }

  /** Limits groups that are open from the start to the width of the narrowed group around them. */
  #press(box: BoxData, size: Map<string, Size>): void {
    const most = (size.get(box.id)?.[0] ?? 0) - 2 * paddingOf(box)[0];
    for (const child of this.groups.get(box.id)?.boxes ?? []) {
      const [wide, tall] = size.get(child.id) ?? [0, 0];
      if (wide <= most) continue;
      size.set(child.id, [most, tall]);
      this.#press(child, size);
    }
  }

  /** The positions of boxes inside an open group, whose content is at most `limit` wide if possible. */
  // eslint-disable-next-line max-lines-per-function -- one pass over the rows: each starts where the one above it ends
  #inside(id: string, own: BoxData | null, limit: number, rooms: readonly [room: number, seen: number], base: ReadonlyMap<string, Size>): Inside {
    const [room, seen] = rooms;
    const group = this.groups.get(id) ?? { id, boxes: [] };
    const [side, above, rest] = paddingOf(own);
    let sizes = group.boxes.map((box): Size => {
      const lane = group.row ? this.groups.get(box.id) : undefined; // the lane of a step that was opened later
      const usual = base.get(box.id) ?? (lane && outer(box, placeOf(lane, lane.boxes.map((each) => each.size ?? CLOSED), room)));
      const [wide, tall] = usual ?? box.size ?? CLOSED;
      return [Math.min(wide, limit), tall];
    });
    if (group.row) [, sizes] = laneRows(this.#narrowed(group, sizes, seen), room);
    let { layers = [], edges = [] } = group;
    let placed = placeOf(group, sizes, room);
    if (placed.width > limit + 0.5 && !group.row) {
      const [cut, paths] = narrowed(layers, edges.map((edge) => edge[0]), sizes, limit);
      layers = cut;
      edges = edges.map(([, ...rest], n) => [paths[n] ?? [], ...rest]);
      placed = pressed(place(layers, paths, sizes, group.flip ?? false, group.rails), layers, sizes, limit);
    }
    // The width from before anything inside was opened; opened boxes grow to the right within it.
    const usual = own ? (base.get(id)?.[0] ?? Math.max(placed.width + 2 * side, Math.min(CLOSED[0], limit) + 2 * side)) : placed.width;
    const offset = (usual - placed.width) / 2;
    const most = limit - Math.max(offset - side, 0);
    const rects = group.boxes.map((_, i): Rect => [at(placed.x, i), at(placed.y, i), ...(sizes[i] ?? CLOSED)]);
    const inner = new Map<string, Inside>();
    const rows = group.row ? rowsOf(placed.y) : (group.flip ? [...layers].reverse() : layers).map((row) => row.filter((i) => i < rects.length));
    const tops: number[] = [];
    const bottoms: number[] = [];
    let top = 0;
    rows.forEach((row, number) => {
      top += this.#gaps.get(id)?.[number] ?? 0;
      const before = group.row ? Math.min(...row.map((i) => at(placed.y, i))) : at(placed.tops, number);
      const high = group.row ? 0 : at(placed.bottoms, number) - before;
      let below = row.length ? 0 : high;
      let pushed = 0; // shift of the lanes to the right of a lane that has become wider
      const placing = [...row].sort((a, b) => at(placed.x, a) - at(placed.x, b));
      let under = 0; // y of the row's next boxes, if an open box has taken their place
      let taken = -Infinity; // right end of that open box
      for (const [nth, i] of placing.entries()) {
        const box = group.boxes[i];
        const rect = rects[i];
        if (!box || !rect) continue;
        const [wide, tall] = [rect[2], rect[3]];
        rect[0] += pushed;
        rect[1] = top + rect[1] - before;
        if (rect[0] < taken && !group.row) rect[1] = under;
        if (this.isOpen(box.id)) {
          const pad = 2 * paddingOf(box)[0];
          const next = placing[nth + 1];
          const beside = next === undefined || group.row ? Infinity : at(placed.x, next) - BOX_GAP - rect[0];
          const free = base.has(box.id) || group.row ? wide : Math.min(most - rect[0], beside >= LEAST_OPEN ? beside : Infinity);
          const within = this.#inside(box.id, box, Math.max(free - pad, LEAST_INSIDE), rooms, base);
          inner.set(box.id, within);
          [rect[2], rect[3]] = [Math.max(within.width, Math.min(wide, free)), within.height];
          if (group.row) pushed += rect[2] - wide;
          else taken = rect[0] + rect[2] + 1;
        } else if (base.has(box.id) && !this.#folded(box.id)) [rect[2], rect[3]] = box.size ?? CLOSED; // has been closed since
        else if (rect[0] >= taken) taken = -Infinity;
        if (this.isOpen(box.id) || taken > -Infinity) under = Math.max(under, rect[1] + rect[3] + BOX_GAP);
        below = Math.max(below, rect[1] + rect[3] - top);
        if (!group.row && tall > high) below = Math.max(below, tall);
      }
      if (group.row) for (const i of row) (rects[i] ?? [])[3] = below;
      tops.push(top);
      bottoms.push(top + below);
      top += below + (group.row ? LANE_GAP : LAYER_GAP);
    });
    const width = Math.max(usual, ...rects.map((rect) => offset + rect[0] + rect[2] + side));
    const height = Math.max(top - (group.row ? LANE_GAP : LAYER_GAP), 0) + above + rest;
    return { placed: { ...placed, y: rects.map((rect) => rect[1]), tops, bottoms }, layers, edges, rows, rects, inner, offset, width, height };
  }

  /** The line, continued inside open groups: from the ops that produce the tensors to the ops that read them. */
  #reaching(line: Line, frames: ReadonlyMap<string, Frame>, siblings: ReadonlyMap<string, Area[]>): Line[] {
    const ends = (id: string, key: "reads" | "gives"): Frame[] => {
      let level = [frames.get(id)].filter((frame) => frame !== undefined);
      for (let depth = 0; depth < 40 && level.some((frame) => frame.open); depth++) {
        level = level.flatMap((frame) => {
          const group = frame.open ? this.groups.get(frame.box.id) : undefined;
          if (!group) return [frame];
          if (group.row) return [{ ...frame, open: false }]; // lines do not run across lanes
          const inside = (group[key] ?? []).filter(([, values]) => values.some((value) => line.values.includes(value)));
          const found = inside.map(([i]) => frames.get(group.boxes[i]?.id ?? "")).filter((each) => each !== undefined);
          return found.length ? found.slice(0, MOST_ENDS) : [{ ...frame, open: false }];
        });
      }
      return level.slice(0, MOST_ENDS);
    };
    if (!frames.get(line.from)?.open && !frames.get(line.to)?.open) return [line];
    const makers = ends(line.from, "gives");
    const readers = ends(line.to, "reads");
    const flip = line.tip?.down === false;
    const start: Size = line.points[0] ?? [0, 0];
    const last: Size = line.points.at(-1) ?? start;
    const way = (from: Size, frame: Frame, above: boolean): Size[] => {
      const end: Size = [frame.x + frame.width / 2, above ? frame.y : frame.y + frame.height];
      return [...beside(from, end, frames.get(frame.parent), (siblings.get(frame.parent) ?? []).filter((each) => each !== frame)), end];
    };
    const leaving = makers.filter(({ box }) => box.id !== line.from).map((frame) => way(start, frame, flip).reverse());
    const entering = readers.filter(({ box }) => box.id !== line.to).map((frame) => way(last, frame, !flip));
    const source = makers[0]?.box.id ?? line.from;
    const target = readers[0]?.box.id ?? line.to;
    const points = [...(leaving[0] ?? []), ...line.points, ...(entering[0] ?? [])];
    const whole: Line = { ...line, source, target, points, failed: readers[0]?.box.kind === "error", ...drawn(points, flip) };
    const more = leaving.slice(1).map((way, n): Line => ({ ...line, source: makers[n + 1]?.box.id ?? source, target, labelAt: null, ...drawn([...way, start], flip), tip: null }));
    const others = entering.slice(1).map((way, n): Line => {
      const reader = readers[n + 1]?.box;
      const failed = reader?.kind === "error"; // drawn in red over its whole length
      const points = [...(failed ? line.points : [last]), ...way];
      return { ...line, source, target: reader?.id ?? target, points, failed, labelAt: null, ...drawn(points, flip) };
    });
    return [whole, ...more, ...others];
  }

  parentOf(id: string): string | undefined {
    return this.#parents.get(id);
  }
}

/** A key that a module shares with its backward counterpart, in which folds count down. */
function keyOf({ repeats, label, name = "" }: BoxData): string {
  return repeats ? label.replace(/(\d+)–(\d+)/, (all, first, last) => (Number(first) < Number(last) ? all : `${last}–${first}`) as string) : name;
}

/** The boxes with a unique name. */
function onlyOnes(boxes: readonly InRow[] = []): Map<string, InRow> {
  const found = new Map(boxes.map((box) => [box.name, box]));
  for (const box of boxes) if (found.get(box.name) !== box) found.set(box.name, { ...box, name: "" });
  return new Map([...found].filter(([, { name }]) => name));
}

type Pair = readonly [InRow, InRow];

const longest = (runs: readonly Pair[][]): Pair[] => runs.reduce((most, run) => (run.length > most.length ? run : most), []);

/**
 * The longest subsequence of these pairs, which are sorted by the first element, that is also sorted by the second.
 * Boxes of one row, whose middles can differ by some pixels, are in the order of their counterparts.
 */
function ascending(pairs: readonly Pair[]): Pair[] {
  const sorted = [...pairs].sort(([a, c], [b, d]) => ((a.middle - b.middle) / SAME_ROW) | 0 || c.middle - d.middle).slice(0, MOST_PAIRS);
  const best: Pair[][] = [];
  for (const pair of sorted) best.push([...longest(best.filter((run) => (run.at(-1)?.[1].middle ?? 0) < pair[1].middle)), pair]);
  return longest(best);
}

/** The x coordinate where the title of an open group ends. */
export const titleEnd = ({ x, box }: Frame): number => x + 40 + charWidth(12.5, "bold") * `${nameOf(box)} ${box.cls ?? ""}`.length;

/** The path of a line from a point to its end, around the boxes in between and, if possible, the group's title. */
function beside([start, from]: Size, [x, y]: Size, within: Frame | undefined, boxes: readonly Area[]): Size[] {
  const between = boxes.filter((box) => Math.min(from, y) < box.y && box.y + box.height < Math.max(from, y));
  const free = (at: number): boolean => between.every((box) => at < box.x - 4 || at > box.x + box.width + 4);
  const crosses = (at: number): boolean => within !== undefined && Math.abs(from - within.y) < 1 && Math.min(at, start) < titleEnd(within);
  const below = (at: number): Size[] => (crosses(at) ? [[start, from + 26]] : []); // the title
  if (!between[0]) return below(x);
  const far = (at: number): number => Math.abs(at - x) + (crosses(at) ? 1e4 : 0);
  const [at] = [x, ...between.flatMap((box) => [box.x - 8, box.x + box.width + 8])].filter((at) => free(at) && within && at > within.x && at < within.x + within.width).sort((a, b) => far(a) - far(b));
  if (at === undefined) return [];
  const ends: Size[] = [[at, Math.min(...between.map((box) => box.y)) - 6], [at, Math.max(...between.map((box) => box.y + box.height)) + 6]];
  return from < y ? [...below(at), ...ends] : ends.reverse();
}

/** Places lanes side by side, in several rows if they do not fit into one; also returns their stretched sizes. */
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

const at = (list: readonly number[], index: number): number => list[index] ?? 0;

/** The positions of a group's boxes while all of them are closed. */
function placeOf(group: GroupData, sizes: readonly Size[], room: number): Placed {
  if (group.row) return laneRows(sizes, room)[0];
  return place(group.layers ?? [], (group.edges ?? []).map((edge) => edge[0]), sizes, group.flip ?? false, group.rails);
}

/** The size of a frame around content. */
function outer(box: BoxData, content: { width: number; height: number }): Size {
  const [side, above, below] = paddingOf(box);
  const least = box.kind === "lane" ? LANE_MIN_WIDTH : CLOSED[0] + 2 * side;
  return [Math.max(content.width + 2 * side, least), content.height + above + below];
}

/** Boxes grouped by their y, from the top. */
function rowsOf(y: readonly number[]): number[][] {
  const rows = new Map<number, number[]>();
  y.forEach((top, i) => rows.set(top, [...(rows.get(top) ?? []), i]));
  return [...rows].sort((a, b) => a[0] - b[0]).map(([, row]) => row);
}

/** Lines to a rejected op end side by side above its card, each labeled with the shape of its input. */
function toRefused(lines: readonly Line[], frames: ReadonlyMap<string, Frame>): Line[] {
  const ends = lines.flatMap((line) => {
    const to = line.failed ? frames.get(line.target) : undefined;
    const shape = to?.box.given?.find(([value]) => line.values.includes(value))?.[1];
    return to && shape ? [{ line, to, shape, wide: shape.map(([text]) => text).join("").length * charWidth(11, "bold") + 10 }] : [];
  });
  ends.sort((a, b) => (a.line.points.at(-2)?.[0] ?? 0) - (b.line.points.at(-2)?.[0] ?? 0)); // in this order, they do not cross
  const total = ends.reduce((sum, { wide }) => sum + wide, 0);
  let taken = 0;
  const moved = new Map<Line, Line>();
  for (const { line, to, shape, wide } of ends) {
    const flip = line.tip?.down === false;
    const end: Size = [to.x + (to.width * (taken + wide / 2)) / total, flip ? to.y + to.height : to.y];
    const points = [...line.points.slice(0, -1), end];
    taken += wide;
    const told = total <= to.width || shape.some(([, clashes]) => clashes);
    moved.set(line, { ...line, points, labelAt: null, shape: told ? shape : undefined, ...drawn(points, flip) });
  }
  return lines.map((line) => moved.get(line) ?? line);
}

/** The path of a line and its arrowhead. */
function drawn(points: readonly Size[], flip: boolean): Pick<Line, "path" | "tip"> {
  const [x, y] = points.at(-1) ?? [0, 0];
  return { path: curve([...points.slice(0, -1), [x, flip ? y + 5 : y - 5]]), tip: { x, y, down: !flip } };
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
  const drawnAt = edges.map(([path]): Size[] =>
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
    edges.map(([path, text], n) => ({ points: drawnAt[n] ?? [], text, from: path[0] ?? -1, to: path.at(-1) ?? -1 })),
    group.boxes.map((box) => box.kind === "module" || box.kind === "step"),
    rects.map(({ x, y, width, height }) => [x, y, x + width, y + height]),
    group.boxes.map((box) => (box.repeats ? 6 : 0)), // the further cards of a fold extend below its box
    [left - side + 3, left + placed.width + side - 3],
    flip,
  );
  return edges.map(([path, label, width = 1, values = []], n): Line => {
    const points = drawnAt[n] ?? [];
    const [from, to] = [rects[path[0] ?? -1]?.box.id ?? "", rects[path.at(-1) ?? -1]?.box.id ?? ""];
    return { ...drawn(points, flip), points, from, to, source: from, target: to, label, width, failed: rects[path.at(-1) ?? -1]?.box.kind === "error", values, labelAt: labels[n] ?? null };
  });
}
