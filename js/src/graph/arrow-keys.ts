// Arrow key navigation: along the drawn edges, between the boxes of a layer, and into and out of open groups.

import type { Arrangement, Frame } from "../model/open-groups-and-layout";

export type Arrow = "ArrowUp" | "ArrowDown" | "ArrowLeft" | "ArrowRight";

const middle = (frame: Frame): [x: number, y: number] => [frame.x + frame.width / 2, frame.y + frame.height / 2];

/** The id of the box that the key selects from the box `id`, or null if there is none. */
export function neighbor(arrangement: Arrangement, id: string, key: Arrow): string | null {
  const frames = arrangement.frames.filter((frame) => frame.box.kind !== "lane" || frame.rail);
  const here = frames.find((frame) => frame.box.id === id);
  if (!here) return frames[0]?.box.id ?? null;
  return key === "ArrowUp" || key === "ArrowDown"
    ? along(arrangement, frames, here, key === "ArrowDown")
    : across(frames, here, key === "ArrowRight");
}

function along({ lines }: Arrangement, frames: readonly Frame[], here: Frame, down: boolean): string | null {
  const beyond = (other: Frame, from: Frame): boolean => (down ? other.y >= from.y + from.height : other.y + other.height <= from.y);
  if (here.open && down) {
    const inside = frames.filter((frame) => frame.parent === here.box.id);
    return nearest(inside, [here.x, here.y], 3) ?? null;
  }
  for (let from: Frame | undefined = here; from; from = frames.find((frame) => frame.box.id === from?.parent)) {
    const { id } = from.box;
    const joined = new Set(lines.flatMap((line) => (line.from === id ? [line.to] : line.to === id ? [line.from] : [])));
    const siblings = frames.filter((frame) => frame.parent === from?.parent && beyond(frame, from));
    const found = nearest(siblings.filter((frame) => joined.has(frame.box.id)), middle(from), 3) ?? nearest(siblings, middle(from), 3);
    if (found !== undefined) return found;
    if (!down) {
      const above = frames.find((frame) => frame.box.id === from?.parent);
      return above?.box.id ?? null;
    }
  }
  return null;
}

function across(frames: readonly Frame[], here: Frame, right: boolean): string | null {
  const beyond = frames.filter(
    (frame) => frame.box.id !== here.parent && (right ? frame.x >= here.x + here.width : frame.x + frame.width <= here.x),
  );
  const layer = beyond.filter(
    (frame) => frame.parent === here.parent && frame.y < here.y + here.height && frame.y + frame.height > here.y,
  );
  return nearest(layer, middle(here), 1) ?? nearest(beyond, middle(here), 3) ?? null;
}

/** The nearest frame; vertical distances are multiplied by `steep`. */
function nearest(frames: readonly Frame[], [x, y]: readonly [number, number], steep: number): string | undefined {
  let best: string | undefined;
  let least = Infinity;
  for (const frame of frames) {
    const dx = Math.max(frame.x - x, x - frame.x - frame.width, 0) + Math.abs(middle(frame)[0] - x) / 100;
    const dy = Math.max(frame.y - y, y - frame.y - frame.height, 0);
    if (dx + steep * dy < least) {
      least = dx + steep * dy;
      best = frame.box.id;
    }
  }
  return best;
}
