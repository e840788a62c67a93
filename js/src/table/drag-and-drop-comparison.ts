// Comparison of two graphs: drag one onto the other, or choose it in the settings.

import { focused, group, html, on, plainButton, svg } from "../page/dom";
import { bytesText } from "../page/format";
import type { Compared, Differences, Send } from "../model/types";

const TYPE = "application/x-lazyviz"; // type of the dragged data: the token of a graph
const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [640, 170, 70, 8, 24];

export class ComparisonPanel {
  readonly element = group("Comparison", { class: "lz-comparison", "data-panel": "comparison", tabindex: -1, hidden: true });
  readonly #menu = html("select", { class: "lz-button", "data-action": "compare", "aria-label": "Compare with" });
  #token = "";

  readonly #end = plainButton({ class: "lz-button", "data-action": "end-comparison" });
  readonly #mark: (boxes: Differences | null, most: number) => void;

  /**
   * `place` contains the choice, `chip` is dragged, `root` is the drop target; `mark` shows the differences in the
   * graph.
   */
  constructor(root: HTMLElement, chip: HTMLElement, place: HTMLElement, ask: Send, mark: (boxes: Differences | null, most: number) => void) {
    this.#mark = mark;
    on(this.#end, "click", () => {
      this.close();
      this.end();
    });
    this.#end.hidden = true;
    root.querySelector(".lz-zoom")?.prepend(this.#end);
    place.append(this.#menu);
    this.offer("", []);
    chip.draggable = true;
    // The list of graphs is requested in advance: when the settings open, or the pointer reaches the chip.
    const around = place.closest(".lz-pop");
    for (const [element, name] of [[chip, "pointerenter"], [around, "focusin"], [around, "click"]] as const) {
      element?.addEventListener(name, (event) => {
        if (event.target !== this.#menu) ask("graphs");
      });
    }
    if (chip.matches(":hover") || (around && focused(around))) ask("graphs");
    const compare = (token: string): void => {
      ask("compare", root.classList.contains("lz-dark") ? `${token} dark` : token);
    };
    on(this.#menu, "change", () => {
      if (this.#menu.value) compare(this.#menu.value);
      else {
        this.close();
        this.end();
      }
    });
    on(chip, "dragstart", (event) => {
      if (!this.#token) event.preventDefault();
      event.dataTransfer?.setData(TYPE, this.#token);
      event.dataTransfer?.setData("text/plain", chip.textContent);
    });
    const over = (event: DragEvent): boolean => Boolean(event.dataTransfer?.types.includes(TYPE));
    for (const name of ["dragenter", "dragover"] as const) {
      root.addEventListener(name, (event) => {
        if (!over(event)) return;
        event.preventDefault();
        root.classList.add("lz-drop");
      });
    }
    on(root, "dragleave", (event) => {
      if (!root.contains(event.relatedTarget as Node | null)) root.classList.remove("lz-drop");
    });
    on(root, "drop", (event) => {
      root.classList.remove("lz-drop");
      const token = event.dataTransfer?.getData(TYPE);
      if (!token) return;
      event.preventDefault();
      if (token !== this.#token) compare(token);
    });
    on(this.element, "keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  /** The list of graphs, and the token of this one. */
  offer(token: string, graphs: readonly [token: string, name: string][]): void {
    this.#token = token;
    const { value } = this.#menu;
    const none = graphs.length ? "nothing" : "no other graph is displayed";
    this.#menu.replaceChildren(...[["", none] as const, ...graphs].map(([each, name]) => html("option", { value: each }, name)));
    this.#menu.value = graphs.some(([each]) => each === value) ? value : "";
  }

  /** Ends the comparison: the graph is shown alone again. */
  end(): void {
    this.#menu.value = "";
    this.#end.hidden = true;
    this.#mark(null, 0);
  }

  show({ names, peaks, top, curves, rows, lines, boxes, pictures }: Compared): void {
    this.#end.hidden = false;
    this.#end.textContent = "End comparison";
    this.#end.title = `Bars: pale in ${names[0]}, solid in ${names[1]}; dashed: in ${names[0]} alone`;
    this.#mark(boxes, Math.max(...peaks));
    const close = plainButton({ class: "lz-button", "data-action": "close-comparison" }, "Back to the graph");
    on(close, "click", () => {
      this.close();
    });
    const title = html("h3", {}, `${names[0]} → ${names[1]}`);
    const key = html(
      "p",
      "lz-muted",
      ...names.map((name, n) => html("span", `lz-entry lz-curve-key-${n}`, html("i", {}), `${name}, peak ${bytesText(peaks[n] ?? 0)}`)),
    );
    this.element.replaceChildren(
      html("div", "lz-comparison-head", title, close),
      picture(top, curves, `Memory over both runs: peak ${bytesText(peaks[0])} and ${bytesText(peaks[1])}`),
      key,
      html(
        "p",
        "lz-muted",
        html("span", {}, `At the peak, from ${names[0]} to ${names[1]}: boxes outlined in `, html("b", "lz-grew", "red"), " hold more, in ", html("b", "lz-shrank", "green"), " less; dashed ones are in one graph alone."),
      ),
      html("div", "lz-comparison-pictures", ...pictures.map((src, n) => html("img", { src, alt: names[n] ?? "" }))),
      table("What differs at the peak", [...names, "change", "what"], rows),
      ...(lines.length ? [table("By line", [...names, "change", "line"], lines)] : []),
    );
    this.element.hidden = false;
    this.element.focus({ preventScroll: true });
  }

  close(): void {
    if (this.element.hidden) return;
    this.element.hidden = true;
    this.element.closest<HTMLElement>(".lazyviz")?.querySelector<HTMLElement>('[data-node][tabindex="0"]')?.focus({ preventScroll: true });
  }
}

function picture(top: number, curves: Compared["curves"], words: string): SVGElement {
  const y = (bytes: number): number => TOP + (HEIGHT - TOP - BOTTOM) * (1 - bytes / top);
  const marks = [0, 0.5, 1].flatMap((share) => [
    svg("path", { class: "lz-grid", d: `M${LEFT},${y(top * share)}H${WIDTH}` }),
    svg("text", { class: "lz-axis", x: LEFT - 8, y: y(top * share) + 4 }, bytesText(top * share)),
  ]);
  const drawn = curves.map((sizes, n) =>
    svg("polyline", {
      class: `lz-curve-${n}`,
      points: sizes.map((size, at) => `${(LEFT + ((WIDTH - LEFT) * at) / Math.max(sizes.length - 1, 1)).toFixed(1)},${y(size).toFixed(1)}`).join(" "),
    }),
  );
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words }, ...marks, ...drawn);
}

function table(title: string, heads: readonly string[], rows: readonly string[][]): HTMLElement {
  const cell = (words: string, n: number): HTMLElement => {
    const grew = n === 2 ? (words.startsWith("+") ? "lz-grew" : /^[-−]/.test(words) ? "lz-shrank" : "") : "";
    return html("td", { class: [n < 3 ? "lz-number" : "", grew].filter(Boolean).join(" ") || undefined }, html("bdi", {}, words));
  };
  return html(
    "table",
    {},
    html("caption", {}, title),
    html("thead", {}, html("tr", {}, ...heads.map((each, n) => html("th", { scope: "col", class: n < 3 ? "lz-number" : undefined }, each)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map(cell)))),
  );
}
