// Saves the graph as it is drawn now: an SVG file with its styles on screen.

const STYLES = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "stroke-linecap",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "text-anchor",
  "paint-order",
  "stroke-linejoin",
  "display",
  "visibility",
];

export const MARGIN = 16; // around the picture, in pixels

export function svgText(graph: SVGSVGElement, width: number, height: number, background: string): string {
  const copy = graph.cloneNode(true) as SVGSVGElement;
  const originals = graph.querySelectorAll<SVGElement>("*");
  copy.querySelectorAll<SVGElement>("*").forEach((element, n) => {
    const original = originals[n];
    if (!original) return;
    const style = getComputedStyle(original);
    const css = STYLES.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";");
    element.setAttribute("style", css);
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width + 2 * MARGIN} ${height + 2 * MARGIN}`);
  copy.setAttribute("width", String(width + 2 * MARGIN));
  copy.setAttribute("height", String(height + 2 * MARGIN));
  copy.setAttribute("style", `background:${background}`);
  copy.querySelector(".lz-content")?.removeAttribute("transform");
  return new XMLSerializer().serializeToString(copy);
}
