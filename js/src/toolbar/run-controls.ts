// Run controls: evaluate all or up to the selected box, the backend, value statistics, progress, and findings.

import { group, html, on, plainButton } from "../page/dom";
import { grouped, seconds } from "../page/format";
import { whenLoaded } from "../page/load-deferred-bundle";
import type { BoxData, Choices, Finding, Progress, Send, State } from "../model/types";

const BACKEND_HINT = "Backend that runs the ops; results of eager are bit-equal to PyTorch";
const VALUES_HINT =
  "Compute minimum, maximum, mean, shares of NaN and infinity, and a histogram of every result, which reads each result twice";

export class RunControls {
  readonly element: HTMLElement;
  readonly progress: HTMLElement;
  readonly findings = html("div", "lz-findings");
  readonly #evaluate = button("evaluate", "Evaluate", "lz-primary");
  readonly upTo = button("evaluate-to", "To selected");
  readonly #cancel = button("cancel", "Cancel");
  readonly values = button("summaries", "Values", "lz-toggle");
  readonly menu = html("select", { class: "lz-button", "data-action": "backend", "aria-label": "Backend", title: BACKEND_HINT });
  readonly note = html("p", { class: "lz-run-note", role: "status" });
  readonly #bar = html("progress", { class: "lz-progress", max: 1, value: 0, "aria-label": "Evaluation progress" });
  readonly #words = html("span", "lz-muted lz-progress-text");
  #state: State = "pending";
  #shown: Finding[] = [];
  #selected: BoxData | null = null;
  #choices: Choices = { backend: "eager", backends: [["eager", ""]], summaries: false, begun: false };

  constructor(
    ask: Send,
    private readonly go: (chain: string[]) => void,
    private readonly counted: (open?: boolean) => void,
  ) {
    this.#evaluate.title = "Run the pending ops (Ctrl+Enter)";
    this.#cancel.title = "Stop after the op that is running (Ctrl+.)";
    this.values.title = VALUES_HINT;
    this.#evaluate.setAttribute("aria-keyshortcuts", "Control+Enter");
    this.#cancel.setAttribute("aria-keyshortcuts", "Control+.");
    const click = (element: HTMLElement, act: () => void): void => {
      on(element, "click", act);
    };
    click(this.#evaluate, () => {
      ask("evaluate");
    });
    click(this.upTo, () => {
      if (this.#selected) ask("evaluate-to", this.#selected.id);
    });
    click(this.#cancel, () => {
      ask("cancel");
    });
    click(this.values, () => {
      ask("summaries", this.#choices.summaries ? "off" : "on");
    });
    on(this.menu, "change", () => {
      this.note.textContent = "";
      this.counted();
      ask("backend", this.menu.value);
    });
    this.element = group("Run", { class: "lz-run-row", tabindex: -1 }, this.#evaluate, this.#cancel);
    this.progress = html("span", "lz-progress-row", this.#bar, this.#words);
  }

  /** Handles a key pressed in the widget; returns whether it is a shortcut of these controls. */
  key(event: KeyboardEvent): boolean {
    if (!(event.ctrlKey || event.metaKey)) return false;
    const pressed = event.key === "Enter" ? this.#evaluate : event.key === "." ? this.#cancel : null;
    if (!pressed) return false;
    event.preventDefault();
    if (!pressed.disabled) pressed.click();
    return true;
  }

  showState(state: State): void {
    const focused = [this.#evaluate, this.upTo, this.#cancel].find((each) => each.matches(":focus"));
    const running = state === "running";
    this.#state = state;
    this.#evaluate.textContent = state === "interrupted" || state === "failed" ? "Resume" : "Evaluate";
    this.#evaluate.disabled = running || state === "done";
    this.#evaluate.hidden = running; // Cancel replaces it
    this.#cancel.disabled = this.#cancel.hidden = !running;
    this.menu.disabled = this.values.disabled = running || state === "done";
    this.progress.hidden = !running;
    if (running) this.note.textContent = "";
    this.counted();
    if (running) this.showProgress(null);
    this.#tell();
    // When the focused button is disabled, the focus must move to another element.
    if (focused?.disabled) (running ? this.#cancel : this.#evaluate.disabled ? this.element : this.#evaluate).focus();
  }

  showChoices(choices: Choices): void {
    this.#choices = choices;
    this.menu.replaceChildren(
      ...choices.backends.map(([name, reason]) =>
        html("option", { value: name, disabled: reason !== "", title: reason }, reason ? `${name} (${reason})` : name),
      ),
    );
    this.menu.value = choices.backend;
    this.values.setAttribute("aria-pressed", String(choices.summaries));
  }

  /** Shows why a choice is not available. */
  refuse(why: string): void {
    this.note.textContent = why;
    this.counted(why !== "");
    this.menu.value = this.#choices.backend;
  }

  /** Sets the selected box, or updates it if its state has changed. */
  select(box: BoxData | null): void {
    this.#selected = box;
    this.#tell();
  }

  #tell(): void {
    const box = this.#selected;
    const runs = box && box.kind !== "input" && box.kind !== "sync" && box.state !== "done";
    this.upTo.disabled = !runs || this.#state === "running" || this.#state === "done";
    this.upTo.title = runs ? `Run ${box.label} and only the ops that it needs` : "Run the selected box and the ops that it needs";
  }

  showProgress(progress: Progress | null): void {
    if (!progress?.total) {
      this.#bar.removeAttribute("value");
      this.#words.textContent = "running";
      return;
    }
    const { done, total, left, piece, pieces, memory, label } = progress;
    this.#bar.max = total;
    this.#bar.value = done;
    this.#words.textContent = [
      piece ? `piece ${piece} of ${pieces ?? 1}` : "",
      `op ${grouped(done)} of ${grouped(total)}`,
      seconds(progress.seconds),
      left && progress.seconds > 1 && left > 0.5 ? `about ${seconds(left)} left` : "",
      memory,
      label,
    ]
      .filter(Boolean)
      .join(" · ");
    this.#words.title = this.#words.textContent;
  }

  /** Shows the first NaN or infinity. */
  showFindings(findings: Finding[]): void {
    this.#shown = findings;
    whenLoaded(({ findingsList }) => {
      if (this.#shown !== findings) return;
      this.findings.replaceChildren(...findingsList(findings, this.go));
      this.counted();
    });
  }
}

function button(action: string, label: string, classes = ""): HTMLButtonElement {
  return plainButton({ "data-action": action, class: `lz-button ${classes}` }, label);
}
