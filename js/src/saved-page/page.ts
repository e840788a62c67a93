// The saved page (graph.save("x.html")): the widget with an offline model, which answers from data in the page.
//
// lazyviz/view/export/saved_html_page.py writes that data: parts of gzipped JSON in base64, each read when it is first needed.

import { finder, type SearchData } from "./offline-search";
import type { FromPython, GroupData } from "../model/types";
import type { Model } from "../model/anywidget-model";
import { provideDeferredPart } from "../page/load-deferred-bundle";
import * as deferred from "../deferred-bundle-entry";
import widget from "../anywidget-entry";

type Callback = (message: FromPython) => void;
type Answers = Record<string, FromPython[]>;

interface Start {
  traits: Record<string, unknown>;
  parents: Record<string, string>; // parent group of every group
  size: number; // number of ids in one part: "g0" to "g499" and so on
  moments: number[]; // the positions that have an answer
  momentsSize: number;
  once: Record<string, Answers>; // answers to requests that have only one, by action and id
}

const parts = new Map<string, Promise<unknown>>();

/** A part of the page's data, or undefined if it was omitted. */
function part<T>(name: string): Promise<T | undefined> {
  let known = parts.get(name);
  if (!known) {
    const text = document.querySelector(`script[data-part="${name}"]`)?.textContent;
    known = text ? unpack(text) : Promise.resolve(undefined);
    parts.set(name, known);
  }
  return known as Promise<T | undefined>;
}

function unpack(text: string): Promise<unknown> {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

class Offline implements Model {
  readonly #handlers = new Map<string, Set<Callback>>();

  readonly #start: Start;

  constructor(start: Start) {
    this.#start = start;}

  get(name: string): unknown {
    return this.#start.traits[name];
  }

  on(event: string, callback: Callback): void {
    const known = this.#handlers.get(event) ?? new Set();
    this.#handlers.set(event, known.add(callback));
  }

  off(event: string, callback: Callback): void {
    this.#handlers.get(event)?.delete(callback);
  }

  send(content: unknown): void {
    const { action, id } = content as { action: string; id?: string };
    void this.#answer(action, id ?? "").then((messages) => {
      for (const message of messages) for (const callback of this.#handlers.get("msg:custom") ?? []) callback(message);
    });
  }

  async #answer(action: string, id: string): Promise<FromPython[]> {
    const once = this.#start.once[action]?.[id];
    if (once) return once;
    switch (action) {
      case "open":
        return this.#part("open", id);
      case "line":
        return (await part<Answers>("line-0"))?.[id] ?? [];
      case "reveal": {
        const chain = this.#chain(await this.#parentOf(id), id);
        return [{ kind: "reveal", groups: await this.#groups(chain.slice(0, -1)), chain }];
      }
      case "select": {
        const told = await this.#part("select", id);
        return told.length ? told : [leftOut(id)];
      }
      case "life":
        return (await this.#part("select", id)).flatMap((told) => (told.kind === "details" ? [{ kind: "life", id, lifetime: told.details.lifetime }] : []));
      case "moment":
        return this.#moment(Number(id));
      case "search":
      case "search-on": {
        const data = await part<SearchData>("search");
        if (!data) return [];
        const [, start = "0", query = ""] = action === "search" ? ["", "0", id] : (/^(\d+) (.*)$/s.exec(id) ?? []);
        return [{ kind: "found", ...finder(data)(query, Number(start)) }];
      }
    }
    return [];
  }

  /** The answer to `action` for a box, in the part for ids like its own. */
  async #part(action: string, id: string): Promise<FromPython[]> {
    const number = Math.floor(Number(id.slice(1)) / this.#start.size);
    return (await part<Answers>(`${action}-${id.charAt(0)}${number}`))?.[id] ?? [];
  }

  async #groups(ids: string[]): Promise<GroupData[]> {
    const found = await Promise.all(ids.map((id) => this.#part("open", id)));
    return found.flat().flatMap((message) => (message.kind === "groups" ? message.groups : []));
  }

  async #parentOf(id: string): Promise<string | undefined> {
    return this.#start.parents[id] ?? (await part<Record<string, string>>("parents"))?.[id];
  }

  #chain(group: string | undefined, id: string): string[] {
    const chain = [id];
    for (let at = group; at !== undefined; at = this.#start.parents[at]) chain.unshift(at);
    return chain;
  }

  /** The moment at `position`, otherwise the last saved one before it. */
  async #moment(position: number): Promise<FromPython[]> {
    const { moments, momentsSize } = this.#start;
    let at = moments.findIndex((each) => each > position);
    at = (at < 0 ? moments.length : at) - 1;
    const told = (await part<Answers>(`moment-${Math.floor(at / momentsSize)}`))?.[String(moments[at])] ?? [];
    // The page has requested `position`, and ignores answers about others.
    return told.map((message) => (message.kind === "moment" ? { ...message, moment: { ...message.moment, position } } : message));
  }
}

function leftOut(id: string): FromPython {
  const none = { inputs: [], outputs: [], forward: null, flows: [], lifetime: [], source: null, relations: [] };
  const fact: [string, string] = ["omitted", "this page would be too large with the details of every op"];
  return { kind: "details", details: { id, title: "Details", subtitle: "", facts: [fact], ...none } };
}

async function main(): Promise<void> {
  const el = document.getElementById("lazyviz");
  const start = await part<Start>("start");
  if (!el || !start) return;
  el.replaceChildren();
  provideDeferredPart(deferred);
  widget.render({ model: new Offline(start), el });
}

void main();
