// The box under the pointer or with the focus is described at the bottom of the graph, its lines are highlighted, and
// its lifetime is marked in the memory chart.

import { nameOf, type Scene } from "../model/open-groups-and-layout";
import type { Send } from "../model/types";

const AFTER = 80; // milliseconds, so that moving the pointer across boxes requests nothing

export interface HoverEvents {
  ask: Send;
  /** Another box is under the pointer, or none. */
  point(id: string | null): void;
  /** Its lifetime; null if no box is under the pointer. */
  mark(lifetime: [number, number][] | null): void;
}

const at = (state: string): string => `.lz-edge:${state}, [data-node]:${state}`;

export class Hover {
  #at: string | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;
  readonly #scene: Scene;
  readonly #readout: HTMLElement;
  readonly #events: HoverEvents;

  constructor(graph: SVGSVGElement, readout: HTMLElement, scene: Scene, events: HoverEvents) {
    this.#scene = scene;
    this.#readout = readout;
    this.#events = events;
    const under = (target: EventTarget | null): SVGElement | null => (target instanceof Element ? target.closest<SVGElement>(".lz-edge, [data-node]") : null);
    const over = (target: EventTarget | null): void => {
      const element = under(target);
      this.#read(element);
      this.#point(element?.ariaExpanded === "true" ? null : (element?.dataset["node"] ?? null));
    };
    graph.addEventListener("pointerover", (event) => {
      over(event.target);
    });
    graph.addEventListener("focusin", (event) => {
      this.#read(under(event.target));
    });
    graph.addEventListener("focusout", () => {
      this.#read(graph.querySelector(at("hover")));
    });
    graph.addEventListener("pointerleave", () => {
      this.#read(graph.querySelector(at("focus-visible")));
      this.#point(null);
    });
    over(graph.querySelector(at("hover"))); // the pointer arrived before this code
  }

  /** The lifetime of a box has arrived. */
  hear(id: string, lifetime: [number, number][]): void {
    if (id === this.#at) this.#events.mark(lifetime);
  }

  #point(id: string | null): void {
    if (id === this.#at) return;
    if (this.#at !== null) this.#events.mark(null);
    this.#at = id;
    this.#events.point(id);
    clearTimeout(this.#timer);
    if (id === null) return;
    this.#timer = setTimeout(() => {
      this.#events.ask("life", id);
    }, AFTER);
  }

  /** The data that flows along an edge, or the whole name of a box. */
  #read(element: SVGElement | null): void {
    const name = (id: string | undefined): string => {
      const box = this.#scene.boxes.get(id ?? "");
      return box ? nameOf(box) : "";
    };
    const { from, to } = element?.dataset ?? {};
    const title = element?.querySelector("title")?.textContent ?? "";
    const words = from !== undefined ? `${name(from)} → ${name(to)}: ${title}` : title;
    this.#readout.textContent = words;
    this.#readout.title = words;
  }
}
