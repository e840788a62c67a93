// The groups around the selected box, outermost first; each leads to itself.

import { cut, group, html, on, plainButton } from "../page/dom";
import { nameOf, type Scene } from "../model/open-groups-and-layout";

const MOST_CHARS = 34;

export class Breadcrumbs {
  readonly element = group("Where the selected box is", { class: "lz-crumbs" });

  constructor(
    private readonly scene: Scene,
    private readonly events: { go(chain: string[]): void; home(): void },
  ) {
    this.show(null);
  }

  show(id: string | null): void {
    const chain: string[] = [];
    for (let at: string | undefined = id ?? undefined; at !== undefined; at = this.scene.parentOf(at)) chain.unshift(at);
    const items = chain.filter((each) => each !== this.scene.root).map((each, n, all) => {
      const box = this.scene.boxes.get(each);
      return this.#item(box ? nameOf(box) : each, n === all.length - 1, () => {
        this.events.go(chain.slice(0, chain.indexOf(each) + 1));
      });
    });
    const whole = this.#item("Graph", !items.length, () => {
      this.events.home();
    });
    this.element.replaceChildren(html("ol", {}, whole, ...items));
  }

  #item(name: string, last: boolean, act: () => void): HTMLElement {
    const text = cut(name, MOST_CHARS, 1 / 0.58);
    const link = plainButton({ class: "lz-link", title: name, "aria-current": last ? "true" : undefined }, html("bdi", {}, text));
    on(link, "click", act);
    return html("li", {}, link);
  }
}
