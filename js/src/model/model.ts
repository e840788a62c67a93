// Python's side of one widget, as anywidget hands it over.

import type { FromPython } from "./types";

// What an event carries depends on its name: a message for "msg:custom", nothing of use for the others.
export type Callback = (message: FromPython) => void;

/** What this widget needs of an anywidget model. */
export interface Model {
  get(name: string): unknown;
  on(event: string, callback: Callback): void;
  off(event: string, callback: Callback): void;
  send(content: unknown): void;
}
