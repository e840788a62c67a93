// The drawer beside the graph: one panel at a time, each with a tab. In a narrow widget it is a bar at the bottom that
// a click on a tab opens.

import { group, html, on, plainButton } from "../page/dom";

export type Tab = "error" | "code" | "alive" | "details";
const TITLES: Record<Tab, string> = { error: "Error", code: "Code", alive: "Alive at peak", details: "Details" };

export class Drawer {
  readonly element: HTMLElement;
  readonly #tabs = new Map<Tab, HTMLButtonElement>();
  #current: Tab = "code";

  readonly #panels: Record<Tab, HTMLElement>;

  constructor(panels: Record<Tab, HTMLElement>) {
    this.#panels = panels;
    const list = html("div", { class: "lz-tabs", role: "tablist", "aria-label": "About the graph" });
    this.element = group("Code and details", { class: "lz-drawer", "data-part": "drawer" }, list);
    for (const [name, panel] of Object.entries(panels) as [Tab, HTMLElement][]) {
      const tab = plainButton({ role: "tab", class: "lz-tab", "data-tab": name, "data-words": TITLES[name] }, TITLES[name]);
      on(tab, "click", () => {
        const same = this.#current === name && this.element.classList.contains("lz-raised");
        this.show(name);
        this.element.classList.toggle("lz-raised", !same);
      });
      this.#tabs.set(name, tab);
      list.append(tab);
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-label", TITLES[name]);
      this.element.append(panel);
    }
    on(list, "keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined) return;
      const shown = [...this.#tabs].filter(([, tab]) => !tab.hidden).sort(([, a], [, b]) => (a.compareDocumentPosition(b) & 4 ? -1 : 1));
      const at = shown.findIndex(([name]) => name === this.#current);
      const to = shown[(at + by + shown.length) % shown.length];
      if (!to) return;
      event.preventDefault();
      this.show(to[0]);
      to[1].focus();
    });
    this.offer("error", false);
  }

  /** Brings a panel to the front. */
  show(name: Tab): void {
    const wanted = this.#tabs.get(name)?.hidden ? "alive" : name;
    this.#current = wanted;
    for (const [each, tab] of this.#tabs) {
      const on = each === wanted;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      this.#panels[each].hidden = !on;
    }
  }

  /** Brings a panel to the front and, in a narrow widget, scrolls to it. */
  raise(name: Tab): void {
    this.show(name);
    this.element.classList.add("lz-raised");
  }

  /** Whether the panel exists; a tab that is added `last` does not move the others. */
  offer(name: Tab, there: boolean, last = false): void {
    const tab = this.#tabs.get(name);
    if (tab) tab.hidden = !there;
    if (tab && last) tab.parentElement?.append(tab);
    if (!there && this.#current === name) this.show("code");
  }

  /** The displayed storages are those of a moment other than the peak. */
  titleAlive(words: string): void {
    const tab = this.#tabs.get("alive");
    if (!tab) return;
    tab.textContent = words;
    tab.dataset["words"] = words;
  }
}
