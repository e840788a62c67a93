// The values of a result: a few numbers and a small histogram, also as text for screen readers.

import { html, svg } from "../page/dom";
import type { Values } from "../model/types";

const WIDTH = 160;
const HEIGHT = 32;

export function valuesBlock(values: Values): HTMLElement {
  const facts = html("dl", "lz-values-facts");
  for (const [name, value] of values.facts) facts.append(html("dt", {}, name), html("dd", {}, value));
  const block = html("div", "lz-values", facts);
  const most = Math.max(...values.bins, 1);
  const wide = WIDTH / Math.max(values.bins.length, 1);
  if (values.bins.length) {
    const picture = svg("svg", { class: "lz-histogram", role: "img", "aria-label": values.words, viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
    picture.append(svg("title", {}, values.words));
    values.bins.forEach((count, n) => {
      // One value among thousands stays visible.
      const high = count && Math.max((count / most) * (HEIGHT - 1), 1);
      picture.append(svg("rect", { x: n * wide + 0.5, y: HEIGHT - high, width: wide - 1, height: high }));
    });
    block.append(picture);
  }
  return block;
}
