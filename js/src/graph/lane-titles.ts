// Titles of lanes that stay in sight: if the top of an open lane is above the view, its title is shown at the edge.

import type { Camera } from "./camera";
import { html } from "../page/dom";
import type { Frame } from "../model/open-groups-and-layout";

const TITLE = 31; // bottom of a lane's own title, in pixels of the picture
const HIGH = 24; // height of a title at the edge
const LEAST = 90; // minimum width of a lane that has room for it

export class LaneTitles {
  readonly element = html("div", { class: "lz-lane-heads", "aria-hidden": "true" });
  #lanes: readonly Frame[] = [];

  constructor(private readonly camera: Camera) {}

  draw(frames: readonly Frame[]): void {
    this.#lanes = frames.filter(({ box, open }) => open && box.kind === "lane");
    this.follow();
  }

  follow(): void {
    const { x, y, k } = this.camera.view;
    const shown = this.#lanes.flatMap(({ box, x: left, y: top, width, height }) => {
      const from = Math.max(left * k + x, 0);
      const wide = Math.min((left + width) * k + x, this.camera.width) - from;
      if ((top + TITLE) * k + y > 4 || (top + height) * k + y < 2 * HIGH || wide < LEAST) return [];
      const title = html("span", `lz-lane-head lz-phase-${box.phase}`, box.label, html("small", {}, box.sub.split(":")[0] ?? ""));
      title.style.cssText = `left:${from}px;width:${wide}px`;
      return [title];
    });
    this.element.replaceChildren(...shown);
  }
}
