// The memory chart: projected bytes by category over the run, measured bytes, the peak and the capacity.
//
// When a part of the run is zoomed in, its points are requested from Python; until they arrive, the known points are
// stretched. The cursor is in chart-pointer-and-keys.ts.

import { ChartCursor } from "./chart-pointer-and-keys";
import { area, BOUNDS, type Chart, edge, HEIGHT, Plot, pointAt, steps, totals, TRACK } from "./chart-geometry";
import { charWidth, cut, focused, group, html, on, plainButton, svg } from "../page/dom";
import { bytesText, grouped } from "../page/format";
import { whenLoaded } from "../page/load-deferred-bundle";
import type { Failure, Memory, Phase, Points, Range, Track } from "../model/types";

const NEAR = 2; // the line of the capacity or need is drawn if it is below this multiple of the peak

export interface ChartEvents {
  peak(): void;
  /** The storages alive at a position were requested. */
  moment(position: number): void;
  /** The points of a part of the run were requested. */
  range(start: number, stop: number): void;
  /** The cursor has moved: ids from the outermost group to the op, or "" for none, and the position. */
  read(chain: string, position?: number): void;
  /** The whole run is shown again. */
  whole(): void;
}

export class MemoryChart implements Chart {
  readonly element: HTMLElement;
  readonly svg: SVGSVGElement;
  plot = new Plot(0, 0, 1, 1);
  private width = 0;
  private height = HEIGHT;
  #lifetime: [number, number][] = [];
  #preview: [number, number][] | null = null; // lifetime of the box under the pointer, shown instead
  #failure: Failure | null = null;
  #far = ""; // text about a capacity that is above the plot
  #views: Points[] = []; // zoomed ranges, each inside the previous one
  readonly #alone = new Set<string>(); // categories that are shown alone
  readonly #legend = html("ul", "lz-legend");
  readonly #head = html("p", "lz-muted lz-memory-head");
  readonly #time = html("p", "lz-muted");
  readonly #keys = html("span", "lz-time-keys");
  readonly #back = plainButton({ class: "lz-button", "data-action": "chart-back" });
  private readonly peak = plainButton({ class: "lz-button", "data-action": "peak" }, "Peak");
  readonly #cursor: ChartCursor;

  readonly #events: ChartEvents;

  constructor(
    public memory: Memory,
    events: ChartEvents,
  ) {
    this.#events = events;
    this.svg = svg("svg", { class: "lz-chart", "data-chart": "memory", role: "img" });
    this.#cursor = new ChartCursor(this, {
      choose: (position) => {
        events.moment(position);
      },
      zoom: (start, stop) => {
        this.#zoom(start, stop);
      },
      back: () => this.#zoomOut(),
      read: () => {
        this.#tellLegend();
        const point = this.#cursor.point ?? -1;
        events.read(this.points.boxes?.[point] ?? "", this.points.at[point]);
      },
      peak: () => {
        events.peak();
      },
    });
    on(this.#back, "click", () => {
      this.#zoomOut();
      this.#cursor.focus();
    });
    this.peak.title = "What is alive at the peak (P)";
    on(this.peak, "click", () => {
      events.peak();
    });
    this.#tell();
    this.element = group(
      "Projected memory",
      { class: "lz-memory" },
      html(
        "div",
        "lz-strip-side",
        html("div", "lz-strip-now", this.#cursor.play, this.#cursor.readout),
        this.#head,
        this.#time,
        html("div", "lz-strip-buttons", this.peak, this.#back, this.#keys),
      ),
      html("div", "lz-plot-box", this.svg, this.#cursor.element),
      this.#legend,
    );
  }

  /** The points that are drawn. */
  get points(): Points {
    return this.#views.at(-1) ?? this.memory.points;
  }

  get count(): number {
    return this.memory.count;
  }

  /** The readout for a point, or for the peak: op number, count, bytes held, and the op's location and name. */
  reading(point: number | null): string[] {
    const { points, shown } = this;
    const { peakAt, peakText, peakName, count } = this.memory;
    const of = ` of ${grouped(count)}`;
    if (point === null) return peakAt === null ? [] : [`op ${grouped(peakAt + 1)}`, of, `${peakText} at the peak`, peakName];
    const held = points.bytes.reduce((sum, series, n) => sum + (shown[n] ? (series[point] ?? 0) : 0), 0);
    return [`op ${grouped((points.at[point] ?? 0) + 1)}`, of, `${bytesText(held)} held`, points.ops[point] ?? ""];
  }

  /** Which categories are shown, in the order of the points' lists. */
  get shown(): boolean[] {
    return this.memory.categories.map((category) => !this.#alone.size || this.#alone.has(category.name));
  }

  /** The projected time has arrived. */
  showTrack(track: Track): void {
    this.memory.track = this.memory.points.track = track;
    if (!this.#views.length) this.#redraw();
    else this.#events.range(...this.points.range);
  }

  /** Another plan of the same graph. */
  show(memory: Memory): void {
    const same = memory.count === this.memory.count;
    if (!same) this.#lifetime = [];
    // The time track is requested again.
    memory.track ??= { text: "", words: "", title: "", seconds: [], bounds: "", phases: [], sums: {}, keys: [] };
    const view = same ? this.#views.at(-1)?.range : undefined;
    this.#views = [];
    this.memory = memory;
    for (const name of this.#alone) if (!memory.categories.some((each) => each.name === name)) this.#alone.delete(name);
    this.#cursor.forget();
    if (view) this.#zoom(...view, true);
    else this.#redraw();
  }

  /** The points of a part of the run have arrived; false if another part is shown by now. */
  showRange(range: Range): boolean {
    const view = this.#views.at(-1);
    const [start, stop] = range.points.range;
    if (view === undefined || view.range[0] !== start || view.range[1] !== stop) return false;
    this.#views[this.#views.length - 1] = { ...range.points, track: range.track };
    this.#redraw();
    return true;
  }

  /** The size of the plot is known or has changed. */
  resize(): void {
    const { clientWidth: width, clientHeight: height } = this.svg.parentElement ?? this.element;
    this.resizeTo(width, height || HEIGHT);
  }

  resizeTo(width: number, height = HEIGHT): void {
    if (width < 10 || (Math.abs(width - this.width) < 1 && height === this.height)) return;
    [this.width, this.height] = [width, height];
    this.#draw();
  }

  /** Removes the mark of the chosen point. */
  forget(): void {
    this.#cursor.forget();
  }

  /** Shows where the op is that failed. */
  fail(failure: Failure | null): void {
    if (failure === this.#failure) return;
    this.#failure = failure;
    this.#redraw();
  }

  /** Marks the positions during which something is alive. */
  mark(lifetime: [number, number][]): void {
    this.#lifetime = lifetime;
    this.#draw();
  }

  /** Marks these positions while the pointer is on a box; null: the pointer has left. */
  preview(lifetime: [number, number][] | null): void {
    this.#preview = lifetime;
    this.#draw();
  }

  #zoom(start: number, stop: number, again = false): void {
    const from = this.points;
    if (stop - start < 1 || (!again && from.range[0] === start && from.range[1] === stop)) return;
    whenLoaded(({ slice }) => {
      this.#views.push(slice(from, start, stop));
      this.#cursor.forget();
      this.#redraw();
      this.#events.range(start, stop);
    });
  }

  /** Back to the previous part; false if the whole run is shown already. */
  #zoomOut(): boolean {
    if (!this.#views.pop()) return false;
    this.#cursor.forget();
    this.#redraw();
    if (this.#views.length) this.#events.range(...this.points.range);
    else this.#events.whole();
    return true;
  }

  #redraw(): void {
    this.#tell();
    this.#draw();
  }

  #tell(): void {
    const { memory } = this;
    const at = memory.peakName ? ` at ${memory.peakName}` : "";
    this.svg.setAttribute("aria-label", this.#summary(at));
    const { capacity } = memory;
    const times = (capacity ?? 0) / (memory.needed ?? memory.peak);
    const needs = memory.neededText ? ` · needs ${memory.neededText} with what ${memory.device} takes itself` : "";
    this.#far = capacity !== null && times >= NEAR && memory.verdict !== "too-big" ? `${memory.device} has ${memory.capacityText}, ${times < 10 ? times.toFixed(1) : grouped(Math.round(times))} × ${memory.neededText ? "that" : "the peak"}` : "";
    // Only the first clause is shown; the tooltip has the full text.
    this.#head.textContent = memory.measured.split(/[,;:] /, 1)[0] || memory.otherRun;
    this.#head.title = [`Peak ${memory.peakText}${at}`, `${memory.otherRun}${needs}`, this.#far, memory.measured].filter(Boolean).join(" · ");
    const { words = "", title = "", keys = [] } = memory.track ?? {};
    this.#time.textContent = words;
    this.#time.title = title;
    this.#keys.replaceChildren(...keys.map((key) => html("span", {}, html("i", `lz-bound-${key[0] ?? ""}`), key)));
    this.#keys.title = keys.length ? `What bounds the time: ${keys.join(", ")}` : "";
    const [start, stop] = this.points.range;
    this.#back.hidden = !this.#views.length;
    this.#back.textContent = `Ops ${grouped(start + 1)} to ${grouped(stop)} · back`;
    this.#back.title = "Back (Esc, double-click)";
    this.#tellLegend();
    this.#cursor.tell();
  }

  /** The chart as text, for screen readers. */
  #summary(at: string): string {
    const { memory } = this;
    const parts = memory.categories.filter((each) => each.peak).map((each) => `${each.label} ${each.peakText}`);
    const room = memory.capacity === null ? "" : ` Memory of ${memory.device}: ${memory.capacityText}.`;
    const measured = memory.measured ? ` ${memory.measured}.` : "";
    const failed = this.#failure?.words ? ` ${this.#failure.words}.` : "";
    return `Projected memory over the run of ${grouped(memory.count)} ops: peak ${memory.peakText}${at}, of that ${parts.join(", ")}.${room}${measured}${failed}`;
  }

  #tellLegend(): void {
    const { memory, points } = this;
    const point = this.#cursor.point;
    const before = focused(this.#legend)?.dataset["category"];
    const entries = memory.categories.map((category, n) => {
      const size = point === null ? category.peakText : bytesText(points.bytes[n]?.[point] ?? 0);
      const entry = plainButton({ class: "lz-legend-entry",
          "data-category": category.name,
          "aria-pressed": String(this.#alone.has(category.name)),
          title: `Show ${category.label} alone: at most ${category.mostText}, ${category.peakText} at the peak`,
        },
        html("span", { class: `lz-swatch lz-cat-${category.name}`, "aria-hidden": "true" }),
        html("span", "lz-legend-name", `${category.label} `),
        html("b", {}, size),
      );
      on(entry, "click", () => {
        if (!this.#alone.delete(category.name)) this.#alone.add(category.name);
        this.#redraw();
      });
      return html("li", {}, entry);
    });
    const where = point === null ? "at the peak" : `at op ${grouped((points.at[point] ?? 0) + 1)}`;
    this.#legend.setAttribute("aria-label", `Categories, with their memory ${where}`);
    this.#legend.title = where;
    this.#legend.replaceChildren(...entries.reverse()); // in stacking order
    if (this.#alone.size) {
      const all = plainButton({ class: "lz-link", "data-action": "all-categories" }, "all categories");
      on(all, "click", () => {
        this.#alone.clear();
        this.#redraw();
      });
      this.#legend.append(html("li", {}, all));
    }
    if (points.held && !this.#alone.size) this.#legend.append(html("li", "lz-measured-entry", html("span", { class: "lz-measured-key", "aria-hidden": "true" }), "measured"));
    if (before) this.#legend.querySelector<HTMLElement>(`[data-category="${before}"]`)?.focus();
  }

  // eslint-disable-next-line max-lines-per-function -- the layers of the chart, in drawing order
  #draw(): void {
    const { memory, width, points, shown } = this;
    if (width === 0) return;
    const whole = shown.every(Boolean); // otherwise, lines of the total need would be misleading
    const [start, stop] = points.range;
    const heights = totals(points, shown);
    const held = whole ? points.held : undefined;
    const highest = Math.max(...heights, ...(held ?? []).map((size) => size ?? 0), 1);
    // The part that does not fit must be visible.
    const reach = (memory.verdict === "too-big" ? 4 * NEAR : NEAR) * highest;
    const near = (bytes: number | null): bytes is number => whole && bytes !== null && bytes < reach;
    const most = Math.max(highest, ...[memory.needed, memory.capacity].filter(near)) * 1.08;
    const plot = (this.plot = new Plot(width, start, stop, most, this.height));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("height", String(this.height));
    const { left, right, top, bottom } = plot;
    const parts: SVGElement[] = [
      svg("rect", { class: "lz-plot", x: left, y: top, width: right - left, height: bottom - top }),
    ];
    for (const share of [0, 0.5, 1]) {
      const at = plot.y(highest * share);
      parts.push(svg("path", { class: "lz-grid", d: `M${left},${at}H${right}` }));
      parts.push(svg("text", { class: "lz-axis", x: left - 8, y: at + (share ? 4 : 1) }, bytesText(highest * share)));
    }
    let below = new Array<number>(points.at.length).fill(0);
    memory.categories.forEach((category, n) => {
      if (!shown[n]) return;
      const above = below.map((low, i) => low + (points.bytes[n]?.[i] ?? 0));
      parts.push(svg("path", { class: `lz-area lz-cat-${category.name}`, d: area(plot, points, below, above) }));
      below = above;
    });
    const peakAt = memory.peakAt;
    const peak = whole && peakAt !== null && peakAt >= start && peakAt < stop ? pointAt(points, peakAt) : null;
    const x = peak === null ? 0 : (plot.x(edge(points, peak)) + plot.x(edge(points, peak + 1))) / 2;
    const [flagAt, flagTo, ...flagged] = flag(plot, x, memory);
    parts.push(...timeBars(plot, points), ...this.#stretches(plot, peak === null ? [0, 0] : [flagAt, flagTo]), ...this.#lives(plot));
    const needed = near(memory.needed) && ([memory.needed, `${memory.neededText} with allocator and CUDA context`] as const);
    if (this.#far && whole && !this.#failure?.words) parts.push(...roomy(plot, heights.map((size, n) => Math.max(size, held?.[n] ?? 0)), needed ? this.#far : this.#far.replace(/that$/, memory.neededText), needed));
    if (held) parts.push(svg("path", { class: "lz-measured", d: steps(plot, points, held) }));
    if (needed) parts.push(...line(plot, "lz-needed", ...needed, true));
    if (near(memory.capacity)) {
      parts.push(...line(plot, "lz-capacity", memory.capacity, `${memory.device}: ${memory.capacityText}`));
    }
    if (peak !== null) {
      parts.push(
        svg(
          "g",
          "lz-peak",
          svg("title", {}, `Peak ${memory.peakText}: show what is alive`),
          svg("rect", { x: x - 9, y: top - 6, width: 18, height: bottom - top + 6, class: "lz-peak-reach" }),
          svg("path", { d: `M${x},${top - 2}V${bottom}` }),
          ...flagged,
        ),
      );
    }
    const { at = -1, words } = this.#failure ?? {};
    if (words && at >= start && at <= stop) {
      const x = Math.min(plot.x(at), right - 1);
      parts.push(svg("g", "lz-failed-at", svg("path", { d: `M${x},${top}V${bottom}` }), ...label(plot, x, top + 2, words.length * 17 > right - plot.left ? words.replace(/:.*/, "") : words)));
    }
    this.svg.replaceChildren(...parts, this.#cursor.marks);
    this.#cursor.draw();
  }

  /** The pieces of a split run, labeled beside the flag of the peak, and the phases below the plot. */
  #stretches(plot: Plot, [flagAt, flagTo]: readonly [number, number]): SVGElement[] {
    const { memory } = this;
    const parts: SVGElement[] = [];
    const spans = <T extends string>(starts: [T, number][], draw: (name: T, from: number, to: number, cut: boolean, nth: number) => void): void => {
      starts.forEach(([name, first], n) => {
        const last = starts[n + 1]?.[1] ?? memory.count;
        const from = plot.x(Math.max(first, plot.start));
        const to = plot.x(Math.min(last, plot.stop));
        if (to > from) draw(name, from, to, first > plot.start, n);
      });
    };
    spans(
      memory.pieces.map(([first, name]) => [name, first]),
      (name, from, to, cut) => {
        if (cut) parts.push(svg("path", { class: "lz-piece", d: `M${from},${name ? 5 : plot.top}V${plot.bottom}` }));
        // In full if there is room, otherwise shorter: "piece 2, and 6 more like it", "piece 2 + 6", "+ 6".
        const [piece = "", more = ""] = name.replace(/ more like it$/, "").split(", and ");
        const free = flagTo < from || flagAt > to ? [[from, to] as const] : [[from, flagAt] as const, [flagTo, to] as const];
        const texts = [name, more ? `${piece} + ${more}` : piece, more ? `+ ${more}` : ""].filter(Boolean);
        const [found] = texts.flatMap((text) => free.flatMap(([left, right]) => (right - left > text.length * charWidth(11) + 8 ? [[left, text] as const] : [])));
        if (found) parts.push(svg("text", { class: "lz-piece-name", x: found[0] + 5, y: plot.top - 4 }, svg("title", {}, name), found[1]));
      },
    );
    const names: SVGElement[] = [];
    const named = new Set<Phase>();
    const drawn = new Set<Phase>();
    const { titles, track } = memory;
    spans(memory.phases, (phase, from, to, _, nth) => {
      parts.push(svg("rect", { class: `lz-phase-strip lz-phase-${phase}`, x: from, y: plot.bottom + TRACK + 6, width: Math.max(to - from - 1, 1), height: 3, rx: 1 }));
      const [name, wide] = phaseName(plot, phase, titles, from, to - from, track?.phases[nth]);
      drawn.add(phase);
      if (wide > to - from) return;
      named.add(phase);
      names.push(name);
    });
    if (named.size === drawn.size) return [...parts, ...names];
    // Each phase once, with the total time of its sections.
    let x = plot.left;
    const all = Object.keys(titles) as Phase[];
    for (const phase of all) {
      const [name, wide] = phaseName(plot, phase, titles, x, (plot.right - plot.left) / all.length, track?.sums[phase]);
      parts.push(name);
      x += wide + 8;
    }
    return parts;
  }

  #lives(plot: Plot): SVGElement[] {
    const { start, stop, top, bottom } = plot;
    return (this.#preview ?? this.#lifetime)
      .filter(([first, last]) => last > start && first < stop)
      .flatMap(([first, last]) => {
        const from = plot.x(Math.max(first, start));
        const to = Math.max(plot.x(Math.min(last, stop)), from + 2);
        return [
          svg("rect", { class: "lz-lifetime", x: from, y: top, width: to - from, height: bottom - top }),
          svg("path", { class: "lz-lifetime-bar", d: `M${from},${top}H${to}` }),
        ];
      });
  }
}

/** The name of a phase below the plot, with its time if there is room, and its width. */
function phaseName(plot: Plot, phase: Phase, titles: Memory["titles"], x: number, room: number, time = ""): [SVGElement, number] {
  const title = titles[phase] ?? "";
  const name = svg("text", { class: `lz-phase-name lz-phase-${phase}`, x, y: plot.bottom + TRACK + 21 }, title);
  const wide = title.length * charWidth(11, "bold") + 6;
  const more = time && time.length * charWidth(11) + 6;
  if (!more || wide + more > room) return [name, wide];
  name.append(svg("tspan", { class: "lz-class", dx: 6 }, time));
  return [name, wide + more];
}

/** The flag of the peak, with its bytes and, if it fits, its op; preceded by the x coordinates of its ends. */
function flag(plot: Plot, x: number, memory: Memory): [number, number, ...SVGElement[]] {
  const bytes = `▲ Peak ${memory.peakText}`;
  const room = plot.right - plot.left - bytes.length * charWidth(11, "bold") - 24;
  // The op, preceded by the longest suffix of the layer's path that fits.
  let name = memory.peakName;
  while (name && name.length * charWidth(11, "mono") > Math.min(room, 300)) name = name.replace(/^([^.:]*\.|[^:]*: |.*)/, "");
  const wide = bytes.length * charWidth(11, "bold") + (name ? name.length * charWidth(11, "mono") + 8 : 0) + 12;
  const left = Math.max(plot.left, Math.min(x, plot.right - wide));
  return [
    left,
    left + wide,
    svg("rect", { class: "lz-flag", x: left, y: 3, width: wide, height: 16, rx: 4 }),
    svg("text", { class: "lz-flag-text", x: left + 6, y: 15 }, bytes),
    svg("text", { class: "lz-flag-text lz-flag-op", x: left + wide - 6, y: 15 }, name),
  ];
}

/** Bars below the plot: the time of each point, colored by its bound. */
function timeBars(plot: Plot, points: Points): SVGElement[] {
  const { track } = points;
  const low = plot.bottom + TRACK + 3;
  const parts: SVGElement[] = [svg("path", { class: "lz-grid", d: `M${plot.left},${low}H${plot.right}` }), svg("text", { class: "lz-axis lz-time-label", x: plot.left - 8, y: low + 2 }, "time")];
  const most = Math.max(...(track?.seconds ?? []), 0);
  if (!most) return parts;
  for (const [letter, bound] of Object.entries(BOUNDS)) {
    const bars = track?.seconds.map((each, n) => {
      if (track.bounds.charAt(n) !== letter || !each) return "";
      const [from, to] = [plot.x(edge(points, n)), plot.x(edge(points, n + 1))];
      const high = Math.max((each / most) * TRACK, 0.5);
      return `M${from.toFixed(1)},${low}v${(-high).toFixed(1)}H${Math.max(to - 0.6, from + 0.6).toFixed(1)}V${low}Z`;
    });
    if (bars?.some(Boolean)) parts.push(svg("path", { class: `lz-time-bars lz-bound-${letter}`, d: bars.join("") }, svg("title", {}, `${bound}-bound`)));
  }
  return parts;
}

/** Text at the end or the start of the plot, where the curves and the label of a line leave room. */
function roomy(plot: Plot, heights: readonly number[], words: string, line: readonly [number, string] | false): SVGElement[] {
  const [bytes, label] = line || [Math.max(...heights), ""];
  const room = plot.right - plot.left;
  const share = (words.length * charWidth(11) + 12) / room;
  const wide = Math.ceil(share * heights.length);
  const beside = (words + label).length * charWidth(11) + 20 < room;
  const top = plot.y(bytes) + (beside ? 2 : 16); // below the grid line of the highest value, or below the label
  const low = (part: readonly number[]): boolean => share < 1 && part.every((each) => plot.y(each) > top + 16);
  const right = low(heights.slice(-wide));
  if (!right && (line || !low(heights.slice(0, wide)))) return []; // the label of the line is at the left
  return [svg("text", { class: "lz-room", x: right ? plot.right - 4 : plot.left + 4, y: top + 11, "text-anchor": right ? "end" : "start" }, words)];
}

/** A flag with one line of text, inside the plot. */
function label(plot: Plot, x: number, y: number, text: string): SVGElement[] {
  const words = cut(text, plot.right - plot.left - 12, 11, "bold");
  const wide = words.length * charWidth(11, "bold") + 12;
  const left = Math.max(plot.left, Math.min(x, plot.right - wide));
  return [svg("rect", { class: "lz-flag", x: left, y, width: wide, height: 16, rx: 4 }), svg("text", { class: "lz-flag-text", x: left + 6, y: y + 12 }, words)];
}

function line(plot: Plot, name: string, bytes: number, text: string, atStart = false): SVGElement[] {
  const y = plot.y(bytes);
  const x = atStart ? plot.left + 4 : plot.right - 4; // this label is below its line, the other one above, unless the peak's flag is there
  return [
    svg("path", { class: name, d: `M${plot.left},${y}H${plot.right}` }),
    svg("text", { class: `${name}-text`, x, y: y + (atStart || y < plot.top + 16 ? 12 : -5) }, text),
  ];
}
