// Throttled requests for plans: one at a time; the next request is for the newest choice.
//
// During a drag, plans are updated as fast as answers arrive, and answers to outdated choices are ignored.

import type { FromPython, Send } from "./types";

const ORDER = ["device", "split", "batch-size", "largest"] as const;
export type Question = (typeof ORDER)[number];

export class Planning {
  held = false; // during a drag, the search for the largest batch waits
  readonly #next = new Map<Question, string>();
  #asked: Question | null = null;

  constructor(
    private readonly send: Send,
    private readonly changed: () => void,
  ) {}

  /** Whether a request is waiting for its answer. */
  get asking(): boolean {
    return this.#asked !== null && this.#asked !== "largest";
  }

  /** The newest choice that has not been answered yet. */
  wanted(question: Question): string | undefined {
    return this.#next.get(question);
  }

  /** Whether the answer to the newest choice has not arrived yet. */
  awaits(question: Question): boolean {
    return this.#asked === question || this.#next.has(question);
  }

  want(question: Question, id = ""): void {
    this.#next.set(question, id);
    this.pump();
  }

  /** Handles an answer, for this page or for another one of the same graph. */
  answered(message: FromPython): void {
    if (message.kind === "plan" && this.#asked !== "largest") this.#asked = null;
    if (message.kind === "largest" && this.#asked === "largest") {
      this.#asked = null;
      if (message.searching) this.#next.set("largest", "");
    }
    this.pump();
  }

  pump(): void {
    const question = this.#asked === null ? ORDER.find((each) => this.#next.has(each)) : undefined;
    if (question !== undefined && !(question === "largest" && this.held)) {
      const id = this.#next.get(question) ?? "";
      this.#next.delete(question);
      this.#asked = question;
      this.send(question, id);
    }
    this.changed();
  }
}
