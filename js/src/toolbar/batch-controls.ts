// Batch controls: a slider that plans for other sizes, and the menu of pieces in which Evaluate will run the batch.
//
// Python computes the plan of another size, because it simulates the allocator; throttled-plan-requests.ts requests it.

import { html, on, plainButton } from "../page/dom";
import { grouped } from "../page/format";
import { whenLoaded } from "../page/load-deferred-bundle";
import type { Planning } from "../model/throttled-plan-requests";
import type { Batch, LargestMessage, Memory, State } from "../model/types";

const EVERY = 160; // maximum number of sizes for which the slider has every size
const THUMB = 8; // half the thumb's width, in pixels
const SAID_AFTER = 600; // ms until an answer is announced to screen readers, unless another one arrives

export interface BatchEvents {
  go(chain: string[]): void;
}

export class BatchControls {
  readonly parts: HTMLElement[];
  readonly split: HTMLElement; // moved into the settings
  readonly blocked = html("div", "lz-blocked");
  private readonly slider: HTMLInputElement;
  readonly #rail = html("span", "lz-slider");
  readonly #value = html("output", "lz-batch-value");
  readonly #back: HTMLButtonElement;
  readonly #menu = html("select", { class: "lz-button", "data-action": "split" });
  readonly #words = html("span", { class: "lz-batch-words", "data-batch": "plan" });
  readonly #live = html("span", { class: "lz-said", role: "status", "aria-live": "polite" });
  #sizes: number[] = [];
  #most: number | null = null;
  #fixed = false;
  #dragging = false;
  #searching = true; // whether the largest batch is still being searched for
  #timer: ReturnType<typeof setTimeout> | undefined;
  #touched = false;

  readonly #planning: Planning;
  readonly #events: BatchEvents;

  constructor(
    private batch: Batch,
    private memory: Memory,
    planning: Planning,
    events: BatchEvents,
  ) {
    this.#planning = planning;
    this.#events = events;
    this.slider = html("input", {
      type: "range",
      "data-action": "batch-size",
      "aria-label": "Batch size to plan for, in samples",
      min: batch.group,
      step: batch.group,
    });
    on(this.slider, "input", () => {
      this.#move(Number(this.slider.value));
    });
    on(this.slider, "keydown", (event) => {
      this.#key(event);
    });
    this.#listenToPointer();
    this.#back = plainButton({ class: "lz-link", "data-action": "batch-recorded" });
    on(this.#back, "click", () => {
      this.#move(this.batch.recorded);
      this.slider.focus();
    });
    this.#menu.setAttribute("aria-label", "Pieces that Evaluate runs the batch in");
    this.#menu.title = "Pieces that Evaluate runs the batch in, one after another: less memory, the same gradients";
    for (const [value, label] of batch.choices) this.#menu.append(html("option", { value }, label));
    on(this.#menu, "change", () => {
      this.#touched = true;
      planning.want("split", this.#menu.value);
    });
    for (const part of ["track", "fits", "mark", "thumb"]) {
      this.#rail.append(html("span", { class: `lz-slider-${part}`, "aria-hidden": "true" }));
    }
    this.#rail.append(this.slider);
    this.parts = [
      html("span", "lz-batch-pair lz-batch-size", html("span", "lz-batch-title", "Batch"), this.#rail, this.#value),
      this.#live,
    ];
    this.split = html("span", "lz-batch-more", this.#menu, this.#words, this.#back);
    this.#spread();
    this.#tell();
  }

  stop(): void {
    clearTimeout(this.#timer);
  }

  /** Shows another plan. */
  show(batch: Batch, memory: Memory): void {
    this.batch = batch;
    this.memory = memory;
    if (this.#planning.wanted("batch-size") === undefined && !this.#dragging) this.slider.value = String(batch.size);
    this.#tell();
  }

  /** Shows the largest batch that fits, or `null` if it is not known for the current plan. */
  showLargest(message: LargestMessage | null): void {
    this.#searching = message?.searching ?? true;
    this.#fixed = message?.fixed ?? false;
    this.slider.disabled = this.#fixed;
    if (message) {
      this.#most = message.most;
      if (!message.searching) this.#spread();
    }
    this.#tell();
  }

  showState(state: State): void {
    this.#menu.disabled = state === "running" || state === "done";
  }

  #move(size: number): void {
    this.slider.value = String(size);
    this.#touched = true;
    this.#place();
    this.#planning.want("batch-size", this.slider.value);
  }

  // --- the slider -----------------------------------------------------------------

  /** Sets the sizes of the slider, which go beyond the largest that fits, so that its position is visible. */
  #spread(): void {
    const { group, recorded, size } = this.batch;
    const top = Math.max(4 * recorded, Math.ceil(1.25 * (this.#most ?? 0)), size);
    this.#sizes = batchSizes(group, top, [recorded, size, this.#most ?? 0, (this.#most ?? 0) + group]);
    this.slider.max = String(this.#sizes.at(-1) ?? recorded);
    // As wide as the longest size, so that nothing in the row moves during a drag.
    this.#value.style.setProperty("--lz-digits", String(grouped(this.#sizes.at(-1) ?? recorded).length));
    this.slider.value = this.#planning.wanted("batch-size") ?? String(size);
  }

  #key(event: KeyboardEvent): void {
    const size = Number(this.slider.value);
    const at = nearest(this.#sizes, size);
    const last = this.#sizes.length - 1;
    const to: Record<string, number> = {
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      PageUp: Math.max(nearest(this.#sizes, size * 2), at + 1),
      PageDown: Math.min(nearest(this.#sizes, size / 2), at - 1),
      Home: 0,
      End: last,
    };
    const index = to[event.key];
    if (index === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#move(this.#sizes[Math.min(Math.max(index, 0), last)] ?? size);
  }

  /** Handles dragging on the slider's scale, which is logarithmic for large ranges. */
  #listenToPointer(): void {
    const { slider } = this;
    const drag = (event: PointerEvent): void => {
      const box = slider.getBoundingClientRect();
      const share = (event.clientX - box.left - THUMB) / Math.max(box.width - 2 * THUMB, 1);
      this.#move(sizeAt(this.#sizes, share));
    };
    on(slider, "pointerdown", (event) => {
      if (event.button !== 0 || slider.disabled) return;
      event.preventDefault(); // the browser would use a linear scale
      slider.focus();
      slider.setPointerCapture(event.pointerId);
      this.#dragging = this.#planning.held = true;
      drag(event);
    });
    on(slider, "pointermove", (event) => {
      if (this.#dragging) drag(event);
    });
    const end = (): void => {
      this.#dragging = this.#planning.held = false;
      this.#planning.pump();
    };
    on(slider, "pointerup", end);
    on(slider, "pointercancel", end);
  }

  /** Updates the thumb, the marks, and the number beside the slider. */
  #place(): void {
    const size = Number(this.slider.value);
    const { recorded } = this.batch;
    const of = this.#most && !this.#searching ? ` of ${grouped(this.#most)}` : "";
    this.#value.replaceChildren(html("b", {}, grouped(size)), html("span", "lz-muted", of));
    this.#value.setAttribute("aria-label", samples(size));
    this.#back.hidden = size === recorded;
    this.#back.textContent = `back to ${grouped(recorded)}`;
    this.#back.title = `Evaluate runs the ${samples(recorded)} that were recorded`;
    this.#rail.style.setProperty("--lz-at", String(shareOf(this.#sizes, size)));
    this.#rail.style.setProperty("--lz-recorded", String(shareOf(this.#sizes, recorded)));
    this.#rail.style.setProperty("--lz-most", String(this.#most === null || this.#searching ? 1 : shareOf(this.#sizes, this.#most)));
    this.#rail.classList.toggle("lz-known", this.#most !== null && !this.#searching);
  }

  // --- text -----------------------------------------------------------------------

  #tell(): void {
    const { batch, memory } = this;
    this.#place();
    const { recorded } = batch;
    const most = this.#searching
      ? this.#most
        ? ` · ${samples(this.#most)} fit, looking for more…`
        : " · looking for the largest batch that fits…"
      : this.#most === null
        ? ""
        : this.#most
          ? ` · at most ${samples(this.#most)} fit`
          : " · not even one sample fits";
    const runs = batch.size === recorded ? "" : ` · Evaluate runs the ${grouped(recorded)} recorded`;
    const words = `${batch.words} · peak ${memory.peakText}${most}${runs}`;
    this.#words.textContent = words;
    this.#rail.title = this.#value.title = words;
    this.slider.setAttribute("aria-valuetext", `${samples(batch.size)}, peak ${memory.peakText}, ${memory.verdictText}`);
    if (![...this.#menu.options].some((option) => option.value === batch.split)) {
      this.#menu.append(html("option", { value: batch.split }, `${batch.split} pieces`));
    }
    if (this.#planning.wanted("split") === undefined) this.#menu.value = batch.split;
    this.#showBlocked();
    clearTimeout(this.#timer);
    if (this.#touched) {
      this.#timer = setTimeout(() => {
        this.#live.textContent = `${samples(batch.size)}, ${batch.words}: ${memory.verdictText}`;
      }, SAID_AFTER);
    }
  }

  #showBlocked(): void {
    const { batch, blocked } = this;
    blocked.classList.toggle("lz-wanted", batch.split !== "off");
    blocked.textContent = batch.blocked.length ? "The batch cannot be split:" : ""; // not empty, so that it counts
    whenLoaded(({ blockedList }) => {
      if (batch === this.batch) blocked.replaceChildren(...blockedList(batch, this.#events.go));
    });
  }
}

function samples(count: number): string {
  return `${grouped(count)} sample${count === 1 ? "" : "s"}`;
}

/** Sizes from `group` to `top`: every multiple, or if these are too many, round numbers and powers of two. */
export function batchSizes(group: number, top: number, more: number[]): number[] {
  const found = new Set<number>();
  const add = (size: number): void => {
    const multiple = Math.max(Math.round(size / group), 1) * group;
    if (multiple <= top) found.add(multiple);
  };
  if (top <= EVERY * group) {
    for (let size = group; size <= top; size += group) add(size);
  } else {
    for (let digits = 1; digits < 100; digits++) {
      for (let size = digits; size <= top; size *= 10) add(size);
    }
    for (let size = 1; size <= top; size *= 2) add(size);
    add(Math.floor(top / group) * group);
  }
  for (const size of more) if (size > 0) add(size);
  return [...found].sort((a, b) => a - b);
}

function isWide(sizes: number[]): boolean {
  return (sizes.at(-1) ?? 1) > EVERY * (sizes[0] ?? 1);
}

/** The position of a size on the slider, from 0 to 1. */
export function shareOf(sizes: number[], size: number): number {
  const low = sizes[0] ?? 1;
  const high = sizes.at(-1) ?? low;
  if (high <= low) return 0;
  const share = isWide(sizes) ? Math.log(size / low) / Math.log(high / low) : (size - low) / (high - low);
  return Math.min(Math.max(share, 0), 1);
}

/** The size on the slider that is nearest to a position. */
export function sizeAt(sizes: number[], share: number): number {
  const low = sizes[0] ?? 1;
  const high = sizes.at(-1) ?? low;
  const at = Math.min(Math.max(share, 0), 1);
  const size = isWide(sizes) ? low * (high / low) ** at : low + (high - low) * at;
  return sizes[nearest(sizes, size)] ?? low;
}

/** The index of the nearest of the sizes. */
function nearest(sizes: number[], size: number): number {
  let best = 0;
  for (let i = 1; i < sizes.length; i++) {
    if (Math.abs((sizes[i] ?? 0) - size) < Math.abs((sizes[best] ?? 0) - size)) best = i;
  }
  return best;
}
