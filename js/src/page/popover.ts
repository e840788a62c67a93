// Popovers below a button of the toolbar: settings, findings. One is open at a time; Escape and a click elsewhere close
// it.

import { group, html, on, plainButton } from "./dom";

export class Popover {
  readonly element: HTMLElement;
  readonly button: HTMLButtonElement;
  readonly #panel: HTMLElement;
  readonly #outside = (event: Event): void => {
    // This listener is on the document, for which the target of an event in a shadow tree is the tree's host.
    if (!event.composedPath().includes(this.element)) this.toggle(false);
  };

  constructor(action: string, label: string, face: Node | string, ...content: Node[]) {
    this.button = plainButton({ class: "lz-button lz-icon-button", "data-action": action, "aria-label": label, title: label, "aria-expanded": "false" }, face);
    this.#panel = group(label, { class: "lz-popover", hidden: true }, ...content);
    this.element = html("span", `lz-pop lz-pop-${action}`, this.button, this.#panel);
    on(this.button, "click", () => {
      this.toggle(this.#panel.hidden);
    });
    on(this.element, "keydown", (event) => {
      if (event.key !== "Escape" || this.#panel.hidden) return;
      event.stopPropagation();
      this.toggle(false);
      this.button.focus();
    });
  }

  toggle(open: boolean): void {
    this.#panel.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    if (open) document.addEventListener("pointerdown", this.#outside, true);
    else document.removeEventListener("pointerdown", this.#outside, true);
  }
}

/** A row of a popover: its label, and its control. */
export function row(title: string, ...controls: Node[]): HTMLElement {
  return html("div", "lz-row", html("span", "lz-row-title", title), ...controls);
}
