// The widget in two parts: the first draws the picture, the deferred one has the interactive features (details, table,
// files). The deferred part is requested from Python when the pointer or the focus enters the widget, and imported like
// the first.

import type { FromPython } from "../model/types";
import type { Model } from "../model/anywidget-model";
import type * as Deferred from "../deferred-bundle-entry";

type Part = typeof Deferred;

let part: Part | null = null;
let asked = false;
const waiting: ((part: Part) => void)[] = [];

/** The deferred part, if it has been loaded. */
export const deferredPart = (): Part | null => part;

/** Calls `use` with the deferred part: immediately if it is loaded, otherwise when it has arrived. */
export function whenLoaded(use: (part: Part) => void): void {
  if (part) use(part);
  else waiting.push(use);
}

/** Sets the deferred part, which was fetched or is in the same file. */
export function provideDeferredPart(loaded: Part): void {
  part = loaded;
  for (const use of waiting.splice(0)) use(loaded);
}

/** Requests the deferred part, once; `failed` gets the reason if it is not available. */
export function fetchDeferredPart(model: Model, failed: (why: string) => void): void {
  if (part || asked) return;
  asked = true;
  const hear = (message: FromPython): void => {
    if (message.kind !== "deferred-part") return;
    model.off("msg:custom", hear);
    const url = URL.createObjectURL(new Blob([message.code], { type: "text/javascript" }));
    (import(url) as Promise<Part>)
      .then(provideDeferredPart, (error: unknown) => {
        asked = false;
        failed(`Cannot load the widget's deferred part: ${String(error)}`);
      })
      .finally(() => {
        URL.revokeObjectURL(url);
      });
  };
  model.on("msg:custom", hear);
  model.send({ action: "deferred-part", id: "" });
}
