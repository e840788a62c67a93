// What the selected box has to do with others: what it reads, what reads it, activations that are saved for the
// backward pass, and the op it is the gradient of.  Each kind has a colour and a line of its own.

import { svg } from "../page/dom";
import type { Arrangement, Frame, Scene } from "../model/scene";
import type { Relation } from "../model/types";

export const KINDS: Record<Relation["kind"], string> = {
  producer: "producers",
  consumer: "consumers",
  saved: "saved activations",
  gradient: "gradient partner",
};

export type KindsShown = (readonly [kind: string, text: string])[];

/** Lines and rings about the box `selected`, and which kinds of them there are. */
export function relationLines(
  relations: readonly Relation[],
  selected: Frame,
  frames: ReadonlyMap<string, Frame>,
  scene: Scene,
  { lines }: Arrangement,
): [SVGElement[], KindsShown] {
  const { id } = selected.box;
  const direct = new Set(lines.flatMap((line) => (line.from === id ? [line.to] : line.to === id ? [line.from] : [])));
  const drawn = new Set<string>();
  const kinds = new Set<Relation["kind"]>();
  const rings = new Map<Frame, number>();
  const elements: SVGElement[] = [];
  for (const { kind, chain, label } of relations) {
    const near = scene.visible(chain);
    const to = near !== null ? frames.get(near) : undefined;
    if (!to || to.box.kind === "lane" || chain.includes(id) || drawn.has(kind + to.box.id)) continue;
    drawn.add(kind + to.box.id);
    kinds.add(kind);
    const nth = rings.get(to) ?? 0; // several about one box lie around one another
    rings.set(to, nth + 1);
    const inset = 3 + 3 * nth;
    const ring = { x: to.x - inset, y: to.y - inset, width: to.width + 2 * inset, height: to.height + 2 * inset, rx: 8 + inset };
    const path = direct.has(to.box.id) && (kind === "producer" || kind === "consumer") ? [] : [svg("path", { d: between(selected, to, nth * 7) })];
    elements.push(svg("g", { class: `lz-relation lz-relation-${kind}`, "data-to": to.box.id }, svg("title", {}, `${KINDS[kind]}: ${label}`), ...path, svg("rect", ring)));
  }
  return [elements, [...kinds].map((kind) => [kind, KINDS[kind]] as const)];
}

function between(from: Frame, to: Frame, lower: number): string {
  const right = to.x > from.x;
  const beside = to.x < from.x + from.width && from.x < to.x + to.width; // one above the other: around the side
  const sx = right || beside ? from.x + from.width : from.x;
  const ex = beside ? to.x + to.width : right ? to.x : to.x + to.width;
  const sy = from.y + Math.min(from.height / 2, 24) + lower;
  const ey = to.y + Math.min(to.height / 2, 24) + lower;
  const reach = Math.max(Math.abs(ex - sx) / 2, 40) * (right || beside ? 1 : -1);
  return `M${sx},${sy}C${sx + reach},${sy} ${beside ? ex + reach : ex - reach},${ey} ${ex},${ey}`;
}
