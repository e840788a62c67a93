// Announcements for screen readers, in one polite live region; also keeps the focus when elements change.

import { focused, html } from "./dom";
import type { Progress, State } from "../model/types";

export class Announcer {
  readonly element = html("div", { class: "lz-said", role: "status" });
  #state: State | null = null;
  #quarter = 0;

  say(text: string): void {
    this.element.textContent = text;
  }

  /** Announces the state, if it has changed. */
  tellState(state: State, words: string): void {
    if (this.#state !== null && this.#state !== state) this.say(words);
    if (this.#state !== state) this.#quarter = 0;
    this.#state = state;
  }

  /** Announces each quarter of a run rather than every message. */
  tellProgress(progress: Progress | null): void {
    const quarter = progress?.total ? Math.floor((progress.done / progress.total) * 4) : 0;
    if (quarter > this.#quarter && quarter < 4) this.say(`${quarter * 25} % of the ops have run`);
    this.#quarter = quarter;
  }
}

/** Calls `change`. If it removes or disables the focused element inside `root`, moves the focus to its replacement. */
export function keepingFocus(root: HTMLElement, change: () => void): void {
  const before = focused(root);
  change();
  if (!before || usable(before)) return;
  const wanted = before.dataset["action"];
  for (const action of [wanted, "cancel", "evaluate", "fit"]) {
    const again = action ? root.querySelector<HTMLElement>(`[data-action="${action}"]`) : null;
    const popover = again?.closest<HTMLElement>(".lz-popover");
    if (popover?.hidden) (popover.previousElementSibling as HTMLElement).click();
    if (!again || !usable(again)) continue;
    again.focus({ preventScroll: true });
    return;
  }
}

function usable(element: Element): boolean {
  return element.isConnected && !(element as HTMLButtonElement).disabled && !element.closest("[hidden]");
}
