// Drawing the edges of the picture, and their labels where there is room.

import { clashing } from "./boxes";
import { svg } from "../page/dom";
import type { Line } from "../model/open-groups-and-layout";

const keyOf = (line: Line): string => `${line.source} ${line.target} ${line.label} ${line.path}`;

export class Edges {
  readonly element = svg("g", "lz-edges");
  readonly labels = svg("g", "lz-edge-labels");
  #drawn = new Map<string, SVGGElement>();

  /** Draws these lines and returns the new elements; existing ones are not changed. */
  draw(lines: readonly Line[]): Element[] {
    const next = new Map<string, SVGGElement>();
    for (const line of lines) next.set(keyOf(line), this.#drawn.get(keyOf(line)) ?? edge(line));
    for (const [key, element] of this.#drawn) if (!next.has(key)) element.remove();
    const added = [...next.values()].filter((element) => !element.parentNode);
    this.element.append(...added);
    this.#drawn = next;
    this.labels.replaceChildren(
      ...lines.flatMap(({ labelAt, shape, tip }) =>
        shape && tip ? [svg("text", { class: "lz-edge-label lz-edge-shape", x: tip.x, y: tip.down ? tip.y - 9 : tip.y + 17 }, ...clashing(shape))] : labelAt ? [svg("text", { class: "lz-edge-label", x: labelAt[0], y: labelAt[1] }, labelAt[2])] : [],
      ),
    );
    return [...added, this.labels];
  }

  /** Marks the edges that end or begin at the selected box. */
  mark(selected: string | null): void {
    for (const element of this.#drawn.values()) {
      const { from, to, within } = element.dataset;
      const [outFrom, outTo] = (within ?? "").split(" ");
      element.classList.toggle("lz-relation-producer", selected !== null && (to === selected || outTo === selected));
      element.classList.toggle("lz-relation-consumer", selected !== null && (from === selected || outFrom === selected));
    }
  }
}

function edge(line: Line): SVGGElement {
  const { tip, width } = line;
  const size = 3.4 + width * 0.6;
  const tipPath = tip ? [svg("path", { class: "lz-edge-tip", d: tipOf(tip, size) })] : [];
  const made = svg(
    "g",
    { class: line.failed ? "lz-edge lz-edge-failed" : "lz-edge", "data-from": line.source, "data-to": line.target, "data-within": `${line.from} ${line.to}` },
    svg("title", {}, line.label),
    svg("path", { class: "lz-edge-reach", d: line.path }),
    svg("path", { class: "lz-edge-line", d: line.path }),
    ...tipPath,
  );
  made.style.setProperty("--lz-wide", `${width}px`);
  return made;
}

function tipOf({ x, y, down }: NonNullable<Line["tip"]>, size: number): string {
  const back = down ? y - 1.75 * size : y + 1.75 * size;
  return `M${(x - size).toFixed(1)},${back.toFixed(1)}L${x},${y}L${(x + size).toFixed(1)},${back.toFixed(1)}Z`;
}
