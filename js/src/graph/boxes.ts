// Drawing one box. Its text changes when the zoom enters another `Band`, and its position when the layout changes; the
// element is reused.

import { charWidth, cut, svg } from "../page/dom";
import { LAYERS } from "../page/icons";
import type { Colors, Part } from "./colors";
import { nameOf, type Frame } from "../model/open-groups-and-layout";
import type { BoxData, ShapePart } from "../model/types";

const LEAST = 9.2; // pixels on screen below which no text is written
const SUB = 11; // font size of a second line
const EDGE = 32; // width of a card's tinted edge

/**
 * How text is written at a zoom: `grow` enlarges it so that it stays legible; `lines` is the number of lines that fit
 * into a box.
 */
export interface Band {
  grow: number;
  lines: 0 | 1 | 2;
  titles: number; // the height available for a title, in its own pixels: groups have room for 31, lanes for 50
}

/** No text is written: for boxes that are out of view, and for all if no text would be legible. */
export const SILENT: Band = { grow: 9, lines: 0, titles: 0 };

/** The band of a scale: each band spans a quarter of an octave, and its text size is legible at its lower end. */
export function bandOf(scale: number): Band {
  const least = scale >= 0.8 ? 1 : 2 ** (Math.floor(Math.log2(scale) * 4 + 1e-9) / 4);
  const grow = scale >= 0.8 ? 1 : Math.max(LEAST / SUB / least, 1);
  if (grow * SUB > 50) return SILENT;
  return { grow, lines: grow <= 1.5 ? 2 : grow * SUB <= 31 ? 1 : 0, titles: grow * SUB };
}

/** The number of sync points in a group. */
const syncsOf = ({ syncs = 0 }: BoxData): string => (syncs ? `❚❚ ${syncs} sync${syncs === 1 ? "" : "s"}` : "");

/** Everything that is known about a box without a request, for its tooltip and for screen readers. */
function wordsOf(box: BoxData): string {
  const parts = [nameOf(box), box.cls, box.through, box.params, box.sub, box.dtype, box.module && `in ${box.module}`];
  if (box.state && box.state !== "pending") parts.push(box.state);
  if (box.alarm) parts.push(box.alarm === "nan" ? "has NaN" : "has infinity");
  return parts.filter(Boolean).join(" · ");
}

const at = (frame: Frame): string => `translate(${frame.x.toFixed(1)},${frame.y.toFixed(1)})`;

/** The arrow of a group: a click on it opens or closes the group; elsewhere on the box, this takes a double click. */
const hit = (x: number): SVGElement => svg("rect", { class: "lz-arrow", x, width: 32, height: 30 });

/** The outline of a closed box; parameters and buffers have cut corners, which distinguish them from ops. */
function outline(box: BoxData, width: number, height: number, by: number): SVGElement {
  const cut = 9;
  if (box.kind === "input" && box.role !== "input") {
    const d = `M${cut},0H${width - cut}L${width},${cut}V${height - cut}L${width - cut},${height}H${cut}L0,${height - cut}V${cut}Z`;
    return svg("path", { class: "lz-card", d });
  }
  // A further card of a fold: its visible part, below and at the right.
  if (by) return svg("path", { class: "lz-card lz-behind", d: `M${by},${height}v${by - 6}a6,6 0 0 0 6,6H${width + by - 6}a6,6 0 0 0 6,-6V${by + 6}a6,6 0 0 0 -6,-6` });
  const round = box.kind === "input" || box.kind === "output" ? height / 2 : 6;
  return svg("rect", { class: "lz-card", width, height, rx: round });
}

const MARKS: Record<string, string> = {
  input: "M12,15a4.5,4.5 0 1 0 9,0a4.5,4.5 0 1 0 -9,0",
  parameter: "M12,10.5h9v9h-9Z",
  buffer: "M16.5,9l6,6l-6,6l-6,-6Z",
  optimizer: "M16.5,9.5l6,10h-12Z",
  output: "M12,15a4.5,4.5 0 1 0 9,0a4.5,4.5 0 1 0 -9,0",
};

/** One drawn box, open or closed. */
export class BoxDrawing {
  readonly element: SVGGElement;
  readonly #title = svg("title", {});
  readonly #label: SVGTextElement;
  readonly #sub: SVGTextElement | null;
  readonly #third: SVGTextElement | null = null; // for a module's card
  readonly #bar: SVGGElement | null = null;
  readonly #badge: SVGGElement | null = null;
  readonly #done: SVGRectElement | null = null; // its width shows the fraction of ops that have run
  readonly head = svg("g", {}); // title of an open group, drawn above the lines that enter the group
  #number = ""; // the number as text, beside the bar
  #chosen = false; // the user has chosen this number, so that it comes first where there is little room
  readonly #alarm = svg("g", "lz-alarm");
  #band: Band | null = null;

  #frame: Frame;

  // eslint-disable-next-line max-lines-per-function -- the elements of a box, in drawing order
  constructor(frame: Frame) {
    this.#frame = frame;
    const { box, width, height, open } = frame;
    const lane = box.kind === "lane";
    const still = lane && !frame.rail; // cannot be clicked
    const kind = lane ? "lane" : open ? "open" : box.kind === "module" || box.kind === "step" ? "group" : box.kind === "output" ? "input" : box.kind;
    const phase = ` lz-phase-${box.phase}${lane && !box.group ? " lz-missed" : ""}`;
    this.#label = svg("text", { class: lane ? "lz-lane-title" : open ? "lz-frame-title" : "lz-label" });
    this.#sub = open && !lane ? null : svg("text", "lz-sub");
    this.#third = lane || open || height < 60 ? null : svg("text", "lz-sub");
    this.element = still
      ? svg("g", { class: `lz-lane${phase}`, "data-lane": box.phase })
      : svg("g", {
          class: `lz-box lz-${kind}${phase}${box.layer ? ` lz-layer-${box.layer}` : ""}`,
          "data-box": box.id,
          "data-node": box.id,
          "data-kind": box.kind,
          "data-op": box.op ?? box.label,
          "data-phase": box.phase,
          "data-role": box.role,
          "data-name": box.name,
          "data-class": box.cls,
          role: "button",
          tabindex: -1,
          "aria-expanded": box.group ? String(open) : undefined,
          "data-lane": lane ? box.phase : undefined,
        });
    this.element.append(this.#title);
    if (open) {
      this.element.append(svg("rect", { class: "lz-frame", width, height, rx: 10 }));
      if (!lane) this.element.append(svg("path", { class: "lz-fold", d: "M14,15l5,6l5,-6" }), hit(0));
    } else if (box.kind === "sync" && frame.barrier) {
      const [left, wide] = frame.barrier;
      this.element.append(svg("path", { class: "lz-barrier", d: `M${left - frame.x},${height / 2}h${wide}` }), outline(box, width, height, 0));
    } else {
      if (box.repeats) this.element.append(outline(box, width, height, 6), outline(box, width, height, 3));
      this.element.append(outline(box, width, height, 0));
      if (box.kind !== "input" && box.kind !== "output" && box.kind !== "error") {
        this.#done = svg("rect", { class: "lz-done", width: 0, height, rx: 6 });
        this.element.append(this.#done);
      }
      if (box.layer) {
        const edge = height < 40 ? 24 : EDGE;
        this.element.append(
          svg("path", { class: "lz-tint", d: `M6,0.5H${edge}V${height - 0.5}H6a5.5,5.5 0 0 1 -5.5,-5.5V6a5.5,5.5 0 0 1 5.5,-5.5Z` }),
          svg("path", { class: "lz-layer-icon", d: LAYERS[box.layer] ?? "", transform: `translate(${edge / 2 - 8},${height < 40 ? height / 2 - 8 : 12})` }),
        );
      }
      if (box.group && height > 40 && !lane) this.element.append(svg("path", { class: "lz-fold", d: `M${width - 15},11l4,4l-4,4` }), hit(width - 30));
      const mark = MARKS[box.kind === "output" ? "output" : kind === "input" ? (box.role ?? "input") : ""];
      if (mark) this.element.append(svg("path", { class: `lz-mark lz-role-${box.role ?? "output"}`, d: mark }));
    }
    if (!open && !["sync", "input", "output", "error", "lane"].includes(box.kind) && (box.kind === "op" || height > 60)) {
      this.#bar = svg("g", "lz-bar");
      this.element.append(this.#bar);
    }
    if ((box.repeats || box.calls) && !open) {
      this.#badge = svg("g", {});
      this.element.append(this.#badge);
    }
    this.element.append(this.#alarm);
    // The tooltip is the full name.
    if (!still) for (const part of this.element.children) if (part !== this.#title) part.setAttribute("aria-hidden", "true");
    this.place(frame);
    this.tell();
  }

  /** Whether this element can show the box in `frame` without being drawn again; it may have to be moved. */
  fits(frame: Frame): boolean {
    const { width, height, open, barrier, rail } = this.#frame;
    return (
      frame.rail === rail && frame.width === width && frame.height === height && frame.open === open && String(frame.barrier) === String(barrier)
    );
  }

  place(frame: Frame): void {
    this.#frame = frame;
    this.#band = null; // its text may have changed
    for (const each of [this.element, this.head]) each.setAttribute("transform", at(frame));
  }

  get box(): BoxData {
    return this.#frame.box;
  }

  /** Updates the state and other properties that change while the graph runs. */
  tell(): void {
    const { box } = this.#frame;
    const words = wordsOf(box);
    this.#title.textContent = /lane|step/.test(box.kind) ? words : `${box.kind} ${words}`;
    if (box.kind === "lane" && this.#frame.open) return;
    this.element.dataset["state"] = box.state ?? "pending";
    this.#done?.setAttribute("width", String(this.#frame.width * (box.state === "done" ? 1 : (box.share ?? 0))));
    const mark = box.alarm ?? (box.state === "failed" ? "failed" : "");
    this.element.classList.toggle("lz-alarmed", Boolean(box.alarm));
    const text = { nan: "NaN", inf: "∞", failed: "!", "": "" }[mark];
    if (!text) {
      this.#alarm.replaceChildren();
      return;
    }
    const wide = text.length * 8 + 10;
    const x = this.#frame.width - wide + 6;
    this.#alarm.replaceChildren(
      svg("rect", { x, y: -8, width: wide, height: 18, rx: 9 }),
      svg("text", { x: x + wide / 2, y: 5 }, text),
    );
  }

  /** Updates the tint, number, and bar. */
  paint(colors: Colors): void {
    const { box, width, height, open } = this.#frame;
    if (["sync", "input", "output", "error"].includes(box.kind) || (box.kind === "lane" && open)) return;
    const number = open && !colors.note ? "" : colors.number(box);
    this.element.setAttribute("style", open ? "" : colors.style(box));
    this.#chosen = colors.by !== "peak" || colors.against !== null;
    const [before, after] = colors.pair(box) ?? [0, 0];
    const alone = colors.against?.[box.id]?.[2];
    for (const [name, on] of [["grew", after > before && !alone], ["shrank", after < before && !alone], ["alone", alone]] as const) this.element.classList.toggle(`lz-${name}`, Boolean(on));
    if (number !== this.#number) {
      this.#number = number;
      this.#band = null;
    }
    if (open) return;
    const left = box.layer ? EDGE + 8 : 10;
    const tall = box.layer ? 4 : 3;
    this.#bar?.replaceChildren(...bar(left, height - (box.layer ? 9 : 5), width - left - 12, tall, colors.bar(box), colors.barNow(box)));
  }

  /** Writes as much text as there is room for. */
  // eslint-disable-next-line max-lines-per-function -- the lines of a box share the available room
  write(band: Band): void {
    const { box, width, height, open } = this.#frame;
    const before = this.#band;
    if (before?.grow === band.grow || (!open && before?.lines === 0 && band.lines === 0)) return;
    this.#band = band;
    const { grow } = band;
    if (box.kind === "lane" && !open) {
      this.#writeRail(box, width, height, band);
      return;
    }
    if (open) {
      this.#writeTitle(box, width, band);
      return;
    }
    const lines = SUB * grow > height - 4 ? 0 : band.lines; // no text if it would be higher than the box
    const pill = box.kind === "input" || box.kind === "output";
    const left = pill ? 28 : box.layer ? (height < 40 ? 30 : EDGE + 8) : 11;
    const right = box.group && height > 40 ? 22 : pill ? 14 : 10;
    const size = (box.kind === "op" ? 12 : 13) * (lines === 1 ? (grow * SUB) / 11.5 : grow);
    const small = SUB * grow;
    const rows = lines < 2 ? lines : Math.max(Math.min(Math.floor((height - (height > 60 ? 12 : 4)) / (15 * grow)), 3), 1);
    const badge = this.#badge && lines === 2 ? (box.calls ? `${box.calls} calls` : `×${box.repeats}`) : "";
    const wide = badge ? badge.length * 6.6 * grow + 14 : 0;
    const room = width - left - right - (badge ? wide + 4 : 0);
    const lead = rows === 1 ? height / 2 + size * 0.36 - (this.#bar && box.kind === "op" ? 2 : 0) : rows === 2 ? height / 2 - 2 * grow : 15 * grow + 3;
    // If there is only one row, further text is at its end.
    const style = box.kind === "op" ? "mono" : "bold";
    const name = lines === 1 ? nameOf(box) : box.label;
    const aside = rows !== 1 || lines < 2 ? "" : box.kind === "op" ? this.#number.replace(/ (at peak|now|allocated|projected)$/, "") : pill ? box.sub : "";
    const short = pill ? (aside.split(" · ")[0] ?? "") : aside;
    const taken = short ? short.length * charWidth(small) + 8 : 0; // the name has priority over further text
    const fitted = lines ? cut(box.given ? `${name} failed` : name, Math.max(room - taken, room * 0.6), size, style) : "";
    this.#put(this.#label, fitted, left, lead, size);
    const used = charWidth(size, style) * fitted.length + 6;
    if (fitted && box.cls && lines === 2 && room - used > charWidth(size) * box.cls.length) {
      this.#label.append(svg("tspan", { class: "lz-class", dx: 6 }, box.cls));
    }
    const end = width - right;
    if (rows === 1) {
      const space = Math.max(end - left - used, 0);
      this.#put(this.#sub, cut(fitting(space, small, aside, pill ? short : aside.replace(/^.*(?=→)/, "")), space, small), end, lead, small);
      this.#sub?.setAttribute("text-anchor", "end");
    } else {
      const second = box.given ? (box.through ?? "") : box.layer ? (rows === 2 && height < 60 ? this.#short(width - 8 - left, small) : (box.through ?? box.sub.split(" · ")[0] ?? "")) : box.sub;
      this.#put(this.#sub, rows >= 2 ? cut(second, width - 8 - left, small, "bold") : "", left, lead + 15 * grow, small);
      this.#sub?.removeAttribute("text-anchor");
    }
    if (box.given && rows >= 2) {
      this.#sub?.replaceChildren(...box.given.flatMap(([, shape], n) => [n ? "\u00a0 · " : "", ...clashing(shape)]));
      this.#put(this.#third, rows >= 3 ? cut(box.sub, width - 8 - left, small) : "", left, lead + 29 * grow, small);
      return;
    }
    const third = fitting(width - 8 - left, small, [box.params ?? (syncsOf(box) || (box.through && box.sub.split(" · ")[0])), this.#number].filter(Boolean).join(" · "), this.#number);
    this.#put(this.#third, rows >= 3 ? cut(third, width - 8 - left, small) : "", left, lead + 29 * grow, small);
    this.#badge?.replaceChildren(
      ...(badge
        ? [
            svg("rect", { class: "lz-badge", x: end - wide, y: lead - size, width: wide, height: size * 1.3, rx: size * 0.65 }),
            setText(svg("text", "lz-badge-text"), badge, end - wide / 2, lead - size * 0.06, 11 * grow),
          ]
        : []),
    );
  }

  /** The second line of a small card: shapes and number, or one of them if there is no room for both. */
  #short(room: number, size: number): string {
    const { through } = this.#frame.box;
    const both = (this.#chosen ? [this.#number, through] : [through, this.#number]).filter(Boolean);
    const words = both.join(" · ");
    return words.length * charWidth(size, "bold") > room ? (both[0] ?? "") : words;
  }

  /** Writes the name and bytes of a lane that is drawn as a rail vertically. */
  #writeRail(box: BoxData, width: number, height: number, { grow, lines }: Band): void {
    const size = 14 * grow;
    const [start, room] = [46, height - 60];
    const title = lines ? cut(box.label, room, size, "bold") : "";
    this.#put(this.#label, title, start, size * 0.36 - width / 2, size);
    this.#label.setAttribute("transform", "rotate(90)");
    const used = charWidth(size, "bold") * title.length + 8;
    const words = lines === 2 ? cut([syncsOf(box), box.sub, box.group && this.#number].filter(Boolean).join(" · "), room - used, SUB * grow) : "";
    if (!words) return;
    const sub = svg("tspan", { class: "lz-sub", dx: 8 }, words);
    sub.style.fontSize = `${SUB * grow}px`;
    this.#label.append(sub);
  }

  #writeTitle(box: BoxData, width: number, { grow, lines, titles }: Band): void {
    if (box.kind === "lane") {
      const arrow = { forward: " ↓", backward: " ↑", optimizer: "", other: "" }[box.phase];
      const size = Math.min(14 * grow, 50);
      const title = titles ? cut(box.label + arrow, width - 36, size, "bold") : "";
      this.#put(this.#label, title, 18, lines === 2 ? 13 + size : 10 + size * 0.95, size);
      const sub = lines === 2 ? cut(box.sub, width - 28, SUB * grow) : "";
      this.#put(this.#sub, sub, 18, 13 + size + SUB * grow * 1.45, SUB * grow);
      return;
    }
    const size = Math.min(12.5 * grow, 31);
    const title = titles && titles <= 31 ? cut(nameOf(box), width - 44, size, "bold") : "";
    this.#put(this.#label, title, 32, 18.5 + size * 0.36, size);
    let room = width - 44 - charWidth(size, "bold") * title.length;
    const syncs = syncsOf(box);
    if (title && syncs && room > charWidth(size) * syncs.length + 12) {
      this.#label.append(svg("tspan", { class: "lz-sync-count", dx: 10 }, syncs));
      room -= charWidth(size) * syncs.length + 12;
    }
    for (const words of title ? [box.cls, this.#number] : []) {
      const wide = charWidth(size) * (words ?? "").length + 6;
      if (words && room > wide) this.#label.append(svg("tspan", { class: "lz-class", dx: 6 }, words));
      room -= wide;
    }
  }

  /** Empty text elements are removed, because all text is laid out again at every step of a zoom. */
  #put(text: SVGTextElement | null, words: string, x: number, y: number, size: number): void {
    if (!words) text?.remove();
    else if (text) {
      setText(text, words, x, y, size);
      if (text.parentNode) return;
      if (text.classList.contains("lz-frame-title")) this.head.append(text);
      else this.element.insertBefore(text, this.#alarm);
    }
  }
}

/** The first of the texts if there is room for it, otherwise the second. */
const fitting = (room: number, size: number, text: string, short = text): string => (text.length * charWidth(size) > room ? short : text);

/** A bar on its track, with its parts side by side; with `now`, they are pale, and the parts of `now` cover them. */
function bar(x: number, y: number, width: number, height: number, parts: readonly Part[], now: readonly Part[] | null): SVGElement[] {
  const row = (of: readonly Part[], style: string): SVGElement[] => {
    let at = x;
    return of.map(([category, share]) => {
      const wide = Math.min(share * width, x + width - at);
      const part = svg("rect", { class: `lz-part lz-cat-${category}${style}`, x: at, y, width: Math.max(wide, 0), height });
      at += wide;
      return part;
    });
  };
  return [svg("rect", { class: "lz-track", x, y, width, height, rx: height / 2 }), ...row(parts, now ? " lz-pale" : ""), ...row(now ?? [], "")];
}

/** A shape in which mismatched sizes are marked. */
export function clashing(shape: readonly ShapePart[]): SVGElement[] {
  // The mark has an outline, and is therefore wider than its text.
  return shape.map(([text, clashes], n) => svg("tspan", { class: clashes ? "lz-clash" : undefined, dx: clashes || shape[n - 1]?.[1] ? 4 : undefined }, text));
}

function setText(text: SVGTextElement, words: string, x: number, y: number, size: number): SVGTextElement {
  text.textContent = words;
  text.setAttribute("x", x.toFixed(1));
  text.setAttribute("y", y.toFixed(1));
  text.style.fontSize = `${size.toFixed(2)}px`;
  return text;
}
