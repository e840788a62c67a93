// Offline search in the saved page: the counterpart of lazyviz/view/widget/search.py.

import type { Found } from "../model/types";

const PAGE = 50;
const MOST_LIT = 4000;
const SIZE = String.raw`(?:(?:\d{1,12}\*)?b(?:\/\d{1,9})?|\d{1,12})`;
const LIST = String.raw`${SIZE}(?:\s*[x×*,]\s*${SIZE})`;
const SHAPE = new RegExp(String.raw`^(?:${LIST}+,?|[[(]\s*(?:${LIST}*,?)?\s*[\])])$`);
const LINE = /^(?:(\S+):|line\s+)(\d{1,9})$/;

/** The search index. Boxes are identified by their position in `ids`, which is the order of hits. */
export interface SearchData {
  ids: string[];
  parents: number[]; // position of each box's group; -1: it has none that can be highlighted
  chains: string[]; // distinct chains of ids from the root to a box's group
  above: number[]; // for each box, the index of its chain in `chains`
  texts: string[];
  labels: number[]; // indices into `texts`
  subs: number[];
  classes: number[]; // class names of modules; "" for other boxes
  names: string[];
  optimizer: number; // the position of the optimizer's first box
  words: Record<string, number[]>; // positions, stored as differences
  code: Record<string, number[]>; // the same for the text of lines
  lines: Record<string, [file: string, place: number][]>;
  shapes: Record<string, number[]>;
}

export function finder(data: SearchData): (query: string, start: number) => Found {
  return (query, start) => {
    const found = places(data, query.trim().toLowerCase());
    const hits = found.slice(start, start + PAGE).map((at) => ({
      label: text(data, data.labels[at]),
      sub: text(data, data.subs[at]),
      chain: [...(data.chains[data.above[at] ?? 0] ?? "").split(" "), data.ids[at] ?? ""],
    }));
    const result = { query, total: found.length, start, hits };
    return start ? result : { ...result, lit: lit(data, found) };
  };
}

function text(data: SearchData, at: number | undefined): string {
  return data.texts[at ?? -1] ?? "";
}

function places(data: SearchData, wanted: string): number[] {
  const found = new Set<number>();
  const inCode = new Set<number>();
  if (!wanted) return [];
  const line = LINE.exec(wanted);
  for (const [file, at] of data.lines[Number(line?.[2])] ?? []) if (file.includes(line?.[1] ?? "")) found.add(at);
  const shape = SHAPE.test(wanted);
  if (shape) {
    const sizes = wanted.match(new RegExp(SIZE, "g"));
    for (const at of data.shapes[sizes ? sizes.join("×") : "scalar"] ?? []) found.add(at);
  }
  if (!shape || !found.size) {
    for (const [table, into] of [[data.words, found], [data.code, inCode]] as const) {
      for (const [word, steps] of Object.entries(table)) {
        if (!word.includes(wanted)) continue;
        let at = 0;
        for (const step of steps) into.add((at += step));
      }
    }
  }
  if (/_\d+$/.test(wanted)) {
    data.names.forEach((name, at) => {
      if (name.includes(wanted)) found.add(at);
    });
  }
  const inOrder = (places: Iterable<number>): number[] => [...places].sort((a, b) => a - b);
  const names = (at: number): string[] => [text(data, data.labels[at]).split(": ").at(-1) ?? "", text(data, data.classes[at])];
  const isCalled = (at: number): boolean => at < data.optimizer && names(at).some((name) => name.toLowerCase().includes(wanted));
  const called = [...found].filter((at) => isCalled(at));
  const others = [...found].filter((at) => !isCalled(at));
  return [...inOrder(called), ...inOrder(others), ...inOrder([...inCode].filter((at) => !found.has(at)))];
}

function lit(data: SearchData, found: number[]): string[] {
  const result = new Set<string>();
  for (const hit of found) {
    for (let at = hit; at >= 0; at = data.parents[at] ?? -1) {
      const id = data.ids[at] ?? "";
      if (result.has(id)) break;
      if (result.size >= MOST_LIT) return [...result];
      result.add(id);
    }
  }
  return [...result];
}
