// Saves the graph as it is drawn now: an SVG file with the styles it has on screen.

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
];

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
  const margin = 16;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", `${-margin} ${-margin} ${width + 2 * margin} ${height + 2 * margin}`);
  copy.setAttribute("width", String(width + 2 * margin));
  copy.setAttribute("height", String(height + 2 * margin));
  copy.setAttribute("style", `background:${background}`);
  copy.querySelector(".lz-content")?.removeAttribute("transform");
  return new XMLSerializer().serializeToString(copy);
}

export function download(text: string, name: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => {
    URL.revokeObjectURL(url);
  }, 1000);
}
