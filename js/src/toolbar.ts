// Title, state and verdict; the buttons; progress.

import { html, seconds } from "./dom";
import type { Batch, Memory, Progress, State } from "./types";

const STATES: Record<State, string> = {
  pending: "not run yet",
  running: "running",
  done: "evaluated",
  failed: "failed",
  interrupted: "interrupted: evaluate to go on",
};

export type ToolbarAction =
  | "evaluate"
  | "cancel"
  | "fit"
  | "collapse-all"
  | "expand-all"
  | "save"
  | "views";

export interface ToolbarEvents {
  act(action: ToolbarAction): void;
}

export class Toolbar {
  readonly element: HTMLElement;
  private readonly state = html("span", { class: "lz-state", role: "status" });
  private readonly summary = html("span", { class: "lz-muted lz-summary" });
  private readonly buttons = new Map<ToolbarAction, HTMLButtonElement>();
  private readonly bar = html("progress", { class: "lz-progress", max: 1, value: 0, "aria-label": "Evaluation progress" });
  private readonly progressText = html("span", { class: "lz-muted lz-progress-text" });
  private readonly progressRow: HTMLElement;
  private readonly chip = html("span", { class: "lz-verdict" });

  constructor(
    title: string,
    memory: Memory | null,
    batch: Batch | null,
    views: boolean,
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
    this.progressRow = html("div", { class: "lz-progress-row" }, this.bar, this.progressText);
    if (memory) this.showVerdict(memory, batch);
    this.element = html(
      "header",
      { class: "lz-toolbar" },
      html("div", { class: "lz-title-row" }, html("h2", { title }, title), this.state, ...(memory ? [this.chip] : [])),
      html("div", { class: "lz-summary-row" }, this.summary),
      html(
        "div",
        { class: "lz-button-row", role: "toolbar", "aria-label": "Graph" },
        button("evaluate", "Evaluate", "Run the pending ops", "lz-primary"),
        button("cancel", "Cancel", "Stop after the op that is running"),
        html("span", { class: "lz-gap" }),
        button("fit", "Fit", "Show the whole graph"),
        button("collapse-all", "Collapse all", "Close every group"),
        button("expand-all", "Expand all", "Open every group"),
        viewsButton,
        button("save", "Save", "Save the picture as SVG"),
        search,
      ),
      this.progressRow,
    );
  }

  showState(state: State, report: string): void {
    this.state.textContent = STATES[state];
    const evaluate = this.buttons.get("evaluate");
    const cancel = this.buttons.get("cancel");
    if (evaluate) evaluate.disabled = state === "running" || state === "done";
    if (cancel) {
      cancel.disabled = state !== "running";
      cancel.hidden = state !== "running";
    }
    this.progressRow.hidden = state !== "running";
    if (state === "running") this.showProgress(null);
    if (report && state !== "running") this.state.textContent = `${STATES[state]} · ${report}`;
  }

  /** Whether it fits; of another batch than Evaluate runs, of which. */
  showVerdict(memory: Memory, batch: Batch | null): void {
    this.chip.dataset["verdict"] = memory.verdict;
    this.chip.title = memory.verdictTitle;
    const other = batch && batch.size !== batch.recorded ? ` · for ${batch.size.toLocaleString("en")} samples` : "";
    this.chip.replaceChildren(html("span", { class: "lz-dot", "aria-hidden": "true" }), memory.verdictText + other);
  }

  showSummary(summary: string): void {
    this.summary.textContent = summary;
    this.summary.title = summary;
  }

  showProgress(progress: Progress | null): void {
    if (!progress || !progress.total) {
      this.bar.removeAttribute("value");
      this.progressText.textContent = "starting";
      return;
    }
    this.bar.max = progress.total;
    this.bar.value = progress.done;
    const left = progress.done > 0 ? (progress.seconds / progress.done) * (progress.total - progress.done) : 0;
    const at = progress.piece ? `piece ${progress.piece} of ${progress.pieces ?? 1} · ` : "";
    const text = `${at}${progress.done.toLocaleString("en")} of ${progress.total.toLocaleString("en")} ops`;
    this.progressText.textContent =
      `${text} · ${seconds(progress.seconds)}` +
      (progress.seconds > 1 && left > 0.5 ? ` · about ${seconds(left)} left` : "") +
      (progress.memory ? ` · ${progress.memory}` : "") +
      (progress.label ? ` · ${progress.label}` : "");
  }

  setViews(on: boolean): void {
    this.buttons.get("views")?.setAttribute("aria-pressed", String(on));
  }
}
