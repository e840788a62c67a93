// What the pointer or the focus is on: said in full at the foot of the graph, its lines lit up, and when it exists marked in
// the memory chart for as long as the pointer is there.

import { nameOf } from "./boxes";
import type { Scene } from "../model/scene";
import type { Send } from "../model/types";

const AFTER = 80; // milliseconds: who passes over boxes asks for none

export interface HoverEvents {
  ask: Send;
  /** Another box is pointed at, or none. */
  point(id: string | null): void;
  /** When it exists; null: nothing is pointed at. */
  mark(lifetime: [number, number][] | null): void;
}

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
    graph.addEventListener("pointerleave", () => {
      this.#point(null);
    });
    over(graph.querySelector(".lz-edge:hover, [data-node]:hover")); // the pointer has come before this
  }

  /** When a box exists has come. */
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

  /** What flows along an edge, the whole name of a box. */
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
