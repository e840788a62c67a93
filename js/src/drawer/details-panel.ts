// The panels of details: what is known of the clicked box; before a click, what is alive at the peak.  What they
// say is written by drawer/details.ts, which comes with the widget's second part.

import { html } from "../page/dom";
import { whenHere } from "../page/second-part";
import type { DetailsEvents, Writer } from "./details";
import type { BoxData } from "../model/types";

export class DetailsPanel {
  readonly element: HTMLElement;
  readonly #events: DetailsEvents;
  #writer: Writer | null = null;
  #newest = 0;

  constructor(name: "details" | "alive", events: DetailsEvents) {
    this.#events = events;
    this.element = html("div", { class: "lz-details", "data-panel": name, tabindex: 0 }, html("p", { class: "lz-muted" }, "Click a box."));
  }

  /** Has it written anew, once that can be done; the newest wish holds. */
  write(how: (writer: Writer) => void): void {
    const wish = ++this.#newest;
    whenHere(({ Writer }) => {
      this.#writer ??= new Writer(this.element, this.#events);
      if (wish === this.#newest) how(this.#writer);
    });
  }

  /** What the picture itself knows, until the kernel answers. */
  showBox(box: BoxData): void {
    this.#newest++;
    this.element.replaceChildren(
      html("h3", {}, box.repeats ? `${box.label} × ${box.repeats}` : box.label),
      html("p", { class: "lz-muted" }, box.sub),
      html("p", { class: "lz-muted lz-waiting" }, "More once the kernel answers."),
    );
  }
}
