// The visible part of the picture, and its scale: panning, zooming, pinching, the first view.

import type { Area } from "../model/coordinates-from-layers";

const LEAST_HEIGHT = 240;
export const LEGIBLE = 0.8; // the scale at which a centered box is legible
const LEAST_SCALE = 0.8; // minimum scale of the first view, so that all text is legible
const MARGIN = 12;
const SCALES = [0.03, 4] as const;
const CLICK_DISTANCE = 4; // pixels that a pointer may move and still count as a click

/** A point of the picture is drawn at (x, y) + k · point. */
export interface View {
  x: number;
  y: number;
  k: number;
}

export class Camera {
  width = 0;
  touched = false; // the user has panned or zoomed, so the view is not changed automatically
  picture = { width: 0, height: 0 };
  view: View = { x: 0, y: 0, k: 1 };
  private readonly pointers = new Map<number, [x: number, y: number]>();

  constructor(
    private readonly svg: SVGSVGElement,
    private readonly content: SVGGElement,
    private readonly moved: (view: View) => void,
  ) {
    svg.addEventListener(
      "wheel",
      (event) => {
        // The wheel scrolls the notebook unless the graph has been clicked or Ctrl is held.
        if (!event.ctrlKey && !svg.matches(":focus-within")) return;
        event.preventDefault();
        const step = event.deltaMode === 1 ? 0.05 : event.deltaMode ? 1 : 0.002;
        this.zoomBy(2 ** (-event.deltaY * step * (event.ctrlKey ? 10 : 1)), this.#at(event));
      },
      { passive: false },
    );
    this.#followPointers();
  }

  get height(): number {
    return this.svg.clientHeight || LEAST_HEIGHT;
  }

  /** The width in picture pixels that is visible at the smallest scale of the first view. */
  get seen(): number {
    return (this.width - 2 * MARGIN) / LEAST_SCALE;
  }

  /** Zooms about a point of the view, by default its center. */
  zoomBy(factor: number, [x, y] = [this.width / 2, this.height / 2]): void {
    const { view } = this;
    const k = Math.min(Math.max(view.k * factor, SCALES[0]), SCALES[1]);
    this.touched = true;
    this.#move(x - ((x - view.x) * k) / view.k, y - ((y - view.y) * k) / view.k, k);
  }

  panBy(dx: number, dy: number): void {
    this.touched = true;
    this.#move(this.view.x + dx, this.view.y + dy, this.view.k);
  }

  /** Fits the whole picture into the view. */
  fit(): void {
    this.touched = true;
    const { height } = this;
    const { width: wide, height: tall } = this.picture;
    const k = Math.min((this.width - 2 * MARGIN) / wide, (height - 2 * MARGIN) / tall, 1);
    this.#move((this.width - wide * k) / 2, Math.max((height - tall * k) / 2, MARGIN), k);
  }

  /** Goes to the first view: all lanes side by side, from the top, at a legible size. */
  home(): void {
    this.touched = false;
    const k = this.#homeScale();
    this.#move(this.#homeLeft(k), MARGIN, k);
  }

  /** Adapts to a changed picture: the point that moved from `before` to `after` keeps its position on screen. */
  keep(before: Area, after: Area): void {
    const { x, y, k } = this.view;
    this.#move(x + (before.x - after.x) * k, y + (before.y - after.y) * k, k);
  }

  /** Moves the view so that the box is in the center, at a legible size. */
  center(area: Area): void {
    this.centerOn(area.x + area.width / 2, area.y + Math.min(area.height / 2, 100), Math.max(this.view.k, LEGIBLE));
  }

  centerOn(x: number, y: number, k = this.view.k): void {
    this.touched = true;
    this.#move(this.width / 2 - x * k, this.height / 2 - y * k, k);
  }

  /** Moves the view as little as necessary to show the box (its upper left part, if it is larger). */
  reveal(area: Area): void {
    const { x, y, k } = this.view;
    const shift = (from: number, size: number, room: number): number => {
      const least = Math.min(size, room - 2 * MARGIN);
      return from < MARGIN ? MARGIN - from : Math.min(room - MARGIN - from - least, 0);
    };
    const dx = shift(x + area.x * k, area.width * k, this.width);
    const dy = shift(y + area.y * k, area.height * k, this.height);
    if (dx || dy) this.panBy(dx, dy);
  }

  #homeScale(): number {
    return Math.min(1, Math.max((this.width - 2 * MARGIN) / (this.picture.width || 1), LEAST_SCALE));
  }

  #homeLeft(k: number): number {
    return Math.max((this.width - this.picture.width * k) / 2, MARGIN);
  }

  #move(x: number, y: number, k: number): void {
    this.view = { x, y, k };
    this.content.setAttribute("transform", `translate(${x.toFixed(2)},${y.toFixed(2)}) scale(${k.toFixed(5)})`);
    this.moved(this.view);
  }

  #at(event: MouseEvent): [number, number] {
    const { left, top } = this.svg.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  /** Pans with one pointer and pinches with two; a pointer that has panned does not click. */
  #followPointers(): void {
    const { svg, pointers } = this;
    let start: [number, number] = [0, 0];
    let dragged = false;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || event.ctrlKey) return;
      if (event.isPrimary) {
        pointers.clear();
        dragged = false;
        start = this.#at(event);
      }
      pointers.set(event.pointerId, this.#at(event));
    });
    svg.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const [x, y] = this.#at(event);
      if (!dragged && pointers.size < 2 && Math.hypot(x - start[0], y - start[1]) < CLICK_DISTANCE) return;
      if (!dragged) svg.setPointerCapture(event.pointerId);
      dragged = true;
      const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
      pointers.set(event.pointerId, [x, y]);
      if (other) {
        const spread = ([px, py]: [number, number]): number => Math.hypot(px - other[0], py - other[1]) || 1;
        this.panBy((x - before[0]) / 2, (y - before[1]) / 2);
        this.zoomBy(spread([x, y]) / spread(before), [(x + other[0]) / 2, (y + other[1]) / 2]);
      } else this.panBy(x - before[0], y - before[1]);
    });
    for (const end of ["pointerup", "pointercancel"] as const) {
      svg.addEventListener(end, (event) => {
        pointers.delete(event.pointerId);
      });
    }
    svg.addEventListener(
      "click",
      (event) => {
        if (dragged && event.detail) event.stopImmediatePropagation();
        dragged = false;
      },
      true,
    );
  }
}
