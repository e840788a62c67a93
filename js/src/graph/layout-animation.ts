// The short animation from one layout to the next. Everything is at its final position immediately; only its display
// moves for a moment, so that the eye can follow.

import type { View } from "./camera";

const MILLISECONDS = 140;
const MOST_BOXES = 400;

export interface Moved {
  element: Element;
  x: number;
  y: number;
  before: { x: number; y: number } | undefined; // undefined: it is new
}

export function animate(boxes: readonly Moved[], lines: readonly Element[], from: View, to: View): void {
  if (boxes.length > MOST_BOXES || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const timing = { duration: MILLISECONDS, easing: "ease-out" };
  const appear = [{ opacity: 0 }, { opacity: 1 }];
  for (const { element, x, y, before } of boxes) {
    if (!before) {
      element.animate(appear, timing);
      continue;
    }
    const startX = (before.x * from.k + from.x - to.x) / to.k;
    const startY = (before.y * from.k + from.y - to.y) / to.k;
    if (Math.abs(startX - x) + Math.abs(startY - y) < 1) continue;
    element.animate(
      [{ transform: `translate(${startX}px,${startY}px)` }, { transform: `translate(${x}px,${y}px)` }],
      timing,
    );
  }
  for (const line of lines) line.animate(appear, timing);
}
