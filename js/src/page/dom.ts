// Creation of DOM elements. Text is always set with textContent: everything that Python sends is data.

const SVG = "http://www.w3.org/2000/svg";

type Attributes = Record<string, string | number | boolean | null | undefined>;

function fill<E extends Element>(node: E, attributes: Attributes | string, children: (Node | string)[]): E {
  for (const [name, value] of Object.entries(typeof attributes === "string" ? { class: attributes } : attributes)) {
    if (value === undefined || value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

/** Creates an element with these attributes (a string is its class) and children. */
export function html<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes | string = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

/** A named group. It is not a landmark: a page with ten widgets would have ten landmarks with the same name. */
export function group(label: string, attributes: Attributes, ...children: (Node | string)[]): HTMLElement {
  return html("div", { role: "group", "aria-label": label, ...attributes }, ...children);
}

/** A button that does not submit a form. */
export function plainButton(attributes: Attributes, ...children: (Node | string)[]): HTMLButtonElement {
  return html("button", { type: "button", ...attributes }, ...children);
}

/** The focused element inside `root`; in a shadow tree, as in marimo, `document.activeElement` is the tree's host. */
export function focused(root: Element): HTMLElement | null {
  return root.querySelector<HTMLElement>(":focus");
}

/** Calls `use` for every event of this name on the element. */
export function on<K extends keyof GlobalEventHandlersEventMap>(
  element: GlobalEventHandlers,
  name: K,
  use: (event: GlobalEventHandlersEventMap[K]) => void,
  options?: AddEventListenerOptions,
): void {
  element.addEventListener(name, use, options);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes | string = {},
  ...children: (Node | string)[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Mean width of a character in pixels, for the widest of the possible fonts. */
export function charWidth(size: number, style: "" | "mono" | "bold" = ""): number {
  return size * (style === "mono" ? 0.605 : style === "bold" ? 0.66 : 0.58);
}

/** The text, truncated if it would be wider than `room` pixels. */
export function cut(text: string, room: number, size: number, style: "" | "mono" | "bold" = ""): string {
  const fits = Math.max(Math.floor(room / charWidth(size, style)), 3);
  const letters = lettersOf(text);
  return columnsOf(letters) <= fits ? text : `${letters.slice(0, taking(letters, fits - 1)).join("")}…`;
}

const segments = new Intl.Segmenter();
// East Asian letters and emoji: about twice as wide as others.  Python's part is view/layout/text_width.py.
const WIDE = /[\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\uffe0-\uffe6]|\ufe0f|\p{Emoji_Presentation}/u;

/** The text in graphemes, which must not be split. */
function lettersOf(text: string): string[] {
  return /^[\x20-\x7e]*$/.test(text) ? [...text] : Array.from(segments.segment(text), ({ segment }) => segment);
}

/** The number of columns that these letters take. */
function columnsOf(letters: readonly string[]): number {
  return letters.reduce((sum, letter) => sum + (WIDE.test(letter) ? 2 : 1), 0);
}

/** The number of leading letters that fit into `room` columns. */
function taking(letters: readonly string[], room: number): number {
  let used = 0;
  const end = letters.findIndex((letter) => (used += WIDE.test(letter) ? 2 : 1) > room);
  return end < 0 ? letters.length : end;
}
