// The search box. The search itself is in search-hits.ts.

import { html, on, plainButton } from "../page/dom";
import { icon } from "../page/icons";
import { whenLoaded } from "../page/load-deferred-bundle";
import type { Found } from "../model/types";
import type { SearchEvents, SearchHits } from "./search-hits";

export class Search {
  readonly element: HTMLElement;
  readonly input = html("input", {
    type: "search",
    "data-action": "search",
    placeholder: "Search",
    "aria-label": "Search ops, modules, lines, shapes, dtypes and names",
    "aria-keyshortcuts": "F3",
    autocomplete: "off",
    spellcheck: "false",
  });
  readonly count = html("span", { class: "lz-muted lz-count", "data-hits": "" });
  readonly list = html("ul", { class: "lz-hits", "aria-label": "Search results" });
  readonly steps: HTMLButtonElement[];
  #hits: SearchHits | null = null;

  constructor(events: SearchEvents) {
    const step = (by: number, action: string, label: string, sign: string): HTMLButtonElement => {
      const button = plainButton({ class: "lz-button", "data-action": action, "aria-label": label, title: label, disabled: true }, sign);
      on(button, "click", () => {
        this.step(by);
      });
      return button;
    };
    this.steps = [step(-1, "search-previous", "Previous hit", "↑"), step(1, "search-next", "Next hit", "↓")];
    this.element = html("div", "lz-search", icon("search"), this.input, this.count, ...this.steps, this.list);
    this.list.hidden = true;
    whenLoaded(({ SearchHits }) => {
      this.#hits = new SearchHits(this, events);
    });
  }

  get query(): string {
    return this.input.value.trim();
  }

  focus(): void {
    this.input.focus();
    this.input.select();
  }

  /** Moves `by` hits forward, wrapping around. */
  step(by: number): void {
    this.#hits?.step(by);
  }

  hear(found: Found): void {
    this.#hits?.hear(found);
  }
}
