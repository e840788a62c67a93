// The icons of buttons and boxes: paths in a square of 16 by 16, drawn as lines.

import { svg } from "./dom";

export const ICONS = {
  fit: "M2,6V2h4M10,2h4v4M14,10v4h-4M6,14H2v-4",
  collapse: "M5,2l3,3l3,-3M5,14l3,-3l3,3M3,8h10",
  table: "M2,3h12v10H2ZM2,6.5h12M2,10h12M6,3v10",
  save: "M8,2v8M4.5,7l3.5,3.5l3.5,-3.5M2.5,13.5h11",
  full: "M9.5,2H14v4.5M14,2L9.5,6.5M6.5,14H2V9.5M2,14l4.5,-4.5",
  settings: "M2,5h6M12,5h2M8,5a2,2 0 1 0 4,0a2,2 0 1 0 -4,0M2,11h2M8,11h6M4,11a2,2 0 1 0 4,0a2,2 0 1 0 -4,0",
  finding: "M8,2L14.5,13.5H1.5ZM8,6.5v3.5M8,11.6v0.6",
  play: "M4.5,2.5l9,5.5l-9,5.5Z",
  pause: "M5,3v10M11,3v10",
  search: "M7,2.5a4.5,4.5 0 1 0 0,9a4.5,4.5 0 1 0 0,-9M10.5,10.5L14,14",
  up: "M4,10l4,-4l4,4",
} as const;

/** Icons of the kinds of layers. */
export const LAYERS: Record<string, string> = {
  embedding: "M3,3h10M3,8h10M3,13h10M3,3v10M7,8v5",
  linear: "M3,4l10,8M3,12l10,-8M3,4h10M3,12h10",
  norm: "M2,12c4,0 3,-8 6,-8s2,8 6,8",
  dropout: "M4,4l8,8M12,4l-8,8",
  attention: "M8,2v12M2,8h12M4,8a4,4 0 1 0 8,0a4,4 0 1 0 -8,0",
  activation: "M2,12h3c3,0 3,-8 6,-8h3",
  loss: "M2,3c1,7 5,10 12,10",
  block: "M8,2l6,3l-6,3l-6,-3ZM2,8l6,3l6,-3M2,11l6,3l6,-3",
  optimizer: "M13,8a5,5 0 1 1 -2,-4M11,1.5v3h-3",
};

export function icon(name: keyof typeof ICONS): SVGSVGElement {
  return svg("svg", { class: "lz-icon", viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}
