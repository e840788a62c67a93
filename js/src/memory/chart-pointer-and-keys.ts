// The cursor of the memory chart: crosshair and readout, choosing a point, dragging over a range.
//
// For screen readers, the plot is an image with a slider beside it, which describes each position. Arrow keys, Enter
// and Escape replace the mouse.

import { type Chart, edge, pointAt } from "./chart-geometry";
import { html, on, plainButton, svg } from "../page/dom";
import { grouped } from "../page/format";
import { icon } from "../page/icons";
import { deferredPart, whenLoaded } from "../page/load-deferred-bundle";

const DRAG = 5; // pixels; longer movements with a pressed button are drags
const HINT = "Hover to read values; click to see what is alive; drag to zoom in.";

export interface CursorEvents {
  choose(position: number): void;
  zoom(start: number, stop: number): void;
  /** False if there is nothing to return to. */
  back(): boolean;
  /** The cursor has moved to another point or was removed. */
  read(): void;
  peak(): void;
}

export class ChartCursor {
  readonly element = html("div", {
    class: "lz-chart-slider",
    role: "slider",
    tabindex: 0,
    "aria-label": "Position in the run. Arrow keys move, Shift and arrow keys select a part, Enter shows what is alive or zooms in, Escape goes back",
  });
  readonly readout = html("p", { class: "lz-chart-readout", "aria-hidden": "true" });
  readonly play = plainButton({ class: "lz-play", "data-action": "play", "aria-label": "Play the run", title: "Go through the run (K)" }, icon("play"));
  readonly marks = svg("g", "lz-cursors");
  point: number | null = null; // the point at the cursor
  #chosen: number | null = null; // a position
  #anchor: number | null = null; // the position where a selected range begins
  #pressed: number | null = null; // x
  #dragged = false;

  readonly #chart: Chart;
  readonly #events: CursorEvents;

  constructor(
    chart: Chart,
    events: CursorEvents,
  ) {
    this.#chart = chart;
    this.#events = events;
    whenLoaded(() => {
      if (this.point !== null) this.tell();
    });
    on(this.play, "click", () => {
      whenLoaded(({ sweep }) => {
        sweep(this, chart.points.at.length - 1);
      });
    });
    this.#listenToPointer(chart, events);
    this.#listenToKeys();
  }

  #listenToPointer(chart: Chart, events: CursorEvents): void {
    const target = chart.svg;
    on(target, "pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault(); // the focus moves to the slider instead
      this.element.focus({ preventScroll: true });
      this.#pressed = this.#x(event);
      this.#dragged = false;
      this.#anchor = null;
    });
    on(target, "pointermove", (event) => {
      const x = this.#x(event);
      if (this.#pressed !== null && Math.abs(x - this.#pressed) > DRAG && !this.#dragged) {
        this.#dragged = true;
        this.#anchor = Math.floor(chart.plot.position(this.#pressed));
        target.setPointerCapture(event.pointerId);
      }
      this.read(pointAt(chart.points, Math.floor(chart.plot.position(x))));
    });
    on(target, "pointerup", () => {
      if (this.#dragged) this.zoom();
      this.#pressed = null;
    });
    on(target, "pointercancel", () => {
      this.#pressed = this.#anchor = null;
      this.draw();
    });
    on(target, "pointerleave", () => {
      if (this.#pressed === null && !this.#focused) this.read(null);
    });
    on(target, "click", (event) => {
      if (this.#dragged) return;
      const x = this.#x(event);
      if ((event.target as Element).closest(".lz-peak")) events.peak();
      else if (x >= chart.plot.left && x <= chart.plot.right) {
        this.read(pointAt(chart.points, Math.floor(chart.plot.position(x))));
        this.choose();
      }
    });
    on(target, "dblclick", () => events.back());
  }

  #listenToKeys(): void {
    on(this.element, "focus", () => {
      this.read(this.point ?? this.#start());
    });
    on(this.element, "blur", () => {
      this.#anchor = null;
      // Checked later, because the focus may move to an element that is drawn again.
      setTimeout(() => {
        if (!this.#focused) this.read(null);
      });
    });
    on(this.element, "keydown", (event) => {
      if (this.#key(event)) {
        event.preventDefault();
        event.stopPropagation();
      }
    });
  }

  get #focused(): boolean {
    return this.element.matches(":focus");
  }

  focus(): void {
    this.element.focus();
  }

  /** Removes the mark of the chosen point. */
  forget(): void {
    this.#chosen = this.#anchor = null;
    this.point = this.#focused ? this.#start() : null;
    this.tell();
    this.draw();
  }

  /** Updates the text about the point at the cursor. */
  tell(): void {
    const { points } = this.#chart;
    const [start, stop] = points.range;
    const point = this.point === null ? null : Math.min(this.point, points.at.length - 1);
    const at = points.at[point ?? this.#start()] ?? 0;
    let words = `op ${grouped(at + 1)} of ${grouped(this.#chart.count)}`;
    if (point !== null || this.#focused) {
      const shown = point ?? this.#start();
      const [from, to] = [edge(points, shown), edge(points, shown + 1)];
      if (to - from > 1) words += `, the highest of ${grouped(from + 1)} to ${grouped(to)}`;
      words += ` · ${points.ops[shown] ?? ""}${deferredPart()?.describePoint(this.#chart, shown) ?? ""}`;
      if (this.#anchor !== null) words = `from op ${grouped(this.#anchor + 1)} · ${words}`;
    }
    for (const [name, value] of [["valuemin", start + 1], ["valuemax", stop], ["valuenow", at + 1], ["valuetext", words]] as const) {
      this.element.setAttribute(`aria-${name}`, String(value));
    }
    const [op = "", of = "", held = "", where = ""] = this.#chart.reading(point);
    this.readout.replaceChildren(html("span", {}, html("b", {}, op), of), html("span", {}, held), html("span", {}, where));
    this.readout.title = point === null ? HINT : words;
  }

  draw(): void {
    const { plot, points } = this.#chart;
    const parts: SVGElement[] = [];
    const middle = (point: number): number => (plot.x(edge(points, point)) + plot.x(edge(points, point + 1))) / 2;
    const at = this.point === null ? null : (points.at[this.point] ?? null);
    if (this.#anchor !== null && at !== null) {
      const [from, to] = this.#part(at);
      parts.push(svg("rect", { class: "lz-chart-part", x: plot.x(from), y: plot.top, width: plot.x(to) - plot.x(from), height: plot.bottom - plot.top }));
    }
    const upright = (name: string, point: number): void => {
      parts.push(svg("path", { class: name, d: `M${middle(point)},${plot.top}V${plot.bottom}` }));
    };
    if (this.#chosen !== null && this.#chosen >= plot.start && this.#chosen < plot.stop) upright("lz-cursor", pointAt(points, this.#chosen));
    if (this.point !== null) {
      upright("lz-crosshair", this.point);
      const all = points.bytes.reduce((sum, series, n) => sum + (this.#chart.shown[n] ? (series[this.point ?? 0] ?? 0) : 0), 0);
      parts.push(svg("path", { class: "lz-crosshair", d: `M${plot.left},${plot.y(all)}H${plot.right}` }));
    }
    this.marks.replaceChildren(...parts);
  }

  #x(event: MouseEvent): number {
    const box = this.#chart.svg.getBoundingClientRect();
    const wide = this.#chart.svg.viewBox.baseVal?.width || box.width || 1;
    return ((event.clientX - box.left) * wide) / (box.width || wide);
  }

  /** The first point of the cursor: the chosen one, otherwise the middle. */
  #start(): number {
    const { points } = this.#chart;
    return this.#chosen !== null ? pointAt(points, this.#chosen) : Math.floor(points.at.length / 2);
  }

  read(point: number | null): void {
    if (point === this.point) {
      if (this.#pressed !== null) this.draw();
      return;
    }
    this.point = point;
    this.tell();
    this.draw();
    this.#events.read();
  }

  private choose(): void {
    const at = this.point === null ? undefined : this.#chart.points.at[this.point];
    if (at === undefined) return;
    this.#events.choose(at);
    this.#chosen = at;
    this.draw();
  }

  /** The selected range up to and including a position. */
  #part(at: number): [number, number] {
    const from = this.#anchor ?? at;
    const last = edge(this.#chart.points, pointAt(this.#chart.points, Math.max(from, at)) + 1);
    return [edge(this.#chart.points, pointAt(this.#chart.points, Math.min(from, at))), last];
  }

  private zoom(): void {
    const at = this.point === null ? undefined : this.#chart.points.at[this.point];
    if (at === undefined || this.#anchor === null) return;
    const [start, stop] = this.#part(at);
    this.#anchor = null;
    this.#events.zoom(start, stop);
  }

  /** Handles a key; returns whether it has a meaning here. */
  #key(event: KeyboardEvent): boolean {
    if (event.altKey || event.ctrlKey || event.metaKey) return false;
    const { points } = this.#chart;
    const last = points.at.length - 1;
    const now = this.point ?? this.#start();
    const to: Record<string, number> = {
      ArrowRight: now + 1,
      ArrowUp: now + 1,
      ArrowLeft: now - 1,
      ArrowDown: now - 1,
      PageUp: now + 10,
      PageDown: now - 10,
      Home: 0,
      End: last,
    };
    const next = to[event.key];
    if (next !== undefined) {
      if (!event.shiftKey) this.#anchor = null;
      else this.#anchor ??= points.at[now] ?? null;
      const clamped = Math.min(Math.max(next, 0), last);
      if (clamped === this.point) {
        this.tell();
        this.draw();
      } else this.read(clamped);
      return true;
    }
    if (event.key === "Enter") {
      if (this.#anchor !== null) this.zoom();
      else {
        this.point = now;
        this.choose();
      }
      return true;
    }
    if (event.key !== "Escape") return false;
    if (this.#anchor !== null) {
      this.#anchor = null;
      this.tell();
      this.draw();
      return true;
    }
    return this.#events.back();
  }
}
