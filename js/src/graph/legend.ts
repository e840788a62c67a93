// The legend of the graph, with a menu of the numbers that boxes can show.

import { COLORINGS, noteKey, type Coloring, type Colors } from "./colors";
import { group, html, on } from "../page/dom";
import type { Note } from "../model/types";

const EMPTY: Record<string, string> = {
  time: "no times yet: they are measured when the graph runs",
  flops: "no op here computes products",
  module: "no op here belongs to a module",
};

export class Legend {
  readonly element = group("Legend", { class: "lz-color-key" });
  readonly menu: HTMLElement;
  readonly #select = html("select", { "data-action": "color", "aria-label": "Color by" });
  readonly #own = html("optgroup", { label: "your numbers" });
  readonly #color = html("span", "lz-color-key-part");
  readonly #relations = html("span", "lz-color-key-part");

  constructor(choose: (by: Coloring) => void) {
    const select = this.#select;
    for (const [name, text] of Object.entries(COLORINGS)) select.append(html("option", { value: name }, text));
    on(select, "change", () => {
      choose(select.value);
    });
    this.menu = html("label", "lz-color-menu", select);
    this.element.append(this.#color, this.#relations);
  }

  /** The annotations that can be chosen. */
  offer(notes: readonly Note[]): void {
    this.#own.replaceChildren(...notes.map(([name]) => html("option", { value: noteKey(name) }, name)));
    if (notes.length) this.#select.append(this.#own);
    else this.#own.remove();
  }

  showColors(colors: Colors): void {
    const { entries, ticks } = colors.legend();
    this.#select.value = colors.by;
    const swatch = (fill: string, title = ""): HTMLElement =>
      html("span", { class: "lz-swatch", style: `background:${fill}`, title });
    const parts: (Node | string)[] = [html("b", {}, colors.name)];
    if (ticks.length > 1) {
      const [low = "", middle = "", high = ""] = ticks;
      const half = (): HTMLElement => html("span", "lz-scale", html("i", {}), html("i", {}));
      const scale = middle ? [half(), middle, half()] : [half()];
      parts.push(html("span", { class: "lz-ticks", title: "A linear scale" }, low, ...scale, high), html("span", "lz-muted", "linear"));
    } else if (!entries.length) parts.push(html("span", "lz-muted", ticks.length ? "all are 0" : (EMPTY[colors.by] ?? "")));
    else {
      for (const { fill, text } of entries) parts.push(html("span", "lz-entry", swatch(fill), html("bdi", {}, text)));
    }
    this.#color.replaceChildren(...parts);
  }

  /** The kinds of lines that are drawn around the selected box. */
  showRelations(kinds: readonly (readonly [kind: string, text: string])[]): void {
    this.#relations.replaceChildren(
      ...kinds.map(([kind, text]) => html("span", `lz-entry lz-relation-${kind}`, html("i", {}), text)),
    );
  }
}
