// Making elements.  Text always goes through textContent: whatever Python sends is data.

const SVG = "http://www.w3.org/2000/svg";

type Attributes = Record<string, string | number | boolean | null | undefined>;

function fill<E extends Element>(node: E, attributes: Attributes, children: (Node | string)[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

export function html<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Mean width of a character in pixels, of the widest of the fonts that may be there. */
export function charWidth(size: number, style: "" | "mono" | "bold" = ""): number {
  return size * (style === "mono" ? 0.605 : style === "bold" ? 0.66 : 0.58);
}

/** The text with its middle left out where it would be wider than `room` pixels. */
export function shorten(text: string, room: number, size: number, style: "" | "mono" | "bold" = ""): string {
  const fits = Math.max(Math.floor(room / charWidth(size, style)), 4);
  const letters = [...text];
  if (letters.length <= fits) return text;
  const head = Math.floor(((fits - 1) * 2) / 5);
  return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (fits - 1 - head)).join("")}`;
}

export function seconds(value: number): string {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return value < 120 ? `${value.toPrecision(3)} s` : `${Math.round(value / 60)} min`;
}
