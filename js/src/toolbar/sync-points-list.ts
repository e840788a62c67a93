// The list of sync points. Equal ones are one line; clicking it goes to each of them in turn.

import { group, html, on, plainButton } from "../page/dom";
import { grouped } from "../page/format";
import type { Syncs } from "../model/types";

/** The list of sync points; empty if there are none. */
export function syncList(syncs: Syncs | undefined, go: (chain: string[]) => void): HTMLElement {
  if (!syncs?.lines.length) return html("div", {});
  const lines = syncs.lines.map((line, n) => {
    const chains = syncs.chains?.[n] ?? [];
    if (!chains.length) return html("li", {}, line);
    const where = html("span", "lz-muted");
    const button = plainButton({ class: "lz-link", title: "Show it in the graph; click again for the next one" }, line);
    let at = -1;
    on(button, "click", () => {
      at = (at + 1) % chains.length;
      if (chains.length > 1) where.textContent = ` ${grouped(at + 1)} of ${grouped(chains.length)}`;
      go(chains[at] ?? []);
    });
    return html("li", {}, button, where);
  });
  return group("Sync points", { class: "lz-syncs", "data-panel": "syncs" }, html("h3", {}, syncs.title), html("ul", {}, ...lines));
}
