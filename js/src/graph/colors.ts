// Colors and numbers of boxes: a number with its bar, and the tint of the box's edge.

import type { BoxData, Differences, Held, Note, Span } from "../model/types";
import { bytesText, seconds } from "../page/format";

const HUES = 8;
const NOTE = "note:";

export const COLORINGS: Record<string, string> = {
  peak: "held at the peak",
  memory: "allocated",
  time: "time",
  flops: "FLOPs",
  dtype: "dtype",
  module: "module",
};
/** One of the choices above, or "note:" and the name of an annotation. */
export type Coloring = string;

export const noteKey = (name: string): Coloring => NOTE + name;

export interface Entry {
  fill: string; // a CSS value
  text: string;
}

/** A part of a bar: its category, and its fraction of the whole length. */
export type Part = readonly [category: string, share: number];

/** Total bytes of all categories. */
export const sum = (sizes: readonly (readonly [string, number])[] = []): number => sizes.reduce((all, [, size]) => all + size, 0);

const plain = (path: string): string => path.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

/** Numbers, bars and tints for the boxes that are drawn. */
export class Colors {
  by: Coloring = "peak";
  peak = 0; // bytes of a full bar of held bytes
  now: Held | null = null; // bytes that boxes hold at the chart cursor, shown instead of those at the peak
  against: Differences | null = null; // bytes that boxes hold at the peak of this graph and of another one
  most = 0; // bytes of the higher of both peaks
  notes: readonly Note[] = [];
  #most = 0;
  #slots = new Map<string, number>(); // color index of dtypes or modules, in order of first appearance
  #general = false; // list items have one color: h.* for h.0, h.1

  /** Collects the values of all boxes, and which boxes are drawn. */
  learn(known: Iterable<BoxData>, drawn: readonly BoxData[]): void {
    const { note } = this;
    this.#most = this.by === "peak" ? (this.against ? this.most : this.peak) : note ? Math.max(Math.abs(note[1]), Math.abs(note[2])) : 0;
    if (this.by !== "peak" && !note) for (const box of known) if (box.kind !== "lane") this.#most = Math.max(this.#most, this.#amount(box) ?? 0);
    if (this.by !== "dtype" && this.by !== "module") return;
    const sizes = new Map<string, number>();
    const paths = new Set(drawn.map((box) => box.module ?? ""));
    this.#general = paths.size > HUES + 1;
    for (const box of drawn) {
      const key = this.#key(box);
      if (key) sizes.set(key, (sizes.get(key) ?? 0) + (box.bytes ?? 0) + 1);
    }
    const largest = [...sizes].sort((a, b) => b[1] - a[1]).slice(0, HUES).map(([key]) => key);
    // Entries that keep their position keep their color.
    const kept = new Map([...this.#slots].filter(([key]) => largest.includes(key)));
    const free = Array.from({ length: HUES }, (_, slot) => slot).filter((slot) => ![...kept.values()].includes(slot));
    for (const key of largest) if (!kept.has(key)) kept.set(key, free.shift() ?? 0);
    this.#slots = kept;
  }

  /** The annotation that is shown, if any. */
  get note(): Note | undefined {
    return this.notes.find(([name]) => noteKey(name) === this.by);
  }

  /** The name of the choice. */
  get name(): string {
    return this.note?.[0] ?? COLORINGS[this.by] ?? "";
  }

  /** The style of one box: custom properties for its tint, unless it has the color of its layer. */
  style(box: BoxData): string {
    const span = this.note && this.#span(box);
    if (span) {
      const [kind, share] = this.#noted(span);
      const mixed = (most: number): string => `color-mix(in srgb,var(--lz-${kind}) ${Math.round(share * most)}%,var(--lz-card))`;
      return `--lz-tint:${mixed(80)};--lz-fill:${mixed(20)}`;
    }
    if (this.by !== "dtype" && this.by !== "module") return "";
    const slot = this.#slots.get(this.#key(box));
    return slot === undefined ? "" : `--lz-tint:var(--lz-hue-${slot})`;
  }

  /** The number of a box as text, as its bar shows it. */
  number(box: BoxData): string {
    const span = this.#span(box);
    switch (this.by) {
      case "dtype":
        return box.dtype ?? "";
      case "module":
        return box.module ?? "";
      case "time":
        return this.#measured(box) ? seconds(box.seconds ?? 0) : span ? `${seconds(span[1])} projected` : "not run";
      case "memory":
        return `${bytesText(box.bytes ?? 0)} allocated`;
      case "peak":
        return this.now ? `${bytesText(sum(this.now[box.id]))} now` : `${this.pair(box)?.map(bytesText).join(" → ") ?? bytesText(box.held ?? 0)} at peak`;
      default:
        return span ? [span[2], this.note?.[0]].filter(Boolean).join(" ") : "";
    }
  }

  /** The parts of a box's bar, on a linear scale. */
  bar(box: BoxData): Part[] {
    const amount = this.#amount(box) ?? 0;
    if (!this.#most || this.by === "dtype" || this.by === "module") return [];
    if (this.by === "peak" && box.by) return this.#shares(box.by);
    const span = this.#span(box);
    if (this.note) return span ? [this.#noted(span)] : [];
    return [[this.by === "time" ? "time" : "made", Math.min(amount / this.#most, 1)]];
  }

  /** Bytes of a box in both graphs, where they differ. */
  pair(box: BoxData): [number, number] | null {
    const [before, after] = this.against?.[box.id] ?? [];
    const pair: [number, number] = [sum(before), sum(after)];
    return pair[0] === pair[1] ? null : pair;
  }

  /**
   * The solid parts of a bar: the bytes at the chart cursor or in the other graph. The bytes at the peak are then pale.
   */
  barNow(box: BoxData): Part[] | null {
    const solid = this.now ? (this.now[box.id] ?? []) : this.against && (this.against[box.id]?.[1] ?? []);
    return solid && this.by === "peak" && this.#most ? this.#shares(solid) : null;
  }

  #shares(sizes: readonly (readonly [string, number])[]): Part[] {
    return sizes.map(([category, bytes]) => [category, Math.min(bytes / this.#most, 1)]);
  }

  /** The meaning of bars or tints, from left to right: the names of hues, or the ends and middle of a scale. */
  legend(): { entries: Entry[]; ticks: string[] } {
    if (this.by === "dtype" || this.by === "module") {
      return { entries: [...this.#slots].map(([text, slot]) => ({ fill: `var(--lz-hue-${slot})`, text })), ticks: [] };
    }
    const { note } = this;
    const most = this.#most;
    if (most <= 0) return { entries: [], ticks: note ? ["0"] : [] };
    if (note) {
      const [, least, highest, leastText, mostText] = note;
      const end = Math.abs(least) > Math.abs(highest) ? leastText.replace(/^-/, "") : mostText;
      return { entries: [], ticks: least < 0 ? (highest > 0 ? [`-${end}`, "0", end] : ["0", "", `-${end}`]) : ["0", "", end] };
    }
    const text = (amount: number): string => (this.by === "time" ? seconds(amount) : this.by === "flops" ? flopsText(amount) : bytesText(amount));
    return { entries: [], ticks: ["0", text(most / 2), text(most)] };
  }

  /** A number whose bar shows its magnitude, and whose hue shows whether it is negative. */
  #noted([least, most]: Span): Part {
    const below = -least > most;
    return [below ? "below" : "note", this.#most ? Math.abs(below ? least : most) / this.#most : 0];
  }

  #span(box: BoxData): Span | undefined {
    return box.numbers?.[this.by];
  }

  #measured(box: BoxData): boolean {
    return typeof box.seconds === "number" && (box.state === "done" || !this.#span(box));
  }

  #amount(box: BoxData): number | undefined {
    if (this.by === "time" && this.#measured(box)) return box.seconds ?? undefined;
    return this.by === "peak" ? (box.held ?? 0) : this.by === "memory" ? box.bytes : this.#span(box)?.[1];
  }

  #key(box: BoxData): string {
    if (this.by === "dtype") return box.dtype ?? "";
    const path = box.module ?? "";
    return this.#general ? plain(path) : path;
  }
}

/** `1.5e9` -> `"1.5 GFLOP"`; the rule of lazyviz/plan/units.py. */
function flopsText(flops: number): string {
  const [size, unit] = ([[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const).find(([each]) => flops >= each) ?? [1, ""];
  return `${Number((flops / size).toPrecision(3))} ${unit}FLOP`;
}
