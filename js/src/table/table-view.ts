// Table view of the graph, which can be sorted and filtered. Python sends the rows one page at a time.

import { focused, group, html, on, plainButton } from "../page/dom";
import { grouped } from "../page/format";
import { roving } from "../page/roving-tabindex";
import type { Send, TableData } from "../model/types";

export interface TableEvents {
  ask: Send;
  /** A row was chosen: a box's id, or a line's. */
  choose(id: string, line: boolean): void;
  /** The visible view has changed: graph or table. */
  turn(table: boolean): void;
  say(text: string): void;
}

export class TableView {
  readonly element: HTMLElement;
  readonly #menu: HTMLElement;
  readonly #modes: HTMLSelectElement;
  readonly #phases: HTMLSelectElement;
  readonly #pager: HTMLButtonElement[];
  readonly #count = html("span", "lz-muted");
  readonly #head = html("tr", {});
  readonly #body = html("tbody", {});
  readonly #scroller: HTMLElement;
  readonly #enter: (row: HTMLElement) => void;
  #sort = "";
  #down = false;
  #page = 0;
  #pages = 1;
  #filter = "";
  #selected: string | null = null;
  #columns: string[] = [];

  readonly #events: TableEvents;

  /** `menu` is the button that switches to it. */
  constructor(menu: HTMLElement, events: TableEvents) {
    this.#menu = menu;
    this.#events = events;
    const choice = (label: string, action: string, options: string[]): HTMLSelectElement => {
      const select = html("select", { "aria-label": label, "data-action": action }, ...options.map((value) => html("option", { value }, value === "other" ? "initialization" : value)));
      on(select, "change", () => {
        this.#reset();
      });
      return select;
    };
    this.#modes = choice("Rows", "table-rows", ["ops", "modules", "lines"]);
    this.#phases = choice("Phase", "table-phase", ["all", "forward", "backward", "optimizer", "other"]);
    const step = (by: number, label: string, sign: string): HTMLButtonElement => {
      const button = plainButton({ class: "lz-button", "aria-label": label, title: label }, sign);
      on(button, "click", () => {
        this.#page += by;
        this.ask();
      });
      return button;
    };
    this.#pager = [step(-1, "Previous page", "‹"), step(1, "Next page", "›")];
    const table = html("table", { "aria-label": "Recorded ops" }, html("thead", {}, this.#head), this.#body);
    this.#scroller = html("div", "lz-table-scroll", table);
    this.element = group(
      "Table",
      { class: "lz-table-view", "data-panel": "table" },
      html("div", "lz-table-bar", "Rows", this.#modes, "Phase", this.#phases, this.#count, ...this.#pager),
      this.#scroller,
    );
    this.#enter = roving(this.#body, (button) => {
      button.scrollIntoView({ block: "nearest" });
    });
    on(this.#body, "click", (event) => {
      const row = (event.target as Element).closest("tr");
      const id = row?.dataset["row"];
      if (id === undefined) return;
      const button = row?.querySelector("button");
      if (button) this.#enter(button);
      this.#mark(id);
      this.#events.choose(id, this.#modes.value === "lines");
    });
    this.element.hidden = true;
    this.#press();
  }

  get #rows(): HTMLElement[] {
    return [...this.#body.querySelectorAll("tr")];
  }

  get shown(): boolean {
    return !this.element.hidden;
  }

  /** Shows the table instead of the graph, or the graph again. */
  turn(on: boolean): void {
    if (on === this.shown) return;
    this.element.hidden = !on;
    this.#press();
    this.#events.turn(on);
    if (on) this.#find(this.#selected);
  }

  /** Shows the rows that match a search. */
  search(query: string): void {
    if (query === this.#filter) return;
    this.#filter = query;
    this.#reset();
  }

  /** Goes to the page of the selected box and marks its row. */
  select(id: string | null): void {
    this.#selected = id;
    if (this.shown && !this.#mark(id)) this.#find(id);
  }

  /** Requests the rows again after a run or for another plan. */
  refresh(): void {
    this.ask();
  }

  /** Handles changed states of boxes. */
  states(states: Record<string, readonly [string, ...unknown[]]>): void {
    const column = this.#columns.indexOf("state");
    if (!this.shown || column < 0) return;
    for (const row of this.#rows) {
      const cell = row.children[column];
      const state = states[row.dataset["row"] ?? ""];
      if (state && cell) cell.textContent = state[0];
    }
  }

  show(data: TableData): void {
    const { columns, rows, total, first, sort, down } = data;
    this.#page = data.page;
    this.#pages = data.pages;
    this.#columns = columns.map(([key]) => key);
    const inside = focused(this.element);
    const heads = columns.map(([key, title, number]) => {
      const button = plainButton({ "data-sort": key }, title, html("span", { "aria-hidden": "true" }, key === sort ? (down ? " ▼" : " ▲") : ""));
      on(button, "click", () => {
        const again = this.#sort === key;
        // The first click sorts in the more useful direction, the second in the other, the third in program order.
        if (again && this.#down !== number) this.#sort = "";
        else this.#sort = key;
        this.#down = this.#sort ? (again ? !this.#down : number) : false;
        this.#page = 0;
        this.ask();
      });
      return html("th", { scope: "col", class: number ? "lz-number" : undefined, "aria-sort": key === sort ? (down ? "descending" : "ascending") : "none" }, button);
    });
    this.#head.replaceChildren(...heads);
    this.#body.replaceChildren(
      ...rows.map(({ id, cells }, n) =>
        html(
          "tr",
          { "data-row": id },
          ...cells.map((text, column) =>
            column
              ? html("td", { class: columns[column]?.[2] ? "lz-number" : undefined }, html("bdi", {}, text))
              : html("th", { scope: "row" }, plainButton({ class: "lz-link", tabindex: n ? -1 : 0 }, html("bdi", {}, text))),
          ),
        ),
      ),
    );
    const words = total ? `${grouped(first + 1)}–${grouped(first + rows.length)} of ${grouped(total)}` : "none";
    this.#count.textContent = words;
    this.#events.say(`${words}${sort ? `, sorted by ${columns.find(([key]) => key === sort)?.[1] ?? ""}` : ""}`);
    const [before, after] = this.#pager;
    if (before) before.disabled = this.#page <= 0;
    if (after) after.disabled = this.#page >= this.#pages - 1;
    if (!this.#mark(this.#selected)) this.#scroller.scrollTop = 0;
    if (inside && !inside.isConnected) this.#refocus(inside);
    else if ((inside as HTMLButtonElement | null)?.disabled) this.#modes.focus();
  }

  /** Keeps the focus where it was: on a column header, or among the rows. */
  #refocus(before: HTMLElement): void {
    const key = before.dataset["sort"];
    const id = before.closest("tr")?.dataset["row"];
    const again = key
      ? this.#head.querySelector<HTMLElement>(`[data-sort="${key}"]`)
      : (this.#rows.find((row) => row.dataset["row"] === id) ?? this.#rows[0])?.querySelector<HTMLElement>("button");
    (again ?? this.#modes).focus({ preventScroll: true });
  }

  #press(): void {
    this.#menu.setAttribute("aria-pressed", String(this.shown));
  }

  #reset(): void {
    this.#page = 0;
    this.#sort = "";
    this.#down = false;
    this.ask();
  }

  #find(id: string | null): void {
    this.ask(id !== null && this.#modes.value === "ops" && /^n\d+$/.test(id) ? `@${id}` : undefined);
  }

  private ask(page = String(Math.max(this.#page, 0))): void {
    if (!this.shown) return;
    const way = this.#down ? "down" : "up";
    this.#events.ask("table", `${this.#modes.value} ${this.#sort} ${way} ${page} ${this.#phases.value} ${this.#filter}`);
  }

  #mark(id: string | null): boolean {
    let found = false;
    for (const row of this.#rows) {
      const on = id !== null && row.dataset["row"] === id;
      row.classList.toggle("lz-marked", on);
      if (on) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
      found ||= on;
      if (on) row.scrollIntoView({ block: "nearest" });
    }
    return found;
  }
}
