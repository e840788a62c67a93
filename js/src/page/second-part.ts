// The widget in two parts: the first draws the picture, the second is what people do with it (details, table, files).
// The second is asked of Python when the pointer or the focus comes to the widget, and imported as the first was.

import type { FromPython } from "../model/types";
import type { Model } from "../model/model";
import type * as Second from "../second";

type Part = typeof Second;

let part: Part | null = null;
let asked = false;
const waiting: ((part: Part) => void)[] = [];

/** The second part, where it is here. */
export const secondPart = (): Part | null => part;

/** Has `use` run with the second part: at once if it is here, else when it has come. */
export function whenHere(use: (part: Part) => void): void {
  if (part) use(part);
  else waiting.push(use);
}

/** It is here: fetched, or in the same file. */
export function bring(loaded: Part): void {
  part = loaded;
  for (const use of waiting.splice(0)) use(loaded);
}

/** Asks for it, once; `failed` is told why it cannot be had. */
export function fetchSecondPart(model: Model, failed: (why: string) => void): void {
  if (part || asked) return;
  asked = true;
  const hear = (message: FromPython): void => {
    if (message.kind !== "second-part") return;
    model.off("msg:custom", hear);
    const url = URL.createObjectURL(new Blob([message.code], { type: "text/javascript" }));
    (import(url) as Promise<Part>)
      .then(bring, (error: unknown) => {
        asked = false;
        failed(`The page cannot load the widget's second part: ${String(error)}`);
      })
      .finally(() => {
        URL.revokeObjectURL(url);
      });
  };
  model.on("msg:custom", hear);
  model.send({ action: "second-part", id: "" });
}
