// Title, state and verdict; the buttons of the picture.

import { html } from "../page/dom";
import { withSyncs } from "./sync-list";
import type { Batch, Memory, State, Syncs } from "../model/types";

const STATES: Record<State, string> = {
  pending: "not run yet",
  running: "running",
  done: "evaluated",
  failed: "failed",
  interrupted: "interrupted: resume to go on",
};

export type ToolbarAction =
  | "fit"
  | "collapse-all"
  | "expand-all"
  | "views";

export interface ToolbarEvents {
  act(action: ToolbarAction): void;
}

export class Toolbar {
  readonly element: HTMLElement;
  private readonly state = html("span", { class: "lz-state" });
  private readonly summary = html("span", { class: "lz-muted lz-summary" });
  private readonly buttons = new Map<ToolbarAction, HTMLButtonElement>();
  private readonly chip = html("span", { class: "lz-verdict" });

  constructor(
    title: string,
    memory: Memory | null,
    batch: Batch | null,
    views: boolean,
    run: HTMLElement,
    save: HTMLElement,
    search: HTMLElement,
    events: ToolbarEvents,
  ) {
    const button = (action: ToolbarAction, label: string, hint: string, classes = ""): HTMLButtonElement => {
      const made = html("button", { type: "button", "data-action": action, title: hint, class: `lz-button ${classes}` }, label);
      made.addEventListener("click", () => {
        events.act(action);
      });
      this.buttons.set(action, made);
      return made;
    };
    const viewsButton = button(
      "views",
      "Views",
      "Also draw the ops that only view memory (view, t, detach)",
      "lz-toggle",
    );
    viewsButton.setAttribute("aria-pressed", String(views));
    if (memory) this.showVerdict(memory, batch);
    this.element = html(
      "div",
      { class: "lz-toolbar" },
      html("div", { class: "lz-title-row" }, html("h2", { title }, title), this.state, ...(memory ? [this.chip] : [])),
      html("div", { class: "lz-summary-row" }, this.summary),
      run,
      html(
        "div",
        { class: "lz-button-row", role: "toolbar", "aria-label": "Graph" },
        button("fit", "Fit", "Show the whole graph"),
        button("collapse-all", "Collapse all", "Close every group"),
        button("expand-all", "Expand all", "Open every group"),
        viewsButton,
        save,
        search,
      ),
    );
  }

  /** The state and what the last run did. */
  get words(): string {
    return this.state.textContent;
  }

  showState(state: State, report: string, empty = false, begun = false): void {
    const words = empty ? "nothing to run" : state === "pending" && (report || begun) ? "partly evaluated" : STATES[state];
    this.state.textContent = report && state !== "running" ? `${words} · ${report}` : words;
  }

  /** Whether it fits; of another batch than Evaluate runs, of which. */
  showVerdict(memory: Memory, batch: Batch | null): void {
    this.chip.dataset["verdict"] = memory.verdict;
    this.chip.title = memory.verdictTitle;
    const other = batch && batch.size !== batch.recorded ? ` · for ${batch.size.toLocaleString("en")} samples` : "";
    this.chip.replaceChildren(html("span", { class: "lz-dot", "aria-hidden": "true" }), memory.verdictText + other);
  }

  /** The summary opens the list of sync points. */
  listSyncs(syncs: Syncs | undefined): void {
    this.element.querySelector(".lz-summary-row")?.replaceChildren(withSyncs(this.summary, syncs));
  }

  showSummary(summary: string): void {
    this.summary.textContent = summary;
    this.summary.title = summary;
  }

  setViews(on: boolean): void {
    this.buttons.get("views")?.setAttribute("aria-pressed", String(on));
  }
}
