// The content of the details panel: a box, a point or range of the chart, or an error. In the widget's deferred part.

import { html, on, plainButton } from "../page/dom";
import { categoryText, grouped } from "../page/format";
import type { Details, Failure, Flow, Link, Memory, Moment, Range, Send, Source, TensorRow } from "../model/types";
import { valuesBlock } from "./value-stats";

const SHOWN_ALIVE = 14;

export interface DetailsEvents {
  /** A link to another box was followed. */
  go(chain: string[]): void;
  ask: Send;
}

/** Writes the content of one panel. */
export class Writer {
  readonly element: HTMLElement;
  readonly #events: DetailsEvents;

  constructor(element: HTMLElement, events: DetailsEvents) {
    this.element = element;
    this.#events = events;
  }

  /** What is alive at the peak, largest first. */
  showPeak(memory: Memory): void {
    const rows = memory.alive.slice(0, SHOWN_ALIVE).map((alive) =>
      html(
        "li",
        {},
        html("span", { class: `lz-swatch lz-cat-${alive.category}`, title: categoryText(alive.category) }),
        this.#link({ label: alive.label, chain: alive.chain }),
        html("span", "lz-number", alive.bytes),
      ),
    );
    const more = memory.aliveCount - rows.length;
    this.element.replaceChildren(
      html("h3", {}, "Alive at the peak"),
      html("p", "lz-muted", `${memory.peakText}${memory.peakName ? ` at ${memory.peakName}` : ""}`),
      html("ul", "lz-list", ...rows),
      ...(more > 0 ? [html("p", "lz-muted", `and ${grouped(more)} smaller ones`)] : []),
    );
    this.element.scrollTop = 0;
  }

  /** Storages that are alive at the chosen point of the chart. */
  showMoment(moment: Moment): void {
    const rows = moment.alive.slice(0, SHOWN_ALIVE).map((alive) => {
      const item = html(
        "li",
        {},
        html("span", { class: `lz-swatch lz-cat-${alive.category}`, title: categoryText(alive.category) }),
        this.#link({ label: alive.label, chain: alive.chain }),
        html("span", "lz-number", alive.bytes),
      );
      const why = [alive.line, alive.keeper].filter(Boolean).join(" · ");
      return why ? [item, html("li", "lz-muted lz-why", why)] : [item];
    });
    const categories = html("dl", {});
    for (const [name, bytes] of moment.categories) categories.append(html("dt", {}, categoryText(name)), html("dd", {}, bytes));
    const more = moment.aliveCount - rows.length;
    this.element.replaceChildren(
      html("h3", {}, `Alive at op ${grouped(moment.position + 1)}`),
      html("p", "lz-muted", `${moment.bytes} at `, this.#link({ label: moment.name, chain: moment.chain })),
      ...(moment.source ? [sourceBlock(moment.source)] : []),
      categories,
      html("ul", "lz-list", ...rows.flat()),
      ...(more > 0 ? [html("p", "lz-muted", `and ${grouped(more)} smaller ones`)] : []),
    );
    this.element.scrollTop = 0;
  }

  /** Storages that are allocated in a part of the run that is zoomed in. */
  showRange(range: Range): void {
    const [start, stop] = range.points.range;
    const rows = range.made.slice(0, SHOWN_ALIVE).map((made) =>
      html(
        "li",
        {},
        html("span", { class: `lz-swatch lz-cat-${made.category}`, title: categoryText(made.category) }),
        this.#link({ label: made.label, chain: made.chain }),
        html("span", "lz-number", `${made.bytes} · ${(100 * made.share).toFixed(made.share < 0.1 ? 1 : 0)} %`),
      ),
    );
    const more = range.madeCount - rows.length;
    this.element.replaceChildren(
      html("h3", {}, `Ops ${grouped(start + 1)} to ${grouped(stop)}`),
      html("p", "lz-muted", `allocate ${range.madeText}; peak ${range.peakText} at ${range.peakName}`),
      html("ul", "lz-list", ...rows),
      ...(more > 0 ? [html("p", "lz-muted", `and ${grouped(more)} smaller ones`)] : []),
    );
    this.element.scrollTop = 0;
  }

  show(details: Details): void {
    const parts: Node[] = [html("h3", { title: details.title }, details.title)];
    if (details.subtitle) parts.push(html("p", "lz-muted", details.subtitle));
    if (details.source) parts.push(sourceBlock(details.source));
    if (details.facts.length) {
      const list = html("dl", {});
      for (const [name, value] of details.facts) list.append(html("dt", {}, name), html("dd", {}, value));
      parts.push(list);
    }
    if (details.forward) {
      parts.push(html("p", "lz-forward", "gradient of ", this.#link(details.forward)));
    }
    parts.push(...this.#tensors("Inputs", details.inputs), ...this.#tensors("Outputs", details.outputs));
    if (details.readable) {
      const look = plainButton({ class: "lz-button", "data-action": "summarize" }, "Summarize");
      look.title = "Read the current values: minimum, maximum, mean, NaN, and a histogram";
      on(look, "click", () => {
        this.#events.ask("summarize", details.id);
      });
      parts.push(look);
    }
    parts.push(...this.#flows(details.flows), ...this.#links(details));
    this.element.replaceChildren(...parts);
    this.element.scrollTop = 0;
  }

  #tensors(title: string, rows: TensorRow[]): Node[] {
    if (!rows.length) return [];
    const items = rows.map((row) => {
      const item = html(
        "li",
        {},
        html("div", "lz-tensor", html("code", {}, row.shape), html("span", {}, row.dtype), html("span", "lz-number", row.bytes)),
      );
      if (row.name) item.append(html("div", {}, html("b", {}, row.name)));
      if (row.from) item.append(html("div", "lz-muted", "from ", this.#link(row.from)));
      if (row.readers?.length) {
        const readers = html("div", "lz-muted", "read by ");
        row.readers.forEach((reader, n) => readers.append(n ? ", " : "", this.#link(reader)));
        if (row.more) readers.append(` and ${row.more} more`);
        item.append(readers);
      }
      if (row.values) item.append(valuesBlock(row.values));
      return item;
    });
    return [html("h4", {}, title), html("ul", "lz-tensors", ...items)];
  }

  /** The ops of a line. */
  #links({ links, more }: Details): Node[] {
    if (!links?.length) return [];
    const items = links.map((link) => html("li", {}, this.#link(link), html("span", "lz-number", link.bytes)));
    const rest = more ? [html("p", "lz-muted", `and ${grouped(more)} more`)] : [];
    return [html("h4", {}, "Ops"), html("ul", "lz-list", ...items), ...rest];
  }

  #flows(flows: Flow[]): Node[] {
    if (!flows.length) return [];
    const items = flows
      .slice(0, 12)
      .map((flow) =>
        html(
          "li",
          {},
          html("span", "lz-muted", flow.out ? "to" : "from"),
          this.#link(flow),
          html("span", "lz-number", flow.bytes),
        ),
      );
    return [html("h4", {}, "Across phases"), html("ul", "lz-list", ...items)];
  }

  #link(link: Link): HTMLElement {
    if (!link.chain.length) return html("span", { class: "lz-name", title: link.label }, link.label);
    const button = plainButton({ class: "lz-link", title: link.label }, link.label);
    on(button, "click", () => {
      this.#events.go(link.chain);
    });
    return button;
  }
}

export function sourceBlock(source: Source): HTMLElement {
  return html(
    "div",
    "lz-source",
    html("div", "lz-muted", `${source.file}, line ${source.line}`),
    html("pre", {}, html("code", {}, source.text)),
  );
}

/** The error of the last run, with the user's line where it occurred. */
export function failureBlock(failure: Failure, go: (chain: string[]) => void): HTMLElement {
  const block = html("div", { class: "lz-error", role: "alert" }, html("pre", {}, failure.message));
  if (failure.sizes?.length) block.append(html("ul", {}, ...failure.sizes.map((text) => html("li", {}, html("bdi", {}, text)))));
  if (failure.source) block.append(sourceBlock(failure.source));
  if (failure.chain.length) {
    const button = plainButton({ class: "lz-link" }, "Show the op that failed");
    on(button, "click", () => {
      go(failure.chain);
    });
    block.append(button);
  }
  return block;
}

