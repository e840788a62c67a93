// Moves a splitter by pointer and arrow keys; a double click resets it.

import { clamped, type Split } from "./splitter-limits";

export function dragSplitter(bar: HTMLElement, split: Split, now: number): void {
  const { name, upright, usual, sign, set } = split;
  let size = now;
  const move = (to: number): void => {
    size = clamped(split, to);
    bar.setAttribute("aria-valuenow", String(size));
    set(size);
    keep(name, size);
  };
  let start: [at: number, size: number] | null = null;
  const at = (event: PointerEvent): number => (upright ? event.clientX : event.clientY);
  bar.addEventListener("pointerdown", (event) => {
    start = [at(event), size];
    bar.setPointerCapture(event.pointerId);
  });
  bar.addEventListener("pointermove", (event) => {
    if (start) move(start[1] + sign * (at(event) - start[0]));
  });
  for (const end of ["pointerup", "pointercancel"] as const) {
    bar.addEventListener(end, () => {
      start = null;
    });
  }
  bar.addEventListener("dblclick", () => {
    move(usual);
  });
  bar.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    move(size + by * sign * 16);
  });
}

/** Stores the size; does nothing where the host gives the page no storage. */
function keep(name: string, size: number): void {
  try {
    localStorage.setItem(`lazyviz:${name}`, String(size));
  } catch {
    return;
  }
}
