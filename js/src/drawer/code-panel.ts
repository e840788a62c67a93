// The user's code beside the graph: each line with its allocations, its share of the peak and its time.

import { group, html, on, plainButton } from "../page/dom";
import { bytesText, categoryText, seconds } from "../page/format";
import { whenLoaded } from "../page/load-deferred-bundle";
import { roving } from "../page/roving-tabindex";
import type { CodeFacts, CodeMessage, Layer, Send } from "../model/types";

const HEADS = ["Line", "Code", "Allocates", "At peak", "Time"];

interface Row {
  row: HTMLElement;
  cells: HTMLElement[];
  button: HTMLButtonElement;
}

export class CodePanel {
  readonly element: HTMLElement;
  readonly #body = html("div", "lz-code-body");
  readonly #rows = new Map<string, Row>();
  readonly #foot = html("p", "lz-muted lz-code-foot");
  readonly #layers = group("Largest layers at the peak", { class: "lz-layers" });
  /** The largest layer in one line, beside the tabs of a closed drawer. */
  readonly first = html("p", "lz-first");
  #table = html("table", {});
  #asking = false;
  #again = false;
  readonly #enter: (button: HTMLElement) => void;

  readonly #ask: Send;

  constructor(ask: Send) {
    this.#ask = ask;
    this.element = html("div", { class: "lz-code", "data-panel": "code" }, this.#body, this.#layers);
    on(this.#body, "click", (event) => {
      const id = (event.target as Element).closest("tr")?.dataset["line"];
      if (id !== undefined && this.#rows.has(id)) this.#choose(id);
    });
    this.#enter = roving(this.#body, (button) => {
      const row = button.closest("tr");
      this.#bring(row ?? undefined);
    });
  }

  /** Requests the changes after a new plan or a run: one request at a time, always for the newest state. */
  refresh(): void {
    this.#again = this.#asking;
    if (this.#asking) return;
    this.#asking = true;
    this.#ask("code", this.#rows.size ? "facts" : "");
  }

  show({ sections, facts }: CodeMessage): void {
    this.#asking = false;
    if (sections) this.#build(sections, facts);
    this.#fill(facts);
    if (sections) {
      // The line that holds most at the peak is in view from the start.
      const held = (id: string): number => facts.lines[id]?.held ?? 0;
      const [largest] = [...this.#rows.keys()].sort((a, b) => held(b) - held(a));
      requestAnimationFrame(() => { // only then does the panel have its height
        this.#bring(this.#rows.get(largest ?? "")?.row);
      });
    }
    if (this.#again) this.refresh();
  }

  /** The layers with the most memory at the peak; `go` shows one in the graph. */
  showLayers(layers: readonly Layer[], go: (chain: string[]) => void): void {
    const rows = layers.map(({ label, name: whole = label, cls, through, line, bytes, category, share, chain }) => {
      const name = plainButton({ class: "lz-link", title: whole }, html("bdi", {}, ...label.split(/(?=\.)/).flatMap((part) => [html("wbr"), part])));
      on(name, "click", () => {
        go(chain);
      });
      return html(
        "li",
        {},
        html("div", {}, html("span", { class: `lz-swatch lz-cat-${category}`, title: categoryText(category) }), name, html("b", {}, bytes)),
        html("div", "lz-muted lz-layer-sub", html("span", "lz-layer-class", cls), ...[through, line].filter(Boolean).flatMap((text, n) => [cls || n ? " · " : "", html("span", "lz-layer-part", text)])),
        html("i", { class: `lz-cat-${category}`, "aria-hidden": "true", style: `width:${(100 * Math.min(share, 1)).toFixed(1)}%` }),
      );
    });
    const [most] = layers;
    this.first.replaceChildren(...(most ? [html("b", {}, most.label), [` ${most.cls}`, most.through, most.line, most.bytes].filter(Boolean).join(" · ")] : []));
    this.#layers.replaceChildren(...(rows.length ? [html("h3", {}, "Largest layers at the peak"), html("ul", {}, ...rows)] : []));
  }

  /** Marks lines: those of the selected box, or the chosen one. */
  mark(ids: readonly string[]): void {
    const marked = new Set(ids);
    let first: HTMLElement | undefined;
    for (const [id, { row, button }] of this.#rows) {
      const on = marked.has(id);
      row.classList.toggle("lz-marked", on);
      if (on) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
      if (on) first ??= row;
    }
    this.#bring(first);
  }

  /** Scrolls a row into view, only vertically. */
  #bring(row: HTMLElement | undefined): void {
    if (!row) return;
    const top = row.offsetTop;
    const { scrollTop, clientHeight } = this.#body;
    const head = this.#table.tHead?.offsetHeight ?? 0;
    if (top < scrollTop + head || top + row.offsetHeight > scrollTop + clientHeight) {
      let first = row; // align the top with a whole row
      while (first.offsetTop > top - clientHeight / 3 && first.previousElementSibling) first = first.previousElementSibling as HTMLElement;
      this.#body.scrollTop = first.offsetTop - head;
    }
  }

  #choose(id: string): void {
    const row = this.#rows.get(id);
    if (row) this.#enter(row.button);
    this.mark([id]);
    this.#ask("line", id);
  }

  #build(sections: NonNullable<CodeMessage["sections"]>, facts: CodeFacts): void {
    this.#rows.clear();
    const parts: Node[] = [];
    const alone = sections.length === 1 && sections[0]?.label === "this cell";
    sections.forEach(({ label, lines }, at) => {
      const group = html("tbody", {});
      if (!alone) group.append(html("tr", "lz-file", html("th", { scope: "rowgroup", colspan: 3 }, html("bdi", {}, label))));
      let last = lines[0]?.[0] ?? 0;
      for (const [line, text] of lines) {
        if (line > last + 1) group.append(html("tr", { class: "lz-skipped", "aria-hidden": "true" }, html("td", {}, "⋮"), html("td", { colspan: 2 })));
        last = line;
        const id = `${at}:${line}`;
        const cells = HEADS.map(() => html("td", {}));
        const row = html("tr", { "data-line": id }, ...cells);
        cells[0]?.append(String(line));
        if (facts.lines[id]) {
          const button = plainButton({ tabindex: this.#rows.size ? -1 : 0, dir: "ltr" }, text || " ");
          cells[1]?.append(button);
          this.#rows.set(id, { row, cells, button });
        } else {
          row.className = "lz-none";
          cells[1]?.append(html("code", { dir: "ltr", title: text.length > 24 ? text.trim() : undefined }, text || " "));
        }
        group.append(row);
      }
      parts.push(group);
    });
    const heads = HEADS.map((name) => html("th", { scope: "col" }, name));
    whenLoaded(({ headTitles }) => {
      heads.forEach((head, n) => (head.title = headTitles[n] ?? ""));
    });
    this.#table = html("table", { "aria-label": "The code, line by line" }, html("thead", {}, html("tr", {}, ...heads)), ...parts);
    this.#body.replaceChildren(this.#table, this.#foot);
  }

  #fill({ lines, peak, elsewhere }: CodeFacts): void {
    const ran = Object.values(lines).some((fact) => fact.seconds !== undefined);
    const head = this.#table.tHead?.rows[0]?.cells[4];
    if (head) head.textContent = ran ? "Time" : "≈ Time";
    const most = Math.max(1, ...Object.values(lines).map((fact) => (fact.held ?? 0) + (fact.gradientHeld ?? 0)));
    for (const [id, { row, cells, button }] of this.#rows) {
      const fact = lines[id] ?? {};
      const share = (bytes = 0): string => percent(peak ? bytes / peak : 0);
      const length = (bytes = 0): string => `width:${((bytes / most) * 100).toFixed(1)}%`;
      cells[2]?.replaceChildren(fact.bytes ? bytesText(fact.bytes) : "");
      cells[3]?.replaceChildren(
        html("span", {}, fact.held ? share(fact.held) : ""),
        html("i", { "aria-hidden": "true" }, html("b", { style: length(fact.held) }), html("b", { class: "lz-pale", style: length(fact.gradientHeld) })),
      );
      cells[4]?.replaceChildren(fact.seconds !== undefined ? seconds(fact.seconds) : fact.projected ? `${ran ? "≈" : ""}${seconds(fact.projected)}` : "");
      row.classList.toggle("lz-failed-line", Boolean(fact.failed));
      row.classList.toggle("lz-sync-line", Boolean(fact.sync));
      whenLoaded(({ lineWords }) => {
        const told = lineWords(fact, share);
        row.title = `${button.textContent.trim()}\n${told}`;
        button.setAttribute("aria-description", told);
      });
      cells[0]?.setAttribute("data-mark", fact.failed ? "✗" : fact.sync ? "‖" : "");
    }
    const rest = elsewhere > 0 && peak ? `${percent(elsewhere / peak)} of the peak (${bytesText(elsewhere)}) was there before, or is made elsewhere` : "";
    this.#foot.textContent = rest;
  }
}

function percent(share: number): string {
  return share && share < 0.001 ? "<0.1 %" : `${(share * 100).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
}
