// The one legend of the graph, and the menu that says what its colours mean.

import { COLOURINGS, type Colouring, type Colours } from "./colors";
import { html } from "../page/dom";

const EMPTY: Partial<Record<Colouring, string>> = {
  time: "no times yet: they are measured when the graph runs",
  module: "no op here belongs to a module",
};

export class Legend {
  readonly element = html("div", { class: "lz-colour-key", role: "group", "aria-label": "Legend" });
  readonly menu: HTMLElement;
  readonly #colour = html("span", { class: "lz-colour-key-part" });
  readonly #note = html("span", { class: "lz-colour-key-part lz-muted" });
  readonly #relations = html("span", { class: "lz-colour-key-part" });

  constructor(choose: (by: Colouring) => void) {
    const select = html("select", { "data-action": "colour", "aria-label": "Colour by" });
    for (const [name, text] of Object.entries(COLOURINGS)) select.append(html("option", { value: name }, text));
    select.addEventListener("change", () => {
      choose(select.value as Colouring);
    });
    this.menu = html("label", { class: "lz-colour-menu" }, select);
    this.element.append(this.#colour, this.#relations, this.#note);
  }

  showColours(colours: Colours): void {
    const { entries, scale, high } = colours.legend();
    const swatch = (fill: string, title = ""): HTMLElement =>
      html("span", { class: "lz-swatch", style: `background:${fill}`, title });
    const parts: (Node | string)[] = [html("b", {}, COLOURINGS[colours.by])];
    if (scale && high) {
      const half = html("span", { class: "lz-scale", title: "A linear scale" }, html("i", {}), html("i", {}));
      parts.push("0", half, high, html("span", { class: "lz-muted" }, "linear"));
    } else if (!entries.length) parts.push(html("span", { class: "lz-muted" }, EMPTY[colours.by] ?? ""));
    else {
      for (const { fill, text } of entries) parts.push(html("span", { class: "lz-entry" }, swatch(fill), html("bdi", {}, text)));
    }
    this.#colour.replaceChildren(...parts);
  }

  /** Boxes tell the sizes that were recorded, also while a plan of another batch is shown. */
  showNote(text: string): void {
    this.#note.textContent = text;
  }

  /** The kinds of lines that are drawn about the selected box. */
  showRelations(kinds: readonly (readonly [kind: string, text: string])[]): void {
    this.#relations.replaceChildren(
      ...kinds.map(([kind, text]) => html("span", { class: `lz-entry lz-relation-${kind}` }, html("i", {}), text)),
    );
  }
}
