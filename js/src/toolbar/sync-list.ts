// The places at which recording had to evaluate: equal sync points are one line.

import { html } from "../page/dom";
import type { Syncs } from "../model/types";

/** The list of sync points; empty where there was none. */
export function syncList(syncs: Syncs | undefined): HTMLElement {
  if (!syncs?.lines.length) return html("div", {});
  const lines = syncs.lines.map((line) => html("li", {}, line));
  return html("section", { class: "lz-syncs", "data-panel": "syncs", "aria-label": "Sync points" }, html("h3", {}, syncs.title), html("ul", {}, ...lines));
}
