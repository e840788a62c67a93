// Coordinates of one group. The same arithmetic as `place` in lazyviz/view/layout/layered_layout.py, tested with the same
// golden files: Python computes layers and orders, the browser places the open groups.

export const LAYER_GAP = 26;
export const BOX_GAP = 18;
export const BEND_WIDTH = 8;
export const BEND_WEIGHT = 4;
export const PLACE_SWEEPS = 6;
const RAIL_GAP = 8;

export interface Placed {
  x: number[];
  y: number[];
  width: number;
  height: number;
  tops: number[];
  bottoms: number[];
}

export type Size = readonly [width: number, height: number];

export interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

const at = (list: readonly number[], index: number): number => list[index] ?? 0;

/** Coordinates of boxes with these sizes. Indices beyond `sizes` are bends of edges, some of them on `rails`. */
// eslint-disable-next-line max-lines-per-function -- the same arithmetic as lazyviz/view/layout/layered_layout.py
export function place(
  layers: readonly (readonly number[])[],
  paths: readonly (readonly number[])[],
  sizes: readonly Size[],
  flip: boolean,
  rails: readonly (readonly number[])[] = [],
): Placed {
  const boxes = sizes.length;
  const count = layers.reduce((sum, layer) => sum + layer.length, 0);
  const width = Array.from({ length: count }, (_, i) => sizes[i]?.[0] ?? BEND_WIDTH);
  const height = Array.from({ length: count }, (_, i) => sizes[i]?.[1] ?? 0);
  const above: number[][] = Array.from({ length: count }, () => []);
  const below: number[][] = Array.from({ length: count }, () => []);
  const onRails = new Set(rails.flat());
  const inner = layers.map((layer) => layer.filter((i) => !onRails.has(i)));
  for (const path of paths) {
    for (let step = 1; step < path.length; step++) {
      if (onRails.has(at(path, step - 1)) || onRails.has(at(path, step))) continue;
      above[at(path, step)]?.push(at(path, step - 1));
      below[at(path, step - 1)]?.push(at(path, step));
    }
  }
  const center = new Array<number>(count).fill(0);
  for (const layer of inner) {
    let x = -layer.reduce((sum, i) => sum + at(width, i), 0) / 2 - (BOX_GAP * (layer.length - 1)) / 2;
    for (const i of layer) {
      center[i] = x + at(width, i) / 2;
      x += at(width, i) + BOX_GAP;
    }
  }
  const upwards = [...inner].reverse();
  for (let sweep = 0; sweep < PLACE_SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? inner : upwards) settle(layer, down ? above : below, center, width, boxes);
  }
  const ends = inner.map((layer) => (layer.length ? Math.max(...layer.map((i) => at(center, i) + at(width, i) / 2)) : 0));
  const level = new Map(layers.flatMap((layer, number) => layer.map((i) => [i, number])));
  for (const rail of rails) {
    const x = Math.max(...rail.map((bend) => at(ends, level.get(bend) ?? 0))) + RAIL_GAP + BEND_WIDTH / 2;
    for (const bend of rail) {
      center[bend] = x;
      ends[level.get(bend) ?? 0] = x + BEND_WIDTH / 2;
    }
  }
  let left = count ? Infinity : 0;
  let right = count ? -Infinity : 0;
  for (let i = 0; i < count; i++) {
    left = Math.min(left, at(center, i) - at(width, i) / 2);
    right = Math.max(right, at(center, i) + at(width, i) / 2);
  }
  const y = new Array<number>(count).fill(0);
  // Within its layer, a result is placed near its producer, and an outside tensor near its reader.
  const [makers, readers] = [new Set(paths.map((path) => path[0])), new Set(paths.map((path) => path.at(-1)))];
  const share = (i: number): number => (makers.has(i) === readers.has(i) ? 0.5 : Number(makers.has(i) !== flip));
  const tops: number[] = [];
  const bottoms: number[] = [];
  let top = 0;
  for (const layer of flip ? [...layers].reverse() : layers) {
    const tall = layer.reduce((most, i) => Math.max(most, at(height, i)), 0);
    for (const i of layer) y[i] = top + (tall - at(height, i)) * share(i);
    tops.push(top);
    bottoms.push(top + tall);
    top += tall + LAYER_GAP;
  }
  const x = center.map((middle, i) => middle - at(width, i) / 2 - left);
  return { x, y, width: right - left, height: Math.max(top - LAYER_GAP, 0), tops, bottoms };
}

/** Moves a layer's boxes as close to the middle of their neighbors as order and gaps allow (least squares). */
function settle(
  layer: readonly number[],
  neighbors: readonly (readonly number[])[],
  center: number[],
  width: readonly number[],
  boxes: number,
): void {
  let offset = 0;
  const offsets: number[] = [];
  const pools: { total: number; weight: number; members: number }[] = [];
  layer.forEach((i, position) => {
    if (position > 0) offset += (at(width, at(layer, position - 1)) + at(width, i)) / 2 + BOX_GAP;
    offsets.push(offset);
    const around = neighbors[i] ?? [];
    const wish = around.length
      ? around.reduce((sum, other) => sum + at(center, other), 0) / around.length
      : at(center, i);
    const weight = i >= boxes ? BEND_WEIGHT : 1;
    let pool = { total: weight * (wish - offset), weight, members: 1 };
    for (let last = pools.at(-1); last && last.total / last.weight > pool.total / pool.weight; last = pools.at(-1)) {
      pools.pop();
      pool = {
        total: last.total + pool.total,
        weight: last.weight + pool.weight,
        members: last.members + pool.members,
      };
    }
    pools.push(pool);
  });
  let position = 0;
  for (const { total, weight, members } of pools) {
    for (let n = 0; n < members; n++, position++) {
      center[at(layer, position)] = total / weight + at(offsets, position);
    }
  }
}

/** An SVG path through the points, vertical at both ends of each segment. */
export function curve(points: readonly Size[]): string {
  let [x, y] = points[0] ?? [0, 0];
  let path = `M${x.toFixed(1)},${y.toFixed(1)}`;
  for (const [nx, ny] of points.slice(1)) {
    const middle = (y + ny) / 2;
    path +=
      Math.abs(nx - x) < 0.5
        ? `L${nx.toFixed(1)},${ny.toFixed(1)}`
        : `C${x.toFixed(1)},${middle.toFixed(1)} ${nx.toFixed(1)},${middle.toFixed(1)} ${nx.toFixed(1)},${ny.toFixed(1)}`;
    [x, y] = [nx, ny];
  }
  return path;
}

/**
 * The layers, with each layer that is wider than `limit` split into several, and the paths of the edges, which bend
 * around the boxes of the new layers.
 */
export function narrowed(
  layers: readonly (readonly number[])[],
  paths: readonly (readonly number[])[],
  sizes: readonly Size[],
  limit: number,
): [layers: number[][], paths: number[][]] {
  const result: number[][] = [];
  const origin: number[] = []; // for each new layer, the layer that it was split from
  const row: number[] = []; // number of the new layer, for each box and bend
  layers.forEach((layer, number) => {
    let used = Infinity;
    for (const i of layer) {
      const wide = sizes[i]?.[0] ?? BEND_WIDTH;
      if (used + BOX_GAP + wide > limit) {
        origin.push(number);
        result.push([]);
        used = -BOX_GAP;
      }
      row[i] = result.length - 1;
      result.at(-1)?.push(i);
      used += BOX_GAP + wide;
    }
  });
  let bends = row.length;
  const first = result.map((): number[] => []);
  const bent = paths.map((path) =>
    path.flatMap((i, step) => {
      const from = path[step - 1];
      const added: number[] = [];
      if (from === undefined) return [i];
      for (let between = at(row, from) + 1; between < at(row, i); between++) {
        // An edge passes later parts of its layer on their left side, and earlier parts on their right side.
        (origin[between] === origin[at(row, from)] ? first : result)[between]?.push(bends);
        added.push(bends++);
      }
      return [...added, i];
    }),
  );
  return [result.map((layer, number) => [...(first[number] ?? []), ...layer]), bent];
}

/** The same placement with equal margins, and each layer moved as a whole to be within `limit` pixels. */
export function pressed(placed: Placed, layers: readonly (readonly number[])[], sizes: readonly Size[], limit: number): Placed {
  const out = Math.max(placed.width - limit, 0) / 2;
  const x = placed.x.map((left) => left - out);
  const width = (i: number): number => sizes[i]?.[0] ?? BEND_WIDTH;
  for (const all of layers) {
    // If there is no room beside the boxes, lines go behind them.
    const tight = all.reduce((sum, i) => sum + width(i) + BOX_GAP, -BOX_GAP) > limit;
    const layer = tight ? all.filter((i) => i < sizes.length) : all;
    for (const i of all) x[i] = Math.max(Math.min(at(x, i), limit - width(i)), 0);
    let end = limit;
    for (const i of [...layer].reverse()) {
      x[i] = Math.max(Math.min(at(x, i), end - width(i)), 0);
      end = at(x, i) - BOX_GAP;
    }
    let start = 0;
    for (const i of layer) {
      x[i] = Math.max(at(x, i), start);
      start = at(x, i) + width(i) + BOX_GAP;
    }
  }
  return { ...placed, x, width: Math.max(0, ...x.map((left, i) => left + width(i))) };
}
