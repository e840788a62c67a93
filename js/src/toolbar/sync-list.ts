// The places at which recording had to evaluate: equal sync points are one line.

import { html } from "../page/dom";
import type { Syncs } from "../model/types";

/** `summary`, which opens a list of the sync points; itself where there was none. */
export function withSyncs(summary: HTMLElement, syncs: Syncs | undefined): HTMLElement {
  if (!syncs?.lines.length) return summary;
  const lines = syncs.lines.map((line) => html("li", {}, line));
  const title = html("summary", { title: `List the ${syncs.title}` }, summary);
  return html("details", { class: "lz-syncs", "data-panel": "syncs" }, title, html("ul", {}, ...lines));
}
