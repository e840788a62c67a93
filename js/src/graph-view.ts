// The graph: boxes and edges in an SVG that pans and zooms, groups that open in place, what is selected
// and what lights up.  Drawing boxes and edges, the camera and the legend have modules of their own.

import { bandOf, BoxDrawing, sameBand } from "./boxes";
import { Camera, LEGIBLE } from "./camera";
import { Colours, type Colouring } from "./colours";
import { html, svg } from "./dom";
import { Edges } from "./edges";
import { Legend } from "./legend";
import type { Arrangement, Frame, Scene } from "./scene";
import type { Flow } from "./types";

export interface GraphEvents {
  /** A box was clicked (or chosen by keyboard). */
  choose(id: string): void;
  /** The empty background was clicked. */
  clear(): void;
}

export class GraphView {
  readonly element: HTMLElement;
  readonly svg: SVGSVGElement;
  readonly legend: Legend;
  private readonly content = svg("g", { class: "lz-content" });
  private readonly openLayer = svg("g", {});
  private readonly closedLayer = svg("g", {});
  private readonly flowLayer = svg("g", { class: "lz-flows" });
  private readonly edges = new Edges();
  private readonly camera: Camera;
  private readonly colours = new Colours();
  private arrangement: Arrangement | null = null;
  private frames = new Map<string, Frame>();
  private drawings = new Map<string, BoxDrawing>();
  private band = bandOf(1);
  private selected: string | null = null;
  private lit = new Map<string, string>();
  private found = new Set<string>();
  private flows: Flow[] = [];

  constructor(
    private readonly scene: Scene,
    events: GraphEvents,
  ) {
    this.content.append(this.openLayer, this.edges.element, this.edges.labels, this.closedLayer, this.flowLayer);
    this.svg = svg(
      "svg",
      { class: "lz-graph", role: "group", "aria-label": "Recorded graph", tabindex: 0 },
      this.content,
    );
    this.legend = new Legend((by) => {
      this.colourBy(by);
    });
    const zoomIn = html("button", { type: "button", "aria-label": "Zoom in", title: "Zoom in" }, "+");
    const zoomOut = html("button", { type: "button", "aria-label": "Zoom out", title: "Zoom out" }, "−");
    const stage = html("div", { class: "lz-graph-stage" }, this.svg, html("div", { class: "lz-zoom" }, zoomIn, zoomOut));
    this.element = html("div", { class: "lz-graph-view" }, stage, this.legend.element);
    this.camera = new Camera(
      this.svg,
      this.content,
      () => this.element.contains(document.activeElement),
      ({ k }) => {
        this.rewrite(k);
      },
    );
    zoomIn.addEventListener("click", () => {
      this.camera.zoomBy(1.3);
    });
    zoomOut.addEventListener("click", () => {
      this.camera.zoomBy(1 / 1.3);
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
        this.camera.panBy(dx, dy);
      }
      if (event.key === "+" || event.key === "-") this.camera.zoomBy(event.key === "+" ? 1.3 : 1 / 1.3);
      if (event.key === "Escape") events.clear();
    });
  }

  /** The view's width in pixels has become known or has changed. */
  resize(width: number): void {
    if (width < 10 || Math.abs(width - this.camera.width) < 1) return;
    this.camera.width = width;
    this.draw();
    if (!this.camera.touched) this.home();
  }

  /** Draws anew; the box `anchor`, if it is there before and after, stays where it is on screen. */
  draw(anchor?: string): void {
    const { camera } = this;
    if (camera.width === 0) return;
    const before = anchor !== undefined ? this.frames.get(anchor) : undefined;
    const arrangement = this.scene.arrange(camera.width / LEGIBLE);
    this.arrangement = arrangement;
    this.frames = new Map(arrangement.frames.map((frame) => [frame.box.id, frame]));
    camera.picture = arrangement;
    this.drawBoxes(arrangement.frames);
    this.edges.draw(arrangement.lines);
    this.recolour();
    this.mark();
    const after = anchor !== undefined ? this.frames.get(anchor) : undefined;
    if (before && after) camera.keep(before, after);
    else if (!camera.touched) this.home();
  }

  fit(): void {
    if (this.arrangement) this.camera.fit();
  }

  home(): void {
    if (this.arrangement) this.camera.home();
  }

  /** Moves the view so that the box is in the middle, at a size that can be read. */
  center(id: string): void {
    const frame = this.frames.get(id);
    if (frame) this.camera.center(frame);
  }

  colourBy(by: Colouring): void {
    this.colours.by = by;
    this.recolour();
  }

  /** States, times or alarms of these boxes have changed. */
  tell(ids: Iterable<string>): void {
    for (const id of ids) this.drawings.get(id)?.tell();
    if (this.colours.by === "time") this.recolour();
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

  /** Brings the first of these boxes that is drawn into view, unless one of them is. */
  show(ids: readonly string[]): void {
    const { x, y, k } = this.camera.transform;
    const drawn = ids.map((id) => this.frames.get(id)).filter((frame) => frame && !frame.open);
    const inView = drawn.some((frame) => {
      const left = (frame?.x ?? 0) * k + x;
      const top = (frame?.y ?? 0) * k + y;
      return left >= 0 && top >= 0 && left < this.camera.width - 40 && top < this.camera.height - 20;
    });
    const first = drawn[0];
    if (first && !inView) this.center(first.box.id);
  }

  /** Marks what a search has found; open groups are not marked, what is in them is. */
  find(ids: readonly string[]): void {
    this.found = new Set(ids);
    this.mark();
  }

  focus(id: string): void {
    this.drawings.get(id)?.element.focus({ preventScroll: true });
  }

  get size(): { width: number; height: number } {
    return { width: this.arrangement?.width ?? 0, height: this.arrangement?.height ?? 0 };
  }

  private drawBoxes(frames: readonly Frame[]): void {
    const next = new Map<string, BoxDrawing>();
    for (const frame of frames) {
      const known = this.drawings.get(frame.box.id);
      const drawing = known?.fits(frame) ? known : new BoxDrawing(frame);
      drawing.place(frame);
      drawing.write(this.band);
      next.set(frame.box.id, drawing);
    }
    for (const [id, drawing] of this.drawings) if (next.get(id) !== drawing) drawing.element.remove();
    // Outer groups lie below inner ones, and all in the order in which they are read.
    const last = new Map<Element, Element | null>();
    for (const frame of frames) {
      const layer = frame.open ? this.openLayer : this.closedLayer;
      const element = next.get(frame.box.id)?.element;
      const before = last.get(layer) ?? null;
      const place = before ? before.nextSibling : layer.firstChild;
      if (element && element !== place) layer.insertBefore(element, place);
      if (element) last.set(layer, element);
    }
    this.drawings = next;
  }

  private rewrite(scale: number): void {
    const band = bandOf(scale);
    if (sameBand(band, this.band)) return;
    this.band = band;
    this.edges.labels.classList.toggle("lz-away", band.grow > 1);
    for (const drawing of this.drawings.values()) drawing.write(band);
  }

  private recolour(): void {
    const closed = [...this.frames.values()].filter((frame) => !frame.open && frame.box.kind !== "input" && frame.box.kind !== "output");
    this.colours.learn(this.scene.boxes.values(), closed.map((frame) => frame.box));
    for (const drawing of this.drawings.values()) drawing.paint(this.colours.style(drawing.box));
    this.legend.showColours(this.colours);
  }

  private mark(): void {
    for (const [id, { element }] of this.drawings) {
      element.classList.toggle("lz-selected", id === this.selected);
      element.classList.toggle("lz-lit", this.lit.has(id));
      element.classList.toggle("lz-found", this.found.has(id) && !element.classList.contains("lz-open"));
    }
    this.content.classList.toggle("lz-some-lit", this.lit.size > 0);
    this.edges.mark(this.selected);
    this.flowLayer.replaceChildren(...this.flowLines());
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
