// The graph: boxes and edges in an SVG that pans and zooms, groups that open in place, what is selected
// and what lights up.

import { select } from "d3-selection";
import { zoom, zoomIdentity, zoomTransform, type ZoomTransform } from "d3-zoom";
import { html, shorten, svg } from "./dom";
import type { Arrangement, Frame, Scene } from "./scene";
import type { Flow } from "./types";

const LEAST_HEIGHT = 240;
const MOST_HEIGHT = 900;
const LEGIBLE = 0.8; // the scale that lanes are wrapped for
const LEAST_SCALE = 0.62; // of the first view

export interface GraphEvents {
  /** A box was clicked (or chosen by keyboard). */
  choose(id: string): void;
  /** The empty background was clicked. */
  clear(): void;
}

export class GraphView {
  readonly element: HTMLElement;
  readonly svg: SVGSVGElement;
  private readonly content = svg("g", { class: "lz-content" });
  private readonly behaviour = zoom<SVGSVGElement, unknown>();
  private arrangement: Arrangement | null = null;
  private frames = new Map<string, Frame>();
  private selected: string | null = null;
  private lit = new Map<string, string>();
  private found = new Set<string>();
  private flows: Flow[] = [];
  private width = 0;
  private touched = false; // the reader has panned or zoomed: the view is theirs

  constructor(
    private readonly scene: Scene,
    events: GraphEvents,
  ) {
    this.svg = svg(
      "svg",
      { class: "lz-graph", role: "group", "aria-label": "Recorded graph", tabindex: 0 },
      this.content,
    );
    const zoomIn = html("button", { type: "button", "aria-label": "Zoom in", title: "Zoom in" }, "+");
    const zoomOut = html("button", { type: "button", "aria-label": "Zoom out", title: "Zoom out" }, "−");
    this.element = html(
      "div",
      { class: "lz-graph-view" },
      this.svg,
      html("div", { class: "lz-zoom" }, zoomIn, zoomOut),
    );
    const target = select(this.svg);
    this.behaviour
      .scaleExtent([0.03, 4])
      .clickDistance(4)
      // The wheel scrolls the notebook until the graph was clicked into, or with Ctrl held.
      .filter((event: Event) => {
        if (event.type === "wheel") {
          return (event as WheelEvent).ctrlKey || this.element.contains(document.activeElement);
        }
        return !(event as MouseEvent).ctrlKey && (event as MouseEvent).button === 0;
      })
      .on("zoom", (event: { transform: ZoomTransform; sourceEvent: unknown }) => {
        if (event.sourceEvent) this.touched = true;
        this.content.setAttribute("transform", event.transform.toString());
      });
    target.call(this.behaviour).on("dblclick.zoom", null);
    zoomIn.addEventListener("click", () => {
      target.call(this.behaviour.scaleBy, 1.3);
    });
    zoomOut.addEventListener("click", () => {
      target.call(this.behaviour.scaleBy, 1 / 1.3);
    });
    this.svg.addEventListener("click", (event) => {
      const id = nodeOf(event.target);
      if (id === null) events.clear();
      else events.choose(id);
    });
    this.svg.addEventListener("keydown", (event) => {
      const id = nodeOf(event.target);
      if (id !== null && (event.key === "Enter" || event.key === " ")) {
        event.preventDefault();
        events.choose(id);
        this.focus(id);
      }
      const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
      if (step) {
        event.preventDefault();
        const [dx = 0, dy = 0] = step;
        target.call(this.behaviour.translateBy, dx / this.transform.k, dy / this.transform.k);
      }
      if (event.key === "+" || event.key === "-") target.call(this.behaviour.scaleBy, event.key === "+" ? 1.3 : 1 / 1.3);
      if (event.key === "Escape") events.clear();
    });
  }

  get transform(): ZoomTransform {
    return zoomTransform(this.svg);
  }

  /** The view's width in pixels has become known or has changed. */
  resize(width: number): void {
    if (width < 10 || Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.draw();
    if (!this.touched) this.home();
  }

  /** Draws anew; the box `anchor`, if it is there before and after, stays where it is on screen. */
  draw(anchor?: string): void {
    if (this.width === 0) return;
    const before = anchor !== undefined ? this.frames.get(anchor) : undefined;
    const arrangement = this.scene.arrange(this.width / LEGIBLE);
    this.arrangement = arrangement;
    this.frames = new Map(arrangement.frames.map((frame) => [frame.box.id, frame]));
    this.content.replaceChildren(...this.picture(arrangement));
    this.mark();
    const after = anchor !== undefined ? this.frames.get(anchor) : undefined;
    const { x, y, k } = this.transform;
    if (!before || !after) {
      if (!this.touched) this.home();
    } else if (this.touched) {
      this.grow(k);
      this.move(zoomIdentity.translate(x + (before.x - after.x) * k, y + (before.y - after.y) * k).scale(k));
    } else {
      // As wide as there is room for, the box about where it was, no empty space above or below.
      const scale = this.homeScale();
      const height = this.grow(scale);
      const top = y + before.y * k - after.y * scale;
      const lowest = Math.min(height - 12 - arrangement.height * scale, 12);
      this.move(zoomIdentity.translate(this.homeLeft(scale), Math.min(Math.max(top, lowest), 12)).scale(scale));
    }
  }

  /** The whole picture in view. */
  fit(): void {
    const { arrangement } = this;
    if (!arrangement) return;
    this.touched = true;
    const height = this.grow(this.homeScale());
    const k = Math.min((this.width - 24) / arrangement.width, (height - 24) / arrangement.height, 1);
    this.move(
      zoomIdentity
        .translate((this.width - arrangement.width * k) / 2, Math.max((height - arrangement.height * k) / 2, 12))
        .scale(k),
    );
  }

  /** The first view: all lanes side by side, from the top, at a size that can be read. */
  home(): void {
    const { arrangement } = this;
    if (!arrangement) return;
    this.touched = false;
    const k = this.homeScale();
    this.grow(k);
    this.move(zoomIdentity.translate(this.homeLeft(k), 12).scale(k));
  }

  private homeScale(): number {
    return Math.min(1, Math.max((this.width - 24) / (this.arrangement?.width || 1), LEAST_SCALE));
  }

  private homeLeft(k: number): number {
    return Math.max((this.width - (this.arrangement?.width ?? 0) * k) / 2, 12);
  }

  select(id: string | null): void {
    this.selected = id;
    this.flows = [];
    this.mark();
  }

  /** Draws what flows between the selected box and other lanes: saved activations, gradients. */
  overlay(flows: Flow[]): void {
    this.flows = flows;
    this.mark();
  }

  /** Lights up boxes: id of a box -> words for it. */
  light(boxes: Map<string, string>): void {
    this.lit = boxes;
    this.mark();
  }

  /** Marks what a search has found; open groups are not marked, what is in them is. */
  find(ids: readonly string[]): void {
    this.found = new Set(ids);
    this.mark();
  }

  focus(id: string): void {
    this.boxElement(id)?.focus({ preventScroll: true });
  }

  /** Moves the view so that the box is in the middle, at a size that can be read. */
  center(id: string): void {
    const frame = this.frames.get(id);
    if (!frame) return;
    this.touched = true;
    const k = Math.max(this.transform.k, LEGIBLE);
    const height = this.svg.clientHeight || LEAST_HEIGHT;
    this.move(
      zoomIdentity
        .translate(
          this.width / 2 - (frame.x + frame.width / 2) * k,
          height / 2 - (frame.y + Math.min(frame.height / 2, 100)) * k,
        )
        .scale(k),
    );
  }

  get size(): { width: number; height: number } {
    return { width: this.arrangement?.width ?? 0, height: this.arrangement?.height ?? 0 };
  }

  private grow(k: number): number {
    const wanted = (this.arrangement?.height ?? 0) * k + 24;
    const height = Math.round(Math.min(Math.max(wanted, LEAST_HEIGHT), MOST_HEIGHT));
    this.svg.style.height = `${height}px`;
    return height;
  }

  private move(transform: ZoomTransform): void {
    select(this.svg).call(this.behaviour.transform, transform);
  }

  private boxElement(id: string): SVGGElement | null {
    return this.content.querySelector<SVGGElement>(`[data-box="${CSS.escape(id)}"]`);
  }

  private picture(arrangement: Arrangement): SVGElement[] {
    const open = arrangement.frames.filter((frame) => frame.open);
    const closed = arrangement.frames.filter((frame) => !frame.open);
    const edges = arrangement.lines.map((line) => {
      const { x, y, down } = line.tip;
      const back = down ? y - 7 : y + 7;
      return svg(
        "g",
        { class: "lz-edge", "data-from": line.from, "data-to": line.to },
        svg("title", {}, line.label),
        svg("path", { class: "lz-edge-reach", d: line.path }),
        svg("path", { class: "lz-edge-line", d: line.path }),
        svg("path", { class: "lz-edge-tip", d: `M${x - 4},${back}L${x},${y}L${x + 4},${back}Z` }),
      );
    });
    const labels = arrangement.lines.flatMap((line) =>
      line.labelAt
        ? [svg("text", { class: "lz-edge-label", x: line.labelAt[0], y: line.labelAt[1] }, line.label)]
        : [],
    );
    return [
      ...open.map((frame) => openBox(frame)),
      ...edges,
      ...labels,
      ...closed.map((frame) => closedBox(frame)),
      svg("g", { class: "lz-flows" }),
    ];
  }

  private mark(): void {
    for (const element of this.content.querySelectorAll(".lz-box")) {
      const id = element.getAttribute("data-box") ?? "";
      element.classList.toggle("lz-selected", id === this.selected);
      element.classList.toggle("lz-lit", this.lit.has(id));
      element.classList.toggle("lz-found", this.found.has(id) && !element.classList.contains("lz-open"));
    }
    this.content.classList.toggle("lz-some-lit", this.lit.size > 0);
    for (const edge of this.content.querySelectorAll(".lz-edge")) {
      const touches =
        this.selected !== null &&
        (edge.getAttribute("data-from") === this.selected || edge.getAttribute("data-to") === this.selected);
      edge.classList.toggle("lz-selected", touches);
    }
    const layer = this.content.querySelector(".lz-flows");
    layer?.replaceChildren(...this.flowLines());
  }

  private flowLines(): SVGElement[] {
    const from = this.selected !== null ? this.frames.get(this.selected) : undefined;
    if (!from) return [];
    const drawn = new Set<string>();
    const result: SVGElement[] = [];
    for (const flow of this.flows) {
      const id = this.scene.visible(flow.chain);
      const to = id !== null ? this.frames.get(id) : undefined;
      if (!to || to === from || drawn.has(`${to.box.id}${flow.out}`)) continue;
      drawn.add(`${to.box.id}${flow.out}`);
      const right = to.x > from.x;
      const sx = right ? from.x + from.width : from.x;
      const ex = right ? to.x : to.x + to.width;
      const sy = from.y + Math.min(from.height / 2, 24);
      const ey = to.y + Math.min(to.height / 2, 24);
      const reach = Math.max(Math.abs(ex - sx) / 2, 40) * (right ? 1 : -1);
      const path = `M${sx},${sy}C${sx + reach},${sy} ${ex - reach},${ey} ${ex},${ey}`;
      result.push(
        svg(
          "g",
          { class: "lz-flow" },
          svg("title", {}, `${flow.label} · ${flow.bytes}`),
          svg("path", { d: path }),
          svg("circle", { cx: flow.out ? ex : sx, cy: flow.out ? ey : sy, r: 4 }),
          svg("rect", { x: to.x - 2, y: to.y - 2, width: to.width + 4, height: to.height + 4, rx: 8 }),
        ),
      );
    }
    return result;
  }
}

function nodeOf(target: EventTarget | null): string | null {
  const box = target instanceof Element ? target.closest("[data-node]") : null;
  return box?.getAttribute("data-node") ?? null;
}

function attributes(frame: Frame, kind: string): Record<string, string | number | boolean | undefined> {
  const { box } = frame;
  const repeats = box.repeats ? `, ${box.repeats} times` : "";
  return {
    class: `lz-box lz-${kind} lz-phase-${box.phase}`,
    "data-box": box.id,
    "data-node": box.id,
    "data-kind": box.kind,
    "data-op": box.op ?? box.label,
    "data-phase": box.phase,
    role: "button",
    tabindex: 0,
    "aria-expanded": box.group ? String(frame.open) : undefined,
    "aria-label": `${box.kind} ${box.label}${repeats}, ${box.sub}`,
    transform: `translate(${frame.x.toFixed(1)},${frame.y.toFixed(1)})`,
  };
}

function openBox(frame: Frame): SVGElement {
  const { box, width, height } = frame;
  const card = svg("rect", { class: "lz-frame", width, height, rx: 10 });
  if (box.kind === "lane") {
    const arrow = { forward: " ↓", backward: " ↑", optimizer: "", other: "" }[box.phase];
    return svg(
      "g",
      {
        class: `lz-lane lz-phase-${box.phase}`,
        "data-lane": box.phase,
        transform: `translate(${frame.x.toFixed(1)},${frame.y.toFixed(1)})`,
      },
      card,
      svg("text", { class: "lz-lane-title", x: 18, y: 27 }, box.label + arrow),
      svg("text", { class: "lz-sub", x: 18, y: 45 }, shorten(box.sub, width - 28, 11), svg("title", {}, box.sub)),
    );
  }
  const label = box.repeats ? `${box.label} × ${box.repeats}` : box.label;
  return svg(
    "g",
    attributes(frame, "open"),
    svg("title", {}, `${label} (${box.sub})`),
    card,
    svg("path", { class: "lz-fold", d: "M14,15l5,6l5,-6" }),
    svg("text", { class: "lz-frame-title", x: 32, y: 23 }, shorten(label, width - 44, 12.5, "bold")),
  );
}

function closedBox(frame: Frame): SVGElement {
  const { box, width, height } = frame;
  const parts: SVGElement[] = [svg("title", {}, `${box.label} (${box.sub})${box.repeats ? ` × ${box.repeats}` : ""}`)];
  const pill = box.kind === "input" || box.kind === "output";
  const card = (x: number): SVGElement =>
    svg("rect", { class: x ? "lz-card lz-behind" : "lz-card", x, y: x, width, height, rx: pill ? height / 2 : 6 });
  if (pill) {
    parts.push(card(0), svg("circle", { class: `lz-role-${box.role ?? "output"}`, cx: 17, cy: 15, r: 4 }));
    parts.push(svg("text", { class: "lz-label", x: 28, y: 18.5 }, shorten(box.label, width - 42, 11.5, "bold")));
    parts.push(svg("text", { class: "lz-sub", x: 28, y: 32 }, shorten(box.sub, width - 42, 11)));
    return svg("g", attributes(frame, "tensor"), ...parts);
  }
  if (box.kind === "op") {
    parts.push(card(0));
    parts.push(svg("text", { class: "lz-label", x: 12, y: 18 }, shorten(box.label, width - 22, 11.5, "mono")));
    parts.push(svg("text", { class: "lz-sub", x: 12, y: 33.5 }, shorten(box.sub, width - 22, 11)));
    return svg("g", attributes(frame, "op"), ...parts);
  }
  if (box.kind === "sync") {
    parts.push(card(0));
    parts.push(svg("text", { class: "lz-label", x: 12, y: 18 }, shorten(box.label, width - 24, 11.5, "bold")));
    parts.push(svg("text", { class: "lz-sub", x: 12, y: 33.5 }, shorten(box.sub, width - 24, 11)));
    return svg("g", attributes(frame, "sync"), ...parts);
  }
  const badge = box.repeats ? `× ${box.repeats}` : "";
  const wide = badge.length * 7.5 + 12;
  if (badge) parts.push(card(6), card(3));
  parts.push(card(0), svg("path", { class: "lz-bar", d: `M4,7v${height - 14}` }));
  const room = width - 28 - (badge ? wide + 4 : 0);
  parts.push(svg("text", { class: "lz-label", x: 14, y: 19.5 }, shorten(box.label, room, 12.5, "bold")));
  parts.push(svg("text", { class: "lz-sub", x: 14, y: 36 }, shorten(box.sub, width - 26, 11)));
  if (badge) {
    parts.push(svg("rect", { class: "lz-badge", x: width - wide - 6, y: 6, width: wide, height: 18, rx: 9 }));
    parts.push(svg("text", { class: "lz-badge-text", x: width - wide / 2 - 6, y: 19 }, badge));
  }
  return svg("g", attributes(frame, "group"), ...parts);
}
