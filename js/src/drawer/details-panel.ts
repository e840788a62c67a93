// The panels of details: facts about the selected box; before a selection, what is alive at the peak. Their content is
// written by drawer/details.ts, which is in the widget's deferred part.

import { html } from "../page/dom";
import { whenLoaded } from "../page/load-deferred-bundle";
import type { DetailsEvents, Writer } from "./details";
import type { BoxData } from "../model/types";

export class DetailsPanel {
  readonly element: HTMLElement;
  readonly #events: DetailsEvents;
  #writer: Writer | null = null;
  #newest = 0;

  constructor(name: "details" | "alive", events: DetailsEvents) {
    this.#events = events;
    this.element = html("div", { class: "lz-details", "data-panel": name, tabindex: 0 }, html("p", "lz-muted", "Click a box."));
  }

  /** Updates the content as soon as the deferred part is loaded; only the newest update applies. */
  write(how: (writer: Writer) => void): void {
    const wish = ++this.#newest;
    whenLoaded(({ Writer }) => {
      this.#writer ??= new Writer(this.element, this.#events);
      if (wish === this.#newest) how(this.#writer);
    });
  }

  /** Shows the facts that are known without a request to the kernel. */
  showBox(box: BoxData): void {
    this.#newest++;
    this.element.replaceChildren(
      html("h3", {}, box.repeats ? `${box.label} × ${box.repeats}` : box.label),
      html("p", "lz-muted", box.sub),
      html("p", "lz-muted lz-waiting", "More once the kernel answers."),
    );
  }
}
