// What boxes show beside their names: a number with its bar, and the tint of their edge.

import { bytesText } from "../strip/memory-chart";
import { seconds } from "../page/dom";
import type { BoxData } from "../model/types";

const HUES = 8;

export const COLOURINGS = {
  peak: "held at the peak",
  memory: "memory made",
  time: "time",
  dtype: "dtype",
  module: "module",
} as const;
export type Colouring = keyof typeof COLOURINGS;

export interface Entry {
  fill: string; // a CSS value
  text: string;
}

/** A part of a bar: what it is of, and its share of the whole length. */
export type Part = readonly [category: string, share: number];

const plain = (path: string): string => path.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

/** Numbers, bars and tints for the boxes that are drawn. */
export class Colours {
  by: Colouring = "peak";
  peak = 0; // bytes, the length of a bar of what is held
  #most = 0;
  #slots = new Map<string, number>(); // of dtypes or modules, in order of first appearance
  #general = false; // modules by their place in the repeated part: h.* for h.0, h.1

  /** Takes notice of what is known of all boxes and which of them are drawn. */
  learn(known: Iterable<BoxData>, drawn: readonly BoxData[]): void {
    this.#most = this.by === "peak" ? this.peak : 0;
    if (this.by !== "peak") for (const box of known) if (box.kind !== "lane") this.#most = Math.max(this.#most, this.#amount(box) ?? 0);
    if (this.by !== "dtype" && this.by !== "module") return;
    const sizes = new Map<string, number>();
    const paths = new Set(drawn.map((box) => box.module ?? ""));
    this.#general = paths.size > HUES + 1;
    for (const box of drawn) {
      const key = this.#key(box);
      if (key) sizes.set(key, (sizes.get(key) ?? 0) + (box.bytes ?? 0) + 1);
    }
    const largest = [...sizes].sort((a, b) => b[1] - a[1]).slice(0, HUES).map(([key]) => key);
    // What keeps its place keeps its colour.
    const kept = new Map([...this.#slots].filter(([key]) => largest.includes(key)));
    const free = Array.from({ length: HUES }, (_, slot) => slot).filter((slot) => ![...kept.values()].includes(slot));
    for (const key of largest) if (!kept.has(key)) kept.set(key, free.shift() ?? 0);
    this.#slots = kept;
  }

  /** The style of one box: a custom property for its tint, where that is not its layer's. */
  style(box: BoxData): string {
    if (this.by !== "dtype" && this.by !== "module") return "";
    const slot = this.#slots.get(this.#key(box));
    return slot === undefined ? "" : `--lz-tint:var(--lz-hue-${slot})`;
  }

  /** The number of a box in words, as its bar shows it. */
  number(box: BoxData): string {
    switch (this.by) {
      case "dtype":
        return box.dtype ?? "";
      case "module":
        return box.module ?? "";
      case "time":
        return typeof box.seconds === "number" ? seconds(box.seconds) : "not run";
      case "memory":
        return `${bytesText(box.bytes ?? 0)} made`;
      case "peak":
        return `${bytesText(box.held ?? 0)} at peak`;
    }
  }

  /** The parts of a box's bar, on a linear scale. */
  bar(box: BoxData): Part[] {
    const amount = this.#amount(box) ?? 0;
    if (!this.#most || this.by === "dtype" || this.by === "module") return [];
    if (this.by === "peak" && box.by) return box.by.map(([category, bytes]) => [category, Math.min(bytes / this.#most, 1)]);
    return [[this.by === "time" ? "time" : "made", Math.min(amount / this.#most, 1)]];
  }

  /** What bars or tints mean, to be read from left to right. */
  legend(): { entries: Entry[]; scale: boolean; high: string } {
    if (this.by === "dtype" || this.by === "module") {
      const entries = [...this.#slots].map(([text, slot]) => ({ fill: `var(--lz-hue-${slot})`, text }));
      return { entries, scale: false, high: "" };
    }
    const high = this.#most > 0 ? (this.by === "time" ? seconds(this.#most) : bytesText(this.#most)) : "";
    return { entries: [], scale: true, high };
  }

  #amount(box: BoxData): number | undefined {
    return this.by === "time" ? (box.seconds ?? undefined) : this.by === "peak" ? (box.held ?? 0) : box.bytes;
  }

  #key(box: BoxData): string {
    if (this.by === "dtype") return box.dtype ?? "";
    const path = box.module ?? "";
    return this.#general ? plain(path) : path;
  }
}
