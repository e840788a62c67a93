// Saved activations: bands between the lanes, from the box that creates a tensor to the box that reads it in the
// backward pass.

import { charWidth, svg } from "../page/dom";
import type { Frame, Scene } from "../model/open-groups-and-layout";
import type { Kept } from "../model/types";

const MOST = 3;
const SMALL = 0.01; // minimum fraction of the peak for a band
const PER_PIXEL = 2 ** 24; // bytes
const STEEPEST = 80; // vertical pixels between boxes that are not next to each other
const WIDTHS = [2, 28] as const;

/** The largest bands; their bytes are shown where there is room. */
export function keptBands(kept: readonly Kept[], peak: number, scene: Scene, frames: ReadonlyMap<string, Frame>): SVGElement[] {
  const shown = kept.flatMap(({ from, to, bytes, text }) => {
    const [start, end] = [from, to].map((chain) => frames.get(scene.visible(chain) ?? ""));
    if (bytes < SMALL * peak || !start || !end || end.x < start.x + start.width) return [];
    const [y, last] = levels(start, end);
    // A band that passes behind a box would seem to start there.
    const between = (other: Frame): boolean =>
      !other.open && other !== start && other !== end && other.x < end.x && other.x + other.width > start.x + start.width && other.y < Math.max(y, last) && other.y + other.height > Math.min(y, last);
    return Math.abs(y - last) > STEEPEST || [...frames.values()].some(between) ? [] : [{ start, end, bytes, text, y, last }];
  });
  return shown.slice(0, MOST).map(({ start, end, bytes, text, y, last }) => {
    const [left, right] = [start.x + start.width + (start.box.repeats ? 6 : 0), end.x];
    const middle = (left + right) / 2;
    const d = `M${left},${y}C${middle},${y} ${middle},${last} ${right},${last}`;
    const band = svg("path", { class: "lz-kept-band", d });
    band.style.strokeWidth = `${Math.min(Math.max(bytes / PER_PIXEL, WIDTHS[0]), WIDTHS[1])}px`;
    const wide = text.length * charWidth(11) + 14;
    const [x, top] = [middle - wide / 2, (y + last) / 2 - 10];
    const stands = (other: Frame): boolean => !other.open && other.x < x + wide + 4 && other.x + other.width > x - 4 && other.y < top + 24 && other.y + other.height > top - 4;
    const room = left < x - 4 && x + wide + 4 < right && ![...frames.values()].some(stands);
    const words = [svg("rect", { class: "lz-kept-pill", x, y: top, width: wide, height: 20, rx: 10 }), svg("text", { class: "lz-kept-text", x: middle, y: top + 14 }, text)];
    return svg("g", "lz-kept", svg("title", {}, `${text} for backward`), band, svg("path", { class: "lz-kept-line", d }), ...(room ? words : []));
  });
}

/** The heights at which a band leaves a box and arrives at another: the same if they are next to each other. */
function levels(start: Frame, end: Frame): [number, number] {
  const [top, bottom] = [Math.max(start.y, end.y), Math.min(start.y + start.height, end.y + end.height)];
  return bottom > top ? [(top + bottom) / 2, (top + bottom) / 2] : [start.y + start.height / 2, end.y + end.height / 2];
}
