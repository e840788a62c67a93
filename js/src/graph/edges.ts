// Drawing the edges of the picture, and where there is room what flows along them.

import { svg } from "../page/dom";
import type { Line } from "../model/scene";

const keyOf = (line: Line): string => `${line.from} ${line.to} ${line.path}`;

export class Edges {
  readonly element = svg("g", { class: "lz-edges" });
  readonly labels = svg("g", { class: "lz-edge-labels" });
  #drawn = new Map<string, SVGGElement>();

  /** Draws these lines and returns the new ones; those that are drawn already stay as they are. */
  draw(lines: readonly Line[]): Element[] {
    const next = new Map<string, SVGGElement>();
    for (const line of lines) next.set(keyOf(line), this.#drawn.get(keyOf(line)) ?? edge(line));
    for (const [key, element] of this.#drawn) if (!next.has(key)) element.remove();
    const added = [...next.values()].filter((element) => !element.parentNode);
    this.element.append(...added);
    this.#drawn = next;
    this.labels.replaceChildren(
      ...lines.flatMap(({ labelAt }) =>
        labelAt ? [svg("text", { class: "lz-edge-label", x: labelAt[0], y: labelAt[1] }, labelAt[2])] : [],
      ),
    );
    return [...added, this.labels];
  }

  /** Marks those that end at the selected box and those that begin there. */
  mark(selected: string | null): void {
    for (const element of this.#drawn.values()) {
      const { from, to } = element.dataset;
      element.classList.toggle("lz-relation-producer", selected !== null && to === selected);
      element.classList.toggle("lz-relation-consumer", selected !== null && from === selected);
    }
  }
}

function edge(line: Line): SVGGElement {
  const { x, y, down } = line.tip;
  const back = down ? y - 7 : y + 7;
  return svg(
    "g",
    { class: "lz-edge", "data-from": line.from, "data-to": line.to },
    svg("title", {}, line.label),
    svg("path", { class: "lz-edge-reach", d: line.path }),
    svg("path", { class: "lz-edge-line", d: line.path }),
    svg("path", { class: "lz-edge-tip", d: `M${x - 4},${back}L${x},${y}L${x + 4},${back}Z` }),
  );
}
