// What part of the picture is seen, and how large: panning, zooming, the first view.

import { select } from "d3-selection";
import { zoom, zoomIdentity, zoomTransform, type ZoomTransform } from "d3-zoom";

const LEAST_HEIGHT = 240;
const MOST_HEIGHT = 900;
export const LEGIBLE = 0.8; // the scale that lanes are wrapped for
const LEAST_SCALE = 0.62; // of the first view
const MARGIN = 12;

export interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

export class Camera {
  width = 0;
  touched = false; // the reader has panned or zoomed: the view is theirs
  picture = { width: 0, height: 0 };
  private readonly behaviour = zoom<SVGSVGElement, unknown>();

  constructor(
    private readonly svg: SVGSVGElement,
    content: SVGGElement,
    isFocused: () => boolean,
    moved: (transform: ZoomTransform) => void,
  ) {
    this.behaviour
      .scaleExtent([0.03, 4])
      .clickDistance(4)
      // The wheel scrolls the notebook until the graph was clicked into, or with Ctrl held.
      .filter((event: Event) => {
        if (event.type === "wheel") return (event as WheelEvent).ctrlKey || isFocused();
        return !(event as MouseEvent).ctrlKey && (event as MouseEvent).button === 0;
      })
      .on("zoom", (event: { transform: ZoomTransform; sourceEvent: unknown }) => {
        if (event.sourceEvent) this.touched = true;
        content.setAttribute("transform", event.transform.toString());
        moved(event.transform);
      });
    select(svg).call(this.behaviour).on("dblclick.zoom", null);
  }

  get transform(): ZoomTransform {
    return zoomTransform(this.svg);
  }

  get height(): number {
    return this.svg.clientHeight || LEAST_HEIGHT;
  }

  zoomBy(factor: number): void {
    this.touched = true;
    select(this.svg).call(this.behaviour.scaleBy, factor);
  }

  panBy(dx: number, dy: number): void {
    this.touched = true;
    const { x, y, k } = this.transform;
    this.move(zoomIdentity.translate(x + dx, y + dy).scale(k));
  }

  /** The whole picture in view. */
  fit(): void {
    this.touched = true;
    const height = this.grow(this.homeScale());
    const { width: wide, height: tall } = this.picture;
    const k = Math.min((this.width - 2 * MARGIN) / wide, (height - 2 * MARGIN) / tall, 1);
    this.move(zoomIdentity.translate((this.width - wide * k) / 2, Math.max((height - tall * k) / 2, MARGIN)).scale(k));
  }

  /** The first view: all lanes side by side, from the top, at a size that can be read. */
  home(): void {
    this.touched = false;
    const k = this.homeScale();
    this.grow(k);
    this.move(zoomIdentity.translate(this.homeLeft(k), MARGIN).scale(k));
  }

  /** The picture has changed: what was at `before` and is at `after` now stays where it is on screen. */
  keep(before: Area, after: Area): void {
    const { x, y, k } = this.transform;
    if (this.touched) {
      this.grow(k);
      this.move(zoomIdentity.translate(x + (before.x - after.x) * k, y + (before.y - after.y) * k).scale(k));
      return;
    }
    // As wide as there is room for, the box about where it was, no empty space above or below.
    const scale = this.homeScale();
    const height = this.grow(scale);
    const top = y + before.y * k - after.y * scale;
    const lowest = Math.min(height - MARGIN - this.picture.height * scale, MARGIN);
    this.move(zoomIdentity.translate(this.homeLeft(scale), Math.min(Math.max(top, lowest), MARGIN)).scale(scale));
  }

  /** Moves the view so that the box is in the middle, at a size that can be read. */
  center(area: Area): void {
    this.touched = true;
    const k = Math.max(this.transform.k, LEGIBLE);
    this.move(
      zoomIdentity
        .translate(
          this.width / 2 - (area.x + area.width / 2) * k,
          this.height / 2 - (area.y + Math.min(area.height / 2, 100)) * k,
        )
        .scale(k),
    );
  }

  /** Moves the view no further than it takes to see the box (its upper left part, if it is larger). */
  reveal(area: Area): void {
    const { x, y, k } = this.transform;
    const shift = (from: number, size: number, room: number): number => {
      if (from + Math.min(size, room - 2 * MARGIN) > room - MARGIN) return room - MARGIN - from - Math.min(size, room - 2 * MARGIN);
      return from < MARGIN ? MARGIN - from : 0;
    };
    const dx = shift(x + area.x * k, area.width * k, this.width);
    const dy = shift(y + area.y * k, area.height * k, this.height);
    if (dx || dy) this.panBy(dx, dy);
  }

  /** The point of the picture in the middle of the view. */
  centerOn(x: number, y: number): void {
    this.touched = true;
    const { k } = this.transform;
    this.move(zoomIdentity.translate(this.width / 2 - x * k, this.height / 2 - y * k).scale(k));
  }

  private homeScale(): number {
    return Math.min(1, Math.max((this.width - 2 * MARGIN) / (this.picture.width || 1), LEAST_SCALE));
  }

  private homeLeft(k: number): number {
    return Math.max((this.width - this.picture.width * k) / 2, MARGIN);
  }

  private grow(k: number): number {
    const wanted = this.picture.height * k + 2 * MARGIN;
    const height = Math.round(Math.min(Math.max(wanted, LEAST_HEIGHT), MOST_HEIGHT));
    this.svg.style.height = `${height}px`;
    return height;
  }

  private move(transform: ZoomTransform): void {
    select(this.svg).call(this.behaviour.transform, transform);
  }
}
