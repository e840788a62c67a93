// A bar between two parts, which pointer and arrow keys move; where it was put is kept for the page.

import { html } from "./dom";

export interface Split {
  name: string; // under which the size is kept
  label: string;
  upright: boolean; // it moves sideways
  least: number;
  most: number;
  usual: number;
  /** 1: towards the end makes it larger. */
  sign: 1 | -1;
  set(size: number): void;
}

export function splitter({ name, label, upright, least, most, usual, sign, set }: Split): HTMLElement {
  const bar = html("div", {
    class: upright ? "lz-splitter lz-upright" : "lz-splitter",
    role: "separator",
    tabindex: 0,
    "aria-label": label,
    "aria-orientation": upright ? "vertical" : "horizontal",
    "aria-valuemin": least,
    "aria-valuemax": most,
  });
  let size = usual;
  const move = (to: number): void => {
    size = Math.round(Math.min(Math.max(to, least), most));
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
  move(kept(name) ?? usual);
  return bar;
}

/** A page without storage of its own, as some hosts' are, keeps nothing. */
function keep(name: string, size: number): void {
  try {
    localStorage.setItem(`lazyviz:${name}`, String(size));
  } catch {
    return;
  }
}

function kept(name: string): number | null {
  try {
    return Number(localStorage.getItem(`lazyviz:${name}`)) || null;
  } catch {
    return null;
  }
}
