// Search hits: they are requested, counted, listed, highlighted in the graph, and stepped through.

import { focused, html, on, plainButton } from "../page/dom";
import { grouped } from "../page/format";
import type { Found, Hit, Send } from "../model/types";

const LISTED = 20;

/** The search box (search-box.ts). */
interface SearchBox {
  readonly element: HTMLElement;
  readonly input: HTMLInputElement;
  readonly count: HTMLElement;
  readonly list: HTMLElement;
  readonly steps: readonly HTMLButtonElement[];
  readonly query: string;
}

export interface SearchEvents {
  ask: Send;
  /** A hit was chosen: show it in the graph. */
  go(chain: string[]): void;
  /** The query has changed; it may be empty. */
  asked(query: string): void;
  /** Highlight these search results and the groups around them. */
  light(ids: string[]): void;
  /** Announce this to screen readers. */
  say(text: string): void;
}

export class SearchHits {
  readonly #hits = new Map<number, Hit>();
  #asked = ""; // the query of the hits
  #total = 0;
  #at = -1; // the current hit
  #wanted: number | null = null; // number of a hit that was requested
  #timer: ReturnType<typeof setTimeout> | undefined;

  readonly #box: SearchBox;
  readonly #events: SearchEvents;

  constructor(box: SearchBox, events: SearchEvents) {
    this.#box = box;
    this.#events = events;
    const { element, input, list } = box;
    input.title = "An op, a module, line 12, 8×128, float32, a tensor's name. Enter: next. Shift+Enter: previous. Esc: clear";
    on(input, "input", () => {
      this.#soon();
    });
    on(element, "keydown", (event) => {
      const rows = [...list.querySelectorAll("button")];
      const row = rows.indexOf(event.target as HTMLButtonElement);
      if (event.key === "Escape") {
        if (input.value) event.stopPropagation();
        this.#clear();
      } else if (event.key === "Enter" && event.target === input) {
        this.step(event.shiftKey ? -1 : 1);
      } else if (event.key === "ArrowDown" || (event.key === "ArrowUp" && row >= 0)) {
        event.preventDefault();
        (event.key === "ArrowDown" ? rows[row + 1] : (rows[row - 1] ?? input))?.focus();
      }
    });
    on(element, "focusout", (event) => {
      if (!element.contains(event.relatedTarget as Node | null)) list.hidden = true;
    });
    this.#show();
    if (box.query) this.#soon(); // typed before this code was loaded
  }

  #soon(): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#wanted = null;
      this.#ask();
    }, 120);
  }

  /** Moves `by` hits forward, wrapping around. */
  step(by: number): void {
    clearTimeout(this.#timer);
    if (this.#box.query !== this.#asked) {
      this.#wanted = by < 0 ? -1 : 0;
      this.#ask();
    } else if (this.#total) {
      this.#box.list.hidden = true;
      this.#show(this.#at < 0 && by < 0 ? this.#total - 1 : (this.#at + by + this.#total) % this.#total);
    }
  }

  hear(found: Found): void {
    if (found.query !== this.#asked) return;
    found.hits.forEach((hit, n) => this.#hits.set(found.start + n, hit));
    this.#total = found.total;
    if (found.lit) {
      this.#events.light(found.lit);
      this.#events.say(found.total ? `${grouped(found.total)} found` : "Nothing found");
      this.#fill();
    }
    if (this.#wanted === null || !found.total) this.#show();
    else {
      this.#box.list.hidden = true;
      this.#show(this.#wanted < 0 ? found.total - 1 : this.#wanted);
    }
  }

  #ask(): void {
    this.#asked = this.#box.query;
    this.#events.asked(this.#box.query);
    this.#hits.clear();
    this.#total = 0;
    this.#at = -1;
    if (this.#asked) this.#events.ask("search", this.#asked);
    else {
      this.#box.list.hidden = true;
      this.#events.light([]);
      this.#show();
    }
  }

  #clear(): void {
    clearTimeout(this.#timer);
    this.#box.input.value = "";
    this.#wanted = null;
    if (this.#asked) this.#ask();
    this.#box.input.focus();
  }

  /** Shows the count; with `at`, also that hit in the graph, as soon as it has arrived. */
  #show(at = -1): void {
    const total = this.#total;
    for (const step of this.#box.steps) step.disabled = !total;
    const chosen = this.#hits.get(at);
    if (at >= 0) this.#at = at;
    this.#wanted = at >= 0 && !chosen ? at : null;
    const all = grouped(total);
    this.#box.count.textContent = !this.#asked ? "" : this.#at < 0 ? (total ? all : "none") : `${grouped(this.#at + 1)} of ${all}`;
    if (chosen) {
      this.#events.go(chosen.chain);
      this.#events.say(`${this.#box.count.textContent}: ${chosen.label}`);
    } else if (at >= 0) {
      this.#events.ask("search-on", `${Math.max(at - 10, 0)} ${this.#asked}`);
    }
  }

  #fill(): void {
    const rows = [...this.#hits].slice(0, LISTED).map(([at, hit]) => {
      const row = plainButton({ class: "lz-hit", title: hit.label },
        html("bdi", {}, hit.label),
        html("span", "lz-muted", hit.sub),
      );
      on(row, "click", () => {
        this.#show(at);
        this.#box.input.focus();
        this.#box.list.hidden = true;
      });
      return html("li", {}, row);
    });
    const more = this.#total - rows.length;
    const note = !rows.length ? "Nothing found" : more > 0 ? `${grouped(more)} more: Enter steps through all` : "";
    this.#box.list.replaceChildren(...rows, ...(note ? [html("li", "lz-muted lz-hit-note", note)] : []));
    this.#box.list.hidden = !focused(this.#box.element);
  }
}
