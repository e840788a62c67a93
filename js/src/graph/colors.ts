// What boxes are coloured by, and how: classes of a sequential scale for amounts, hues for kinds.
// The scale is that of lazyviz/view/colors.py.

import { bytesText } from "../strip/memory-chart";
import { seconds } from "../page/dom";
import type { BoxData } from "../model/types";

export const HEATS = 7; // classes of the scale, each a factor of 4 of the next
const HUES = 8;

export const COLOURINGS = {
  memory: "memory",
  peak: "memory at the peak",
  time: "time",
  dtype: "dtype",
  module: "module",
} as const;
export type Colouring = keyof typeof COLOURINGS;

export interface Entry {
  fill: string; // a CSS value
  text: string;
}

/** The class of an amount, 0 to 6, of a scale that ends at `most`; null for what is not known. */
export function heat(amount: number | undefined, most: number): number | null {
  if (amount === undefined) return null;
  if (amount <= 0 || most <= 0) return 0;
  return Math.min(Math.max(HEATS - 1 + Math.ceil(Math.log2(amount / most) / 2 - 1e-9), 0), HEATS - 1);
}

const plain = (path: string): string => path.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

/** Colours for the boxes that are drawn. */
export class Colours {
  by: Colouring = "memory";
  private most = 0;
  private slots = new Map<string, number>(); // of dtypes or modules, in order of first appearance
  private general = false; // modules by their place in the repeated part: h.* for h.0, h.1

  /** Takes notice of what is known of all boxes and which of them are drawn. */
  learn(known: Iterable<BoxData>, drawn: readonly BoxData[]): void {
    this.most = 0;
    for (const box of known) {
      if (box.kind !== "lane") this.most = Math.max(this.most, this.amount(box) ?? 0);
    }
    if (this.by !== "dtype" && this.by !== "module") return;
    const sizes = new Map<string, number>();
    const paths = new Set(drawn.map((box) => box.module ?? ""));
    this.general = paths.size > HUES + 1;
    for (const box of drawn) {
      const key = this.key(box);
      if (key) sizes.set(key, (sizes.get(key) ?? 0) + (box.bytes ?? 0) + 1);
    }
    const largest = [...sizes].sort((a, b) => b[1] - a[1]).slice(0, HUES).map(([key]) => key);
    // What keeps its place keeps its colour.
    const kept = new Map([...this.slots].filter(([key]) => largest.includes(key)));
    const free = Array.from({ length: HUES }, (_, slot) => slot).filter((slot) => ![...kept.values()].includes(slot));
    for (const key of largest) if (!kept.has(key)) kept.set(key, free.shift() ?? 0);
    this.slots = kept;
  }

  /** The style of one box: custom properties for its fill and its text. */
  style(box: BoxData): string {
    if (this.by === "dtype" || this.by === "module") {
      const slot = this.slots.get(this.key(box));
      return slot === undefined ? "" : `--lz-fill:var(--lz-hue-${slot});--lz-text:#000`;
    }
    const level = heat(this.amount(box), this.most);
    return level === null ? "" : `--lz-fill:var(--lz-heat-${level});--lz-text:var(--lz-heat-ink-${level})`;
  }

  /** What the colours mean, to be read from left to right. */
  legend(): { entries: Entry[]; scale: boolean; low: string; high: string } {
    if (this.by === "dtype" || this.by === "module") {
      const entries = [...this.slots].map(([text, slot]) => ({ fill: `var(--lz-hue-${slot})`, text }));
      return { entries, scale: false, low: "", high: "" };
    }
    const say = (amount: number): string => (this.by === "time" ? seconds(amount) : bytesText(amount));
    const entries = Array.from({ length: HEATS }, (_, level) => ({
      fill: `var(--lz-heat-${level})`,
      text: `up to ${say(this.most / 4 ** (HEATS - 1 - level))}`,
    }));
    return this.most > 0
      ? { entries, scale: true, low: say(this.by === "time" ? this.most / 4 ** (HEATS - 1) : 0), high: say(this.most) }
      : { entries: [], scale: true, low: "", high: "" };
  }

  private amount(box: BoxData): number | undefined {
    return this.by === "time" ? (box.seconds ?? undefined) : this.by === "peak" ? (box.held ?? 0) : box.bytes;
  }

  private key(box: BoxData): string {
    if (this.by === "dtype") return box.dtype ?? "";
    const path = box.module ?? "";
    return this.general ? plain(path) : path;
  }
}
