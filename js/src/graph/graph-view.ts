// The graph: boxes and edges in an SVG that pans and zooms, groups that open in place, the selection, and highlights.
// Its parts are separate modules: boxes, edges, camera, colors, legend, arrow keys, minimap, animation, relations.

import { bandOf, BoxDrawing, SILENT } from "./boxes";
import { Camera } from "./camera";
import { Colors, noteKey, sum, type Coloring } from "./colors";
import { html, on, plainButton, svg } from "../page/dom";
import { Edges } from "./edges";
import type { Arrow } from "./arrow-keys";
import { keptBands } from "./saved-activations";
import { Legend } from "./legend";
import type { Minimap } from "./minimap";
import { deferredPart, whenLoaded } from "../page/load-deferred-bundle";
import { titleEnd, type Arrangement, type Frame, type Scene } from "../model/open-groups-and-layout";
import type { Differences, Held, Kept, Memory, Note, Relation, Span } from "../model/types";

const FAR = 0.25; // below this scale, small parts of a box are omitted

export interface GraphEvents {
  /** A box was clicked or chosen by keyboard; `open`: it is a group that should open or close. */
  choose(id: string, open: boolean): void;
  /** The innermost open group at the box should close; if there is none, the selection is cleared. */
  close(id: string): void;
  /** The empty background was clicked. */
  clear(): void;
  /** The open groups or the displayed number have changed. */
  drawn(): void;
  /** Numbers should be shown that have not been received yet. */
  numbers(by: Coloring): void;
  /** The selection has changed. */
  selected(id: string | null): void;
}

export class GraphView {
  readonly element: HTMLElement;
  readonly svg: SVGSVGElement;
  readonly legend: Legend;
  readonly #content = svg("g", "lz-content");
  readonly #openLayer = svg("g", {});
  readonly #closedLayer = svg("g", {});
  readonly #relationLayer = svg("g", "lz-relations");
  readonly #edges = new Edges();
  readonly #keptLayer = svg("g", { "aria-hidden": "true" });
  readonly #headLayer = svg("g", { class: "lz-heads", "aria-hidden": "true" });
  #kept: readonly Kept[] = [];
  readonly readout = html("div", { class: "lz-told", "aria-hidden": "true" });
  private readonly camera: Camera;
  #minimap: Minimap | null = null;
  readonly #colors = new Colors();
  #arrangement: Arrangement | null = null;
  #frames = new Map<string, Frame>();
  #drawings = new Map<string, BoxDrawing>();
  #peak: [text: string, chain: readonly string[]] = ["", []];
  readonly #flagLayer = svg("g", { class: "lz-peak-flag", "aria-hidden": "true" });
  #high = 0; // height of the view when the graph was drawn
  #scale = 0; // scale at which the text was written
  private selected: string | null = null;
  #lit = new Map<string, string>();
  #found = new Set<string>();
  #now: string | null = null; // the box whose op is at the chart cursor
  #relations: Relation[] = [];
  #current: string | null = null; // the single box that the Tab key reaches

  readonly #scene: Scene;
  readonly #events: GraphEvents;

  constructor(
    scene: Scene,
    events: GraphEvents,
  ) {
    this.#scene = scene;
    this.#events = events;
    // Lines of relations are drawn below the labels of edges.
    this.#content.append(this.#openLayer, this.#relationLayer, this.#edges.element, this.#keptLayer, this.#edges.labels, this.#headLayer, this.#closedLayer, this.#flagLayer);
    this.svg = svg(
      "svg",
      {
        class: "lz-graph",
        role: "group",
        "aria-label": "Recorded graph. Arrow keys follow the edges, Enter opens and closes a group, Escape closes the outer group",
        tabindex: -1,
      },
      this.#content,
    );
    this.legend = new Legend((by) => {
      this.colorBy(by);
    });
    const zoomIn = plainButton({ "aria-label": "Zoom in", title: "Zoom in" }, "+");
    const zoomOut = plainButton({ "aria-label": "Zoom out", title: "Zoom out" }, "−");
    this.camera = new Camera(this.svg, this.#content, () => {
      this.#rewrite();
      this.#minimap?.follow();
    });
    const stage = html("div", "lz-graph-stage", this.svg);
    whenLoaded(({ Minimap }) => {
      this.#minimap = new Minimap(this.camera);
      stage.append(this.#minimap.element);
      if (this.#arrangement) this.#minimap.draw(this.#arrangement);
    });
    const foot = html("div", "lz-graph-foot", this.legend.element, this.readout, html("div", "lz-zoom", zoomIn, zoomOut));
    this.element = html("div", "lz-graph-view", stage, foot);
    on(zoomIn, "click", () => {
      this.camera.zoomBy(1.3);
    });
    on(zoomOut, "click", () => {
      this.camera.zoomBy(1 / 1.3);
    });
    let clicked: string | null = null;
    let open = false;
    on(this.svg, "click", ({ target, detail }) => {
      // The second click of a double click refers to the first one's box, which may have moved. Clicks of assistive
      // technology have a click count of 0.
      const id = detail > 1 ? clicked : nodeOf(target);
      open = detail > 1 ? !open : !detail || !!(target as Element).closest(".lz-arrow, .lz-lane");
      const again = !open && id === clicked && id === this.selected;
      clicked = id;
      if (id === null || (again && detail === 1)) events.clear();
      else {
        this.#settleOn(id);
        events.choose(id, open);
      }
    });
    on(this.svg, "keydown", (event) => {
      this.#key(event);
    });
  }

  /** The size of the view in pixels is known or has changed. */
  resize(width: number): void {
    const { camera } = this;
    const high = this.svg.clientHeight;
    const wide = Math.abs(width - camera.width) >= 1;
    if (width < 10 || (!wide && high === this.#high)) return;
    this.#high = high;
    camera.width = width;
    if (wide) {
      this.draw();
      if (!camera.touched) this.home();
      return;
    }
    const selected = this.#frames.get(this.selected ?? "");
    if (selected && !selected.open) camera.reveal(selected);
    this.#rewrite();
    this.#minimap?.follow();
  }

  /** Redraws; the box `anchor`, if it exists before and after, keeps its position on screen. */
  draw(anchor?: string): void {
    const { camera } = this;
    if (camera.width === 0) return;
    const frames = this.#frames;
    const view = camera.view;
    const before = anchor !== undefined ? frames.get(anchor) : undefined;
    const arrangement = this.#scene.arrange(Infinity, camera.seen);
    if (this.#arrangement) this.#events.drawn();
    this.#arrangement = arrangement;
    this.#frames = new Map(arrangement.frames.map((frame) => [frame.box.id, frame]));
    camera.picture = arrangement;
    this.#drawBoxes(arrangement.frames);
    const lines = this.#edges.draw(arrangement.lines);
    this.showKept(this.#kept);
    this.#recolor();
    this.#mark();
    this.#flag();
    this.#minimap?.draw(arrangement);
    const after = anchor !== undefined ? this.#frames.get(anchor) : undefined;
    if (before && after) {
      camera.keep(before, after);
      // Groups open toward the right.
      if (after.rail) camera.reveal({ ...after, y: (20 - camera.view.y) / camera.view.k, height: 0 });
      const moved = arrangement.frames.flatMap((frame) => {
        const element = this.#drawings.get(frame.box.id)?.element;
        return element ? [{ element, x: frame.x, y: frame.y, before: frames.get(frame.box.id) }] : [];
      });
      deferredPart()?.animate(moved, lines, view, camera.view);
    } else if (!camera.touched) this.home();
    this.#scale = 0;
    this.#rewrite();
  }

  fit(): void {
    if (this.#arrangement) this.camera.fit();
  }

  home(): void {
    const { camera } = this;
    if (this.#arrangement) camera.home();
    const failed = this.#arrangement?.frames.find(({ box }) => box.kind === "error");
    if (!failed) return;
    camera.reveal(failed); // the user's search terms
    camera.touched = false;
  }

  /** Moves the view so that the box is in the center, at a legible size. */
  center(id: string): void {
    const frame = this.#frames.get(id);
    if (frame) this.camera.center(frame);
  }

  colorBy(by: Coloring): void {
    this.#colors.by = by;
    if (by === "time" || by === "flops") this.#events.numbers(by);
    this.repaint();
  }

  /** The user's annotations; a new one is shown immediately, and a removed one is no longer shown. */
  offer(notes: readonly Note[]): void {
    const colors = this.#colors;
    const known = new Map(colors.notes.map((note) => [note[0], String(note)]));
    const shown = colors.note;
    colors.notes = notes;
    this.legend.offer(notes);
    const [latest] = notes.at(-1) ?? [];
    if (latest !== undefined && known.get(latest) !== String(notes.at(-1))) colors.by = noteKey(latest);
    else if (shown && !colors.note) colors.by = "peak";
  }

  /** New numbers of all boxes have been received. */
  annotate(notes: readonly Note[], boxes: Record<string, Record<string, Span>>): void {
    for (const box of this.#scene.boxes.values()) delete box.numbers;
    for (const [id, numbers] of Object.entries(boxes)) Object.assign(this.#scene.boxes.get(id) ?? {}, { numbers });
    this.offer(notes);
    this.repaint();
  }

  get by(): Coloring {
    return this.#colors.by;
  }

  private repaint(): void {
    this.#events.drawn();
    this.#recolor();
    this.#scale = 0;
    this.#rewrite();
  }

  /** States, times or alarms of these boxes have changed. */
  tell(ids: Iterable<string>): void {
    for (const id of ids) this.#drawings.get(id)?.tell();
    if (this.#colors.by === "time") this.repaint();
  }

  select(id: string | null): void {
    this.selected = id;
    this.#relations = [];
    if (id !== null) this.#settleOn(id);
    this.#events.selected(id);
    this.#mark();
  }

  /** The pointer is on a box, or on none: highlights its lines instead of those of the selected box. */
  point(id: string | null): void {
    this.#edges.mark(id ?? this.selected);
  }

  /** Highlights the relations of the selected box. */
  relate(relations: Relation[]): void {
    this.#relations = relations;
    whenLoaded(() => {
      this.#mark();
    });
  }

  /** Highlights boxes: id of a box -> text. */
  light(boxes: Map<string, string>): void {
    this.#lit = boxes;
    this.#mark();
  }

  /** Scrolls the first of these boxes that is drawn into view, unless one of them is visible. */
  show(ids: readonly string[]): void {
    const { x, y, k } = this.camera.view;
    const drawn = ids.map((id) => this.#frames.get(id)).filter((frame) => frame && !frame.open);
    const inView = drawn.some((frame) => {
      const left = (frame?.x ?? 0) * k + x;
      const top = (frame?.y ?? 0) * k + y;
      return left >= 0 && top >= 0 && left < this.camera.width - 40 && top < this.camera.height - 20;
    });
    const first = drawn[0];
    if (first && !inView) this.center(first.box.id);
  }

  /** Draws tensors that are kept for the backward pass. */
  showKept(kept: readonly Kept[]): void {
    this.#kept = kept;
    this.#keptLayer.replaceChildren(...keptBands(kept, this.#colors.peak, this.#scene, this.#frames));
  }

  /** Marks the box whose op is at the chart cursor. */
  run(id: string | null): void {
    for (const each of [this.#now, id]) this.#drawings.get(each ?? "")?.element.classList.toggle("lz-now", each === id);
    this.#now = id;
  }

  /** Shows the bytes that boxes hold at the chart cursor; null: there is no cursor. */
  holding(now: Held | null): void {
    if (now === this.#colors.now) return;
    this.#colors.now = now;
    this.#recolor();
    this.#scale = 0;
    this.#rewrite();
  }

  /** Shows the differences from another graph; null: stops showing them. */
  compare(against: Differences | null, most: number): void {
    Object.assign(this.#colors, { against, most });
    this.#recolor();
    this.#scale = 0;
    this.#rewrite();
  }

  /**
   * Sets the bytes of a full bar and the box of the peak, and for another plan also the bytes that boxes hold at the
   * peak.
   */
  measure({ peak, peakText: text, peakChain: chain }: Memory, held?: Held): void {
    if (held) for (const box of this.#scene.boxes.values()) Object.assign(box, { by: held[box.id], held: sum(held[box.id]) });
    this.#colors.peak = peak;
    this.#peak = [text, chain];
    this.#recolor();
    this.#scale = 0;
    this.#rewrite();
  }

  #flag(): void {
    const [text, chain] = this.#peak;
    const id = this.#scene.visible(chain);
    const frame = id !== null ? this.#frames.get(id) : undefined;
    for (const [each, { element }] of this.#drawings) element.classList.toggle("lz-at-peak", each === id && !frame?.open);
    if (!frame || frame.open) {
      this.#flagLayer.replaceChildren();
      return;
    }
    const { grow } = bandOf(this.camera.view.k);
    const rail = frame.box.kind === "lane"; // a lane that is drawn as a narrow rail
    const told = rail ? "▲ Peak" : `▲ Peak ${text}`;
    const wide = (told.length * 7.3 + 10) * grow;
    // Labels of incoming edges are at the right; above the first row of a lane or a group, its title is at the left.
    const lane = this.#frames.get(frame.parent);
    const first = lane && frame.y - lane.y < 70;
    const end = !first ? 0 : lane.box.kind === "lane" ? frame.x + 1 : lane.x + (titleEnd(lane) - lane.x) * grow;
    const right = frame.x + frame.width - wide;
    const below = !rail && end > Math.max(right, frame.x); // if the flag does not fit beside the title
    const y = rail ? frame.y + 8 + 16 * grow : below ? frame.y + frame.height + 3 + 16 * grow : frame.y - 3;
    // The flag must not cover edge labels, either.
    const words = (x: number): number | undefined => {
      const start = this.#arrangement?.lines.flatMap(({ labelAt: at }) => (at && Math.abs(at[1] - y + 5) < 16 && Math.abs(at[0] - x - wide / 2) < wide / 2 + at[2].length * 3.7 ? [at[0] - at[2].length * 3.7] : []));
      return start?.[0];
    };
    const over = words(frame.x);
    const atRight = end > frame.x || (over && !words(right));
    const x = rail ? frame.x + (frame.width - wide) / 2 : atRight ? right : over ? Math.min(frame.x, over - wide - 26) : frame.x;
    const label = svg("text", { class: "lz-flag-text", x: x + 5 * grow, y: y - 4 * grow }, told);
    label.style.fontSize = `${11 * grow}px`;
    this.#flagLayer.replaceChildren(
      ...(grow > 1.6 ? [] : [svg("rect", { class: "lz-flag", x, y: y - 16 * grow, width: wide, height: 16 * grow, rx: 4 }), label]),
    );
  }

  /** Marks the search results; open groups are not marked, only their content. */
  find(ids: readonly string[]): void {
    this.#found = new Set(ids);
    this.#mark();
  }

  focus(id: string): void {
    this.#settleOn(id);
    this.#drawings.get(id)?.element.focus({ preventScroll: true });
  }

  get size(): { width: number; height: number } {
    return { width: this.#arrangement?.width ?? 0, height: this.#arrangement?.height ?? 0 };
  }

  #drawBoxes(frames: readonly Frame[]): void {
    const focused = this.svg.querySelector(":focus")?.getAttribute("data-box") ?? null;
    const next = new Map<string, BoxDrawing>();
    for (const frame of frames) {
      const known = this.#drawings.get(frame.box.id);
      const drawing = known?.fits(frame) ? known : new BoxDrawing(frame);
      drawing.place(frame);
      next.set(frame.box.id, drawing);
    }
    for (const [id, drawing] of this.#drawings) if (next.get(id) !== drawing) drawing.element.remove();
    // Outer groups are drawn below inner ones, and all boxes are in reading order.
    const last = new Map<Element, Element | null>();
    for (const frame of frames) {
      const layer = frame.open ? this.#openLayer : this.#closedLayer;
      const element = next.get(frame.box.id)?.element;
      const before = last.get(layer) ?? null;
      const place = before ? before.nextSibling : layer.firstChild;
      if (element && element !== place) layer.insertBefore(element, place);
      if (element) last.set(layer, element);
    }
    this.#drawings = next;
    this.#headLayer.replaceChildren(...frames.flatMap(({ box, open }) => (open ? (next.get(box.id)?.head ?? []) : [])));
    // The focus and the box that the Tab key reaches stay, or move to the group that was closed around them.
    const near = (id: string | null): string | null => {
      let at = id ?? undefined;
      while (at !== undefined && !next.has(at)) at = this.#scene.parentOf(at);
      return at ?? null;
    };
    const first = frames.find((frame) => frame.box.kind !== "lane")?.box.id ?? null;
    this.#settleOn(near(this.#current) ?? near(this.selected) ?? first);
    const refocused = near(focused);
    if (refocused !== null && !this.svg.querySelector(":focus")) this.focus(refocused);
  }

  #settleOn(id: string | null): void {
    if (this.#current !== null) this.#drawings.get(this.#current)?.element.setAttribute("tabindex", "-1");
    const next = id !== null ? this.#drawings.get(id)?.element : undefined;
    if (next?.hasAttribute("data-node")) {
      next.setAttribute("tabindex", "0");
      this.#current = id;
    }
  }

  #key(event: KeyboardEvent): void {
    const { key } = event;
    const id = nodeOf(event.target);
    if ((event.ctrlKey || event.metaKey || event.altKey) && !key.startsWith("Arrow")) return;
    if (key === "Enter" || key === " ") {
      if (id === null) return; // Space starts playing
      this.#events.choose(id, key === "Enter");
      this.focus(id);
    } else if (key.startsWith("Arrow") && (event.shiftKey || event.ctrlKey)) {
      const [dx, dy] = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[key] ?? [0, 0];
      this.camera.panBy(dx ?? 0, dy ?? 0);
    } else if (key.startsWith("Arrow")) {
      const before = this.#current;
      whenLoaded(({ neighbor }) => {
        // Keys that were pressed before the deferred part arrived continue from where the previous one led.
        const from = this.#current === before ? (id ?? before) : this.#current;
        const to = this.#arrangement ? neighbor(this.#arrangement, from ?? "", key as Arrow) : null;
        const frame = to !== null ? this.#frames.get(to) : undefined;
        if (!frame) return;
        this.camera.reveal(frame);
        this.focus(frame.box.id);
      });
    } else if (key === "+" || key === "-") this.camera.zoomBy(key === "+" ? 1.3 : 1 / 1.3);
    else if (key === "Escape") {
      if (id === null) this.#events.clear();
      else this.#events.close(id);
    } else return;
    event.preventDefault();
  }

  /** Writes the text of the boxes in view, in the size that the scale needs. */
  #rewrite(): void {
    const { x, y, k } = this.camera.view;
    const band = bandOf(k);
    const zoomed = k !== this.#scale;
    this.#scale = k;
    if (zoomed) {
      this.#content.classList.toggle("lz-near", band.grow === 1);
      this.#content.classList.toggle("lz-far", k < FAR);
      this.#flag();
    }
    const [left, top] = [(-x - 80) / k, (-y - 80) / k];
    const [right, bottom] = [(this.camera.width + 80 - x) / k, (this.camera.height + 80 - y) / k];
    for (const [id, frame] of this.#frames) {
      const seen = frame.x < right && frame.x + frame.width > left && frame.y < bottom && frame.y + frame.height > top;
      if (seen || zoomed) this.#drawings.get(id)?.write(seen ? band : SILENT);
    }
  }

  /** Calls `make` while the graph has all its text, in full size. */
  atFullSize<T>(make: () => T): T {
    this.#content.classList.add("lz-near");
    this.#content.classList.remove("lz-far");
    for (const drawing of this.#drawings.values()) drawing.write(bandOf(1));
    const made = make();
    this.#scale = 0;
    this.#rewrite();
    return made;
  }

  #recolor(): void {
    const closed = [...this.#frames.values()].filter((frame) => !frame.open && frame.box.kind !== "input" && frame.box.kind !== "output");
    this.#colors.learn(this.#scene.boxes.values(), closed.map((frame) => frame.box));
    for (const drawing of this.#drawings.values()) drawing.paint(this.#colors);
    this.legend.showColors(this.#colors);
  }

  #mark(): void {
    for (const [id, { element }] of this.#drawings) {
      element.classList.toggle("lz-selected", id === this.selected);
      element.classList.toggle("lz-lit", this.#lit.has(id));
      element.classList.toggle("lz-found", this.#found.has(id) && !element.classList.contains("lz-open"));
    }
    this.#content.classList.toggle("lz-some-lit", this.#lit.size > 0);
    this.#edges.mark(this.selected);
    const from = this.selected !== null ? this.#frames.get(this.selected) : undefined;
    const second = this.#relations.length ? deferredPart() : null;
    const [lines, kinds] =
      from && this.#arrangement && second ? second.relationLines(this.#relations, from, this.#frames, this.#scene, this.#arrangement) : [[], []];
    this.#relationLayer.replaceChildren(...lines);
    this.legend.showRelations(kinds);
  }
}

function nodeOf(target: EventTarget | null): string | null {
  const box = target instanceof Element ? target.closest("[data-node]") : null;
  return box?.getAttribute("data-node") ?? null;
}
