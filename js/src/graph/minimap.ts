// Minimap: the whole picture with the visible part marked. It appears after the first movement, if a part is hidden.
// With it are the titles of lanes whose top is out of view.

import type { Camera } from "./camera";
import { on, svg } from "../page/dom";
import { LaneTitles } from "./lane-titles";
import type { Arrangement, Frame } from "../model/open-groups-and-layout";

const MOST = [150, 110] as const;

const outline = (frames: readonly Frame[]): string =>
  frames.map(({ x, y, width, height }) => `M${x | 0},${y | 0}h${width | 0}v${height | 0}h${-width | 0}Z`).join("");

export class Minimap {
  readonly element = svg("svg", { class: "lz-minimap", "aria-hidden": "true" });
  readonly #groups = svg("path", "lz-map-groups");
  readonly #boxes = svg("path", "lz-map-boxes");
  readonly #seen = svg("rect", "lz-map-seen");
  readonly #titles: LaneTitles;
  #scale = 1;

  readonly #camera: Camera;

  constructor(camera: Camera) {
    this.#camera = camera;
    this.#titles = new LaneTitles(camera);
    this.element.append(this.#groups, this.#boxes, this.#seen);
    const go = (event: PointerEvent): void => {
      const { left, top } = this.element.getBoundingClientRect();
      camera.centerOn((event.clientX - left) / this.#scale, (event.clientY - top) / this.#scale);
    };
    on(this.element, "pointerdown", (event) => {
      this.element.setPointerCapture(event.pointerId);
      go(event);
    });
    on(this.element, "pointermove", (event) => {
      if (event.buttons) go(event);
    });
  }

  draw({ frames, width, height }: Arrangement): void {
    this.#scale = Math.min(MOST[0] / Math.max(width, 1), MOST[1] / Math.max(height, 1));
    this.element.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.element.setAttribute("width", (width * this.#scale).toFixed(1));
    this.element.setAttribute("height", (height * this.#scale).toFixed(1));
    this.#groups.setAttribute("d", outline(frames.filter((frame) => frame.open)));
    this.#boxes.setAttribute("d", outline(frames.filter((frame) => !frame.open)));
    this.element.before(this.#titles.element);
    this.#titles.draw(frames);
    this.follow();
  }

  follow(): void {
    this.#titles.follow();
    const { view, width, height, picture } = this.#camera;
    // It is not in the first picture, where it would cover boxes.
    const all = !this.#camera.touched || (-view.x <= 0.5 && -view.y <= 0.5 && (width - view.x) / view.k >= picture.width && (height - view.y) / view.k >= picture.height);
    this.element.toggleAttribute("hidden", all);
    if (all) return;
    const place = { x: -view.x / view.k, y: -view.y / view.k, width: width / view.k, height: height / view.k };
    for (const [name, value] of Object.entries(place)) this.#seen.setAttribute(name, value.toFixed(1));
  }
}
