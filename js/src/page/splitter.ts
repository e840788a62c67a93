// A splitter between two panes, moved by pointer or arrow keys; its position is stored for the page.
//
// The code that moves it is in the widget's deferred part (splitter-moves.ts).

import { html } from "./dom";
import { clamped, type Split } from "./splitter-limits";
import { whenLoaded } from "./load-deferred-bundle";

export function splitter(split: Split): HTMLElement {
  const { name, label, upright, least, most, usual, set } = split;
  const bar = html("div", {
    class: upright ? "lz-splitter lz-upright" : "lz-splitter",
    role: "separator",
    tabindex: 0,
    "aria-label": label,
    "aria-orientation": upright ? "vertical" : "horizontal",
    "aria-valuemin": least,
    "aria-valuemax": most,
  });
  const size = clamped(split, kept(name) ?? usual);
  bar.setAttribute("aria-valuenow", String(size));
  set(size);
  whenLoaded(({ dragSplitter }) => {
    dragSplitter(bar, split, size);
  });
  return bar;
}

/** Reads the stored size; null where the host gives the page no storage. */
function kept(name: string): number | null {
  try {
    return Number(localStorage.getItem(`lazyviz:${name}`)) || null;
  } catch {
    return null;
  }
}
