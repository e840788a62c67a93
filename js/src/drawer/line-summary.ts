// Summary of a line of code as a sentence: ops, memory, and time.

import type { LineFact } from "../model/types";
import { bytesText, grouped, seconds } from "../page/format";

/** The tooltip of a line's row, also for screen readers. */
export function lineWords(fact: LineFact, share: (bytes?: number) => string): string {
  const parts: string[] = [];
  if (fact.failed) parts.push(`failed: ${fact.failed}`);
  if (fact.sync) parts.push(`sync point, ${fact.sync}`);
  if (fact.ops) parts.push(`${count(fact.ops)}${fact.called ? ` (${grouped(fact.called)} by lines that it calls)` : ""}, ${bytesText(fact.bytes ?? 0)} allocated, ${bytesText(fact.held ?? 0)} at the peak (${share(fact.held)})`);
  if (fact.gradients) {
    parts.push(`its gradients: ${count(fact.gradients)}, ${bytesText(fact.gradientBytes ?? 0)} allocated, ${bytesText(fact.gradientHeld ?? 0)} at the peak (${share(fact.gradientHeld)})`);
  }
  if (fact.seconds !== undefined) parts.push(seconds(fact.seconds));
  if (fact.projected) parts.push(`${seconds(fact.projected)} projected`);
  return parts.join("\n");
}

function count(ops: number): string {
  return `${grouped(ops)} op${ops === 1 ? "" : "s"}`;
}
