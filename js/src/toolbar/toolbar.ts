// Toolbar in one row: run controls and state, the verdict, findings, plan controls, search, and icon buttons.

import { html, on, plainButton } from "../page/dom";
import { grouped } from "../page/format";
import { icon, type ICONS } from "../page/icons";
import { Popover, row } from "../page/popover";
import type { Batch, Failure, Memory, State } from "../model/types";

const STATES: Record<State, string> = {
  pending: "not run",
  running: "running",
  done: "evaluated",
  failed: "failed",
  interrupted: "interrupted",
};

export type ToolbarAction = "fit" | "collapse-all" | "expand-all" | "views" | "full-screen";

/** Elements of other modules that the toolbar contains. */
export interface Parts {
  run: HTMLElement; // Evaluate and Cancel
  progress: HTMLElement;
  plan: readonly HTMLElement[]; // device and batch
  search: HTMLElement;
  table: HTMLElement;
  save: HTMLElement;
  settings: readonly (readonly [title: string, control: HTMLElement])[];
  findings: readonly HTMLElement[];
}

export class Toolbar {
  readonly element: HTMLElement;
  readonly #state = html("span", "lz-state");
  readonly #summary = html("p", "lz-muted lz-summary");
  readonly #buttons = new Map<ToolbarAction, HTMLButtonElement>();
  readonly chip = html("span", "lz-verdict");
  readonly #count = html("b", {});
  readonly #badge: Popover;
  readonly #title: string;
  #verdict = "";
  #words = html("span", {});
  #told: string[] = []; // displayed state and result
  private failure: Failure | null = null;

  constructor(
    title: string,
    memory: Memory | null,
    batch: Batch | null,
    views: boolean,
    { run, progress, plan, search, table, save, settings, findings }: Parts,
    act: (action: ToolbarAction) => void,
  ) {
    const button = (action: ToolbarAction, label: string, hint: string, face?: keyof typeof ICONS): HTMLButtonElement => {
      const classes = face ? "lz-button lz-icon-button" : "lz-button";
      const made = plainButton({ "data-action": action, title: hint, class: classes, "aria-label": face && label }, face ? icon(face) : label);
      on(made, "click", () => {
        act(action);
      });
      this.#buttons.set(action, made);
      return made;
    };
    this.#title = title === "lazyviz" ? "" : title.replace(/^lazyviz, /, "");
    const viewsButton = button("views", "Views", "Also draw the ops that only view memory (view, t, detach)");
    viewsButton.classList.add("lz-toggle");
    viewsButton.setAttribute("aria-pressed", String(views));
    if (memory) this.showVerdict(memory, batch);
    this.#badge = new Popover("findings", "Findings", html("span", "lz-badge-face", icon("finding"), this.#count), ...findings);
    const pop = new Popover(
      "settings",
      "Settings",
      icon("settings"),
      ...settings.map(([name, control]) => row(name, control)),
      row("Draw", viewsButton, button("expand-all", "Expand all", "Open every group")),
      this.#summary,
    );
    this.element = html(
      "div",
      { class: "lz-toolbar", "data-part": "toolbar" },
      html("h2", { class: "lz-said", title }, title),
      run,
      html("span", "lz-state-cell", this.#state, progress),
      ...(memory ? [this.chip] : []),
      html("span", "lz-gap"),
      this.#badge.element,
      ...plan,
      search,
      html(
        "div",
        { class: "lz-icons", role: "toolbar", "aria-label": "Graph" },
        button("fit", "Fit", "Show the whole graph (F)", "fit"),
        button("collapse-all", "Collapse all", "Close every group (C)", "collapse"),
        table,
        save,
        button("full-screen", "Full screen", "Full screen", "full"),
        pop.element,
      ),
    );
    this.countFindings(0);
  }

  /** The state and the result of the last run. */
  words = "";

  showState(state: State, report: string, ops: number, empty = false, begun = false): void {
    const words = empty ? "nothing to run" : state === "pending" && (report || begun) ? "partly run" : STATES[state];
    const more = report && state !== "running" ? report : ops && state === "pending" ? `${grouped(ops)} ops` : "";
    this.#told = [words, more];
    this.#tellState();
  }

  #tellState(): void {
    const { failure } = this;
    const stopped = failure?.stopped ? [failure.stopped] : this.#told;
    this.words = stopped.filter(Boolean).join(" · ");
    // The time of a run implies that it has ended. The row has no room for both, and text that does not fit is hidden.
    this.#state.replaceChildren(...this.words.replace(/^evaluated · /, "").replace(/ · (?=ran|\d)/, "\u00a0· ").split(/(?=, measured|\u00a0)/).map((text) => html("span", {}, text)));
    this.#state.title = [...stopped, this.#title].filter(Boolean).join(" · ");
  }

  /** Shows the verdict, with the planned batch size if Evaluate runs another one. */
  showVerdict(memory: Memory, batch: Batch | null): void {
    this.chip.dataset["verdict"] = memory.verdict;
    const other = batch && batch.size !== batch.recorded ? ` · for ${grouped(batch.size)} sample${batch.size === 1 ? "" : "s"}` : "";
    this.#verdict = memory.verdictShort + other;
    this.chip.title = memory.verdictTitle ? `${memory.verdictText}. ${memory.verdictTitle}` : memory.verdictText;
    this.#tell();
  }

  /** Shows the first line of an error instead of the verdict. */
  showError(failure: Failure | null): void {
    this.failure = failure;
    this.#tellState();
    this.#tell();
  }

  #tell(): void {
    const { failure } = this;
    this.chip.classList.toggle("lz-failure", failure !== null);
    if (failure) this.chip.title = failure.message.trim().split("\n", 1)[0] ?? "";
    this.#words = html("span", "lz-chip-words");
    this.chip.replaceChildren(html("span", { class: "lz-dot", "aria-hidden": "true" }), this.#words);
    this.tellFit();
  }

  /** Writes the chip's text in one line or, if necessary, two. A longer error is reduced to what failed and where. */
  tellFit(): void {
    const words = this.#words;
    const { failure } = this;
    const write = (text: string): void => {
      // Lines may break only between numbers with their units.
      words.replaceChildren(...(failure ? [text] : text.split(/ (?=[·(]|of )/).flatMap((part, n) => [n ? " " : "", html("span", {}, part)])));
    };
    const small = (on: boolean): void => {
      this.chip.classList.toggle("lz-small", on);
    };
    const { title } = this.chip;
    for (const text of failure ? [title, title.replace(/^\w+: /, ""), failure.words ?? ""] : [this.#verdict]) {
      small(false);
      write(text || title);
      small(words.scrollWidth > words.clientWidth);
      if (words.scrollHeight <= words.clientHeight + 1) return;
    }
  }

  countFindings(count: number, open = false): void {
    this.#count.textContent = String(count);
    this.#badge.element.hidden = !count;
    this.#badge.button.setAttribute("aria-label", `Findings: ${count}`);
    if (open) this.#badge.toggle(true);
  }

  showSummary(summary: string): void {
    this.#summary.textContent = summary;
    this.#summary.title = summary;
  }

  setViews(on: boolean): void {
    this.#buttons.get("views")?.setAttribute("aria-pressed", String(on));
  }
}
