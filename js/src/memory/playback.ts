// Playback of the run: the chart's cursor goes through all points in a few seconds.

import { icon } from "../page/icons";

/** The chart's cursor, with its button. */
interface Cursor {
  readonly play: HTMLButtonElement;
  readonly point: number | null;
  read(point: number): void;
}

const SWEEP = 8000; // milliseconds

const frames = new WeakMap<Cursor, number>(); // requested animation frames of the cursors that are playing

/** Plays from the cursor to the last point, or stops. */
export function sweep(cursor: Cursor, last: number): void {
  const frame = frames.get(cursor);
  if (frame !== undefined) cancelAnimationFrame(frame);
  frames.delete(cursor);
  cursor.play.replaceChildren(icon(frame === undefined ? "pause" : "play"));
  cursor.play.setAttribute("aria-label", frame === undefined ? "Pause" : "Play the run");
  if (frame !== undefined) return;
  const first = cursor.point !== null && cursor.point < last ? cursor.point : 0;
  const start = performance.now();
  const step = (now: number): void => {
    const point = Math.min(first + Math.floor(((now - start) / SWEEP) * (last + 1)), last);
    cursor.read(point);
    if (point < last) frames.set(cursor, requestAnimationFrame(step));
    else sweep(cursor, last);
  };
  frames.set(cursor, requestAnimationFrame(step));
}
