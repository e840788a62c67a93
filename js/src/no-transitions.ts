// Takes the place of d3-transition and d3-interpolate in the bundle.  d3-zoom asks for them to stop transitions
// and to fly from one view to another, and nobody starts either here (there is no double-click zoom, and moves
// of the view are animated by the style sheet); they would bring 30 kB of colours and easings into every
// saved notebook.

import { selection } from "d3-selection";

type Selection = typeof selection.prototype;

(selection.prototype as unknown as { interrupt: (this: Selection) => Selection }).interrupt = function () {
  return this;
};

export function interrupt(): void {
  // Nothing runs that could be stopped.
}

export function interpolateZoom(): never {
  throw new Error("the view is not animated by d3-zoom");
}
