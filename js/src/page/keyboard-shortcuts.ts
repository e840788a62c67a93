// Keyboard shortcuts that the first picture does not need: playing the run, and the list of all keys.

import { focused, html, on, plainButton } from "./dom";
import { row } from "./popover";

const KEYS: readonly (readonly [keys: string, does: string])[] = [
  ["Tab", "into the graph, and on to the next control"],
  ["Arrows", "along the edges, and between boxes side by side"],
  ["Enter", "open or close a group; show an op"],
  ["Esc", "close the group around, leave what is selected"],
  ["Shift + arrows", "move the picture"],
  ["+  −", "zoom"],
  ["F", "show the whole graph"],
  ["C", "close every group"],
  ["T", "table"],
  ["P", "what is alive at the peak"],
  ["K, or Space in the chart", "play the run, or pause"],
  ["Arrows, Home, End in the chart", "op by op, Page Up and Page Down by ten"],
  ["Shift + arrows in the chart", "take a part, which Enter looks closer at"],
  ["/, or F3", "search; Enter goes to the next hit"],
  ["?", "this list"],
];

/** Plays the run or lists the keys; returns whether the key is a shortcut for either. */
export function press(event: KeyboardEvent, root: HTMLElement): boolean {
  const target = event.target instanceof Element ? event.target : root;
  if (target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return false;
  const plays = event.key.toLowerCase() === "k" || (event.key === " " && target.matches(".lz-graph, .lz-chart-slider"));
  if (event.key === "?") turnHelp(root);
  else if (plays) root.querySelector<HTMLElement>('[data-action="play"]')?.click();
  else return false;
  event.preventDefault();
  return true;
}

/** Shows or hides the list of keys. */
function turnHelp(root: HTMLElement): void {
  const shown = root.querySelector<HTMLElement>(".lz-help");
  if (shown) {
    shown.querySelector("button")?.click();
    return;
  }
  const before = focused(root);
  const close = plainButton({ class: "lz-button", "aria-label": "Close the list of keys" }, "Close");
  const list = html("dl", {}, ...KEYS.flatMap(([keys, does]) => [html("dt", {}, keys), html("dd", {}, does)]));
  const help = html("div", { class: "lz-help", role: "dialog", "aria-label": "Keys" }, html("div", "lz-help-head", html("h3", {}, "Keys"), close), list);
  const end = (): void => {
    help.remove();
    before?.focus({ preventScroll: true });
  };
  on(close, "click", end);
  on(help, "keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    end();
  });
  root.append(help);
  close.focus({ preventScroll: true });
}

/** A row of the settings that opens the list of keys. */
export function offerHelp(root: HTMLElement): void {
  const button = plainButton({ class: "lz-button", "data-action": "keys", title: "List the keys (?)" }, "List");
  on(button, "click", () => {
    turnHelp(root);
  });
  root.querySelector(".lz-pop-settings .lz-summary")?.before(row("Keys", button));
}
