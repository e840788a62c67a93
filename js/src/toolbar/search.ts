// The search box: hits are counted, listed, lit up in the graph, and stepped through.

import { grouped, html, plainButton } from "../page/dom";
import { icon } from "../page/icons";
import type { Found, Hit, Send } from "../model/types";

const LISTED = 20;

export interface SearchEvents {
  ask: Send;
  /** A hit was chosen: show it in the graph. */
  go(chain: string[]): void;
  /** Another query, or none. */
  asked(query: string): void;
  /** What was found, by id, with the groups around it. */
  light(ids: string[]): void;
  /** For screen readers. */
  say(text: string): void;
}

export class Search {
  readonly element: HTMLElement;
  readonly #input = html("input", {
    type: "search",
    "data-action": "search",
    placeholder: "Search",
    title: "An op, a module, line 12, 8×128, float32, a tensor's name. Enter: next. Shift+Enter: previous. Esc: clear",
    "aria-label": "Search ops, modules, lines, shapes, dtypes and names",
    "aria-keyshortcuts": "F3",
    autocomplete: "off",
    spellcheck: "false",
  });
  readonly #count = html("span", { class: "lz-muted lz-count", "data-hits": "" });
  readonly #list = html("ul", { class: "lz-hits", "aria-label": "Search results" });
  readonly #steps: HTMLButtonElement[];
  readonly #hits = new Map<number, Hit>();
  private asked = ""; // the query that the hits are of
  private total = 0;
  #at = -1; // the hit that is shown
  #wanted: number | null = null; // a step that waits for its hit
  #timer: ReturnType<typeof setTimeout> | undefined;

  readonly #events: SearchEvents;

  constructor(events: SearchEvents) {
    this.#events = events;
    const step = (by: number, action: string, label: string, sign: string): HTMLButtonElement => {
      const button = plainButton({ class: "lz-button", "data-action": action, "aria-label": label, title: label }, sign);
      button.addEventListener("click", () => {
        this.step(by);
      });
      return button;
    };
    this.#steps = [step(-1, "search-previous", "Previous hit", "↑"), step(1, "search-next", "Next hit", "↓")];
    this.element = html("div", { class: "lz-search", role: "search" }, icon("search"), this.#input, this.#count, ...this.#steps, this.#list);
    this.#input.addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => {
        this.#wanted = null;
        this.ask();
      }, 120);
    });
    this.element.addEventListener("keydown", (event) => {
      const rows = [...this.#list.querySelectorAll("button")];
      const row = rows.indexOf(event.target as HTMLButtonElement);
      if (event.key === "Escape") {
        if (this.#input.value) event.stopPropagation();
        this.#clear();
      } else if (event.key === "Enter" && event.target === this.#input) {
        this.step(event.shiftKey ? -1 : 1);
      } else if (event.key === "ArrowDown" || (event.key === "ArrowUp" && row >= 0)) {
        event.preventDefault();
        (event.key === "ArrowDown" ? rows[row + 1] : (rows[row - 1] ?? this.#input))?.focus();
      }
    });
    this.element.addEventListener("focusout", (event) => {
      if (!this.element.contains(event.relatedTarget as Node | null)) this.#list.hidden = true;
    });
    this.#list.hidden = true;
    this.#show();
  }

  get query(): string {
    return this.#input.value.trim();
  }

  focus(): void {
    this.#input.focus();
    this.#input.select();
  }

  /** Goes to the hit `by` further on, round and round. */
  step(by: number): void {
    clearTimeout(this.#timer);
    if (this.query !== this.asked) {
      this.#wanted = by < 0 ? -1 : 0;
      this.ask();
    } else if (this.total) {
      this.#list.hidden = true;
      this.#show(this.#at < 0 && by < 0 ? this.total - 1 : (this.#at + by + this.total) % this.total);
    }
  }

  hear(found: Found): void {
    if (found.query !== this.asked) return;
    found.hits.forEach((hit, n) => this.#hits.set(found.start + n, hit));
    this.total = found.total;
    if (found.lit) {
      this.#events.light(found.lit);
      this.#events.say(found.total ? `${grouped(found.total)} found` : "Nothing found");
      this.#fill();
    }
    if (this.#wanted === null || !found.total) this.#show();
    else {
      this.#list.hidden = true;
      this.#show(this.#wanted < 0 ? found.total - 1 : this.#wanted);
    }
  }

  private ask(): void {
    this.asked = this.query;
    this.#events.asked(this.query);
    this.#hits.clear();
    this.total = 0;
    this.#at = -1;
    if (this.asked) this.#events.ask("search", this.asked);
    else {
      this.#list.hidden = true;
      this.#events.light([]);
      this.#show();
    }
  }

  #clear(): void {
    clearTimeout(this.#timer);
    this.#input.value = "";
    this.#wanted = null;
    if (this.asked) this.ask();
    this.#input.focus();
  }

  /** The count; with `at`, that hit in the graph, as soon as it is known. */
  #show(at = -1): void {
    const { total } = this;
    for (const step of this.#steps) step.disabled = !total;
    const chosen = this.#hits.get(at);
    if (at >= 0) this.#at = at;
    this.#wanted = at >= 0 && !chosen ? at : null;
    const all = grouped(total);
    this.#count.textContent = !this.asked ? "" : this.#at < 0 ? (total ? all : "none") : `${grouped(this.#at + 1)} of ${all}`;
    if (chosen) {
      this.#events.go(chosen.chain);
      this.#events.say(`${this.#count.textContent}: ${chosen.label}`);
    } else if (at >= 0) {
      this.#events.ask("search-on", `${Math.max(at - 10, 0)} ${this.asked}`);
    }
  }

  #fill(): void {
    const rows = [...this.#hits].slice(0, LISTED).map(([at, hit]) => {
      const row = plainButton({ class: "lz-hit", title: hit.label },
        html("bdi", {}, hit.label),
        html("span", { class: "lz-muted" }, hit.sub),
      );
      row.addEventListener("click", () => {
        this.#show(at);
        this.#input.focus();
        this.#list.hidden = true;
      });
      return html("li", {}, row);
    });
    const more = this.total - rows.length;
    const note = !rows.length ? "Nothing found" : more > 0 ? `${grouped(more)} more: Enter steps through all` : "";
    this.#list.replaceChildren(...rows, ...(note ? [html("li", { class: "lz-muted lz-hit-note" }, note)] : []));
    this.#list.hidden = !this.element.contains(document.activeElement);
  }
}
