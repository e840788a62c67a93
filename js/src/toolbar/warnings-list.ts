// The list of warnings, behind the badge of findings: NaN and infinities, and ops that prevent splitting the batch.

import { html, on, plainButton } from "../page/dom";
import { grouped } from "../page/format";
import type { Batch, Finding } from "../model/types";

type Go = (chain: string[]) => void;

/** A button that goes to a box. */
function link(label: string, chain: string[], go: Go): HTMLButtonElement {
  const made = plainButton({ class: "lz-link" }, label);
  made.disabled = !chain.length;
  on(made, "click", () => {
    go(chain);
  });
  return made;
}

/** The first NaN or infinity of each kind. */
export function findingsList(findings: readonly Finding[], go: Go): HTMLElement[] {
  return findings.map(({ kind, text, chain }) => {
    const show = link("Show", chain, go);
    show.setAttribute("aria-label", `Show ${text}`);
    return html("p", { class: "lz-finding", "data-finding": kind }, html("b", {}, kind === "nan" ? "NaN" : "∞"), ` ${text} `, ...(chain.length ? [show] : []));
  });
}

/** The ops that need the whole batch; none if it can be split. */
export function blockedList({ blocked, blockedCount }: Batch, go: Go): HTMLElement[] {
  const rows = blocked.map(({ label, why, chain }) => html("li", {}, link(label, chain, go), html("span", {}, ` ${why}`)));
  const more = blockedCount - rows.length;
  if (more > 0) rows.push(html("li", "lz-muted", `and ${grouped(more)} more`));
  return rows.length ? [html("b", {}, "The batch cannot be split:"), html("ul", {}, ...rows)] : [];
}
