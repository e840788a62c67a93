// The graph: boxes and edges in an SVG that pans and zooms, groups that open in place, what is selected
// and what lights up.  What it is made of has modules of its own: boxes, edges, camera, colours and legend,
// keyboard, minimap, motion, relations.

import { bandOf, BoxDrawing, nameOf, SILENT } from "./boxes";
import { Camera, LEGIBLE } from "./camera";
import { Colours, type Colouring } from "./colors";
import { html, svg } from "../page/dom";
import { Edges } from "./edges";
import { neighbor, type Arrow } from "./keyboard";
import { Legend } from "./legend";
import { Minimap } from "./minimap";
import { animate } from "./motion";
import { relationLines } from "./relations";
import type { Arrangement, Frame, Scene } from "../model/scene";
import type { Relation } from "../model/types";

const FAR = 0.25; // below this scale what is small in a box is left out

export interface GraphEvents {
  /** A box was clicked or chosen by keyboard; `open`: a group is to open or to close. */
  choose(id: string, open: boolean): void;
  /** The innermost open group at the box is to be closed; where there is none, nothing is selected any more. */
  close(id: string): void;
  /** The empty background was clicked. */
  clear(): void;
  /** Another box is the selected one now. */
  selected(id: string | null): void;
}

export class GraphView {
  readonly element: HTMLElement;
  readonly svg: SVGSVGElement;
  readonly legend: Legend;
  private readonly content = svg("g", { class: "lz-content" });
  private readonly openLayer = svg("g", {});
  private readonly closedLayer = svg("g", {});
  private readonly relationLayer = svg("g", { class: "lz-relations" });
  private readonly edges = new Edges();
  private readonly readout = html("div", { class: "lz-told", "aria-hidden": "true" });
  private readonly camera: Camera;
  private readonly minimap: Minimap;
  private readonly colours = new Colours();
  private arrangement: Arrangement | null = null;
  private frames = new Map<string, Frame>();
  private drawings = new Map<string, BoxDrawing>();
  private scale = 0; // that words are written for
  private selected: string | null = null;
  private lit = new Map<string, string>();
  private found = new Set<string>();
  private relations: Relation[] = [];
  private current: string | null = null; // the one box that the Tab key leads to

  constructor(
    private readonly scene: Scene,
    private readonly events: GraphEvents,
  ) {
    this.content.append(this.openLayer, this.edges.element, this.edges.labels, this.closedLayer, this.relationLayer);
    this.svg = svg(
      "svg",
      {
        class: "lz-graph",
        role: "group",
        "aria-label": "Recorded graph. Arrow keys go along the edges, Enter opens and closes a group, Escape closes the one around",
        tabindex: -1,
      },
      this.content,
    );
    this.legend = new Legend((by) => {
      this.colourBy(by);
    });
    const zoomIn = html("button", { type: "button", "aria-label": "Zoom in", title: "Zoom in" }, "+");
    const zoomOut = html("button", { type: "button", "aria-label": "Zoom out", title: "Zoom out" }, "−");
    this.camera = new Camera(this.svg, this.content, () => {
      this.rewrite();
      this.minimap.follow();
    });
    this.minimap = new Minimap(this.camera);
    const stage = html("div", { class: "lz-graph-stage" }, this.svg, this.minimap.element);
    const foot = html("div", { class: "lz-graph-foot" }, this.legend.element, this.readout, html("div", { class: "lz-zoom" }, zoomIn, zoomOut));
    this.element = html("div", { class: "lz-graph-view" }, stage, foot);
    zoomIn.addEventListener("click", () => {
      this.camera.zoomBy(1.3);
    });
    zoomOut.addEventListener("click", () => {
      this.camera.zoomBy(1 / 1.3);
    });
    this.svg.addEventListener("click", (event) => {
      const id = nodeOf(event.target);
      if (id === null) events.clear();
      else {
        this.settleOn(id);
        events.choose(id, true);
      }
    });
    this.svg.addEventListener("keydown", (event) => {
      this.key(event);
    });
    for (const name of ["pointerover", "focusin"] as const) {
      this.svg.addEventListener(name, (event) => {
        this.read(event.target);
      });
    }
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
    const frames = this.frames;
    const view = camera.view;
    const before = anchor !== undefined ? frames.get(anchor) : undefined;
    const arrangement = this.scene.arrange(camera.width / LEGIBLE);
    this.arrangement = arrangement;
    this.frames = new Map(arrangement.frames.map((frame) => [frame.box.id, frame]));
    camera.picture = arrangement;
    this.drawBoxes(arrangement.frames);
    const lines = this.edges.draw(arrangement.lines);
    this.recolour();
    this.mark();
    this.minimap.draw(arrangement);
    const after = anchor !== undefined ? this.frames.get(anchor) : undefined;
    if (before && after) {
      camera.keep(before, after);
      if (after.open) camera.makeRoom(after);
      const moved = arrangement.frames.flatMap((frame) => {
        const element = this.drawings.get(frame.box.id)?.element;
        return element ? [{ element, x: frame.x, y: frame.y, before: frames.get(frame.box.id) }] : [];
      });
      animate(moved, lines, view, camera.view);
    } else if (!camera.touched) this.home();
    this.scale = 0;
    this.rewrite();
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
    this.relations = [];
    if (id !== null) this.settleOn(id);
    this.events.selected(id);
    this.mark();
  }

  /** Lights up what the selected box has to do with. */
  relate(relations: Relation[]): void {
    this.relations = relations;
    this.mark();
  }

  /** Lights up boxes: id of a box -> words for it. */
  light(boxes: Map<string, string>): void {
    this.lit = boxes;
    this.mark();
  }

  /** Brings the first of these boxes that is drawn into view, unless one of them is. */
  show(ids: readonly string[]): void {
    const { x, y, k } = this.camera.view;
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
    this.settleOn(id);
    this.drawings.get(id)?.element.focus({ preventScroll: true });
  }

  get size(): { width: number; height: number } {
    return { width: this.arrangement?.width ?? 0, height: this.arrangement?.height ?? 0 };
  }

  private drawBoxes(frames: readonly Frame[]): void {
    const focused = this.svg.querySelector(":focus")?.getAttribute("data-box") ?? null;
    const next = new Map<string, BoxDrawing>();
    for (const frame of frames) {
      const known = this.drawings.get(frame.box.id);
      const drawing = known?.fits(frame) ? known : new BoxDrawing(frame);
      drawing.place(frame);
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
    // The Tab key's box and the focus stay, or go to the group that has closed over them.
    const near = (id: string | null): string | null => {
      let at = id ?? undefined;
      while (at !== undefined && !next.has(at)) at = this.scene.parentOf(at);
      return at ?? null;
    };
    const first = frames.find((frame) => frame.box.kind !== "lane")?.box.id ?? null;
    this.settleOn(near(this.current) ?? near(this.selected) ?? first);
    const refocused = near(focused);
    if (refocused !== null && !this.svg.querySelector(":focus")) this.focus(refocused);
  }

  private settleOn(id: string | null): void {
    if (this.current !== null) this.drawings.get(this.current)?.element.setAttribute("tabindex", "-1");
    const next = id !== null ? this.drawings.get(id)?.element : undefined;
    if (next?.hasAttribute("data-node")) {
      next.setAttribute("tabindex", "0");
      this.current = id;
    }
  }

  private key(event: KeyboardEvent): void {
    const { key } = event;
    const id = nodeOf(event.target);
    if ((event.ctrlKey || event.metaKey || event.altKey) && !key.startsWith("Arrow")) return;
    if (key === "Enter" || key === " ") {
      if (id === null) return;
      this.events.choose(id, key === "Enter");
      this.focus(id);
    } else if (key.startsWith("Arrow") && (event.shiftKey || event.ctrlKey)) {
      const [dx, dy] = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[key] ?? [0, 0];
      this.camera.panBy(dx ?? 0, dy ?? 0);
    } else if (key.startsWith("Arrow")) {
      const to = this.arrangement ? neighbor(this.arrangement, id ?? this.current ?? "", key as Arrow) : null;
      const frame = to !== null ? this.frames.get(to) : undefined;
      if (frame) {
        this.camera.reveal(frame);
        this.focus(frame.box.id);
      }
    } else if (key === "+" || key === "-") this.camera.zoomBy(key === "+" ? 1.3 : 1 / 1.3);
    else if (key === "Escape") {
      if (id === null) this.events.clear();
      else this.events.close(id);
    } else return;
    event.preventDefault();
  }

  /** Says in full what the pointer or the focus is on: what flows along an edge, the whole name of a box. */
  private read(target: EventTarget | null): void {
    const element = target instanceof Element ? target.closest<SVGElement>(".lz-edge, [data-node]") : null;
    const name = (id: string | undefined): string => {
      const box = this.scene.boxes.get(id ?? "");
      return box ? nameOf(box) : "";
    };
    const { from, to } = element?.dataset ?? {};
    const title = element?.querySelector("title")?.textContent ?? "";
    const words = from !== undefined ? `${name(from)} → ${name(to)}: ${title}` : title;
    this.readout.textContent = words;
    this.readout.title = words;
  }

  /** Writes the words of the boxes in view as large as the scale needs them. */
  private rewrite(): void {
    const { x, y, k } = this.camera.view;
    const band = bandOf(k);
    const zoomed = k !== this.scale;
    this.scale = k;
    if (zoomed) {
      this.content.classList.toggle("lz-near", band.grow === 1);
      this.content.classList.toggle("lz-far", k < FAR);
    }
    const [left, top] = [(-x - 80) / k, (-y - 80) / k];
    const [right, bottom] = [(this.camera.width + 80 - x) / k, (this.camera.height + 80 - y) / k];
    for (const [id, frame] of this.frames) {
      const seen = frame.x < right && frame.x + frame.width > left && frame.y < bottom && frame.y + frame.height > top;
      if (seen || zoomed) this.drawings.get(id)?.write(seen ? band : SILENT);
    }
  }

  /** Has `make` see the graph with all its words, as large as they are at full size. */
  atFullSize<T>(make: () => T): T {
    this.content.classList.add("lz-near");
    this.content.classList.remove("lz-far");
    for (const drawing of this.drawings.values()) drawing.write(bandOf(1));
    const made = make();
    this.scale = 0;
    this.rewrite();
    return made;
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
    const from = this.selected !== null ? this.frames.get(this.selected) : undefined;
    const [lines, kinds] =
      from && this.arrangement ? relationLines(this.relations, from, this.frames, this.scene, this.arrangement) : [[], []];
    this.relationLayer.replaceChildren(...lines);
    this.legend.showRelations(kinds);
  }
}

function nodeOf(target: EventTarget | null): string | null {
  const box = target instanceof Element ? target.closest("[data-node]") : null;
  return box?.getAttribute("data-node") ?? null;
}
