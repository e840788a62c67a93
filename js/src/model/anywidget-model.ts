// Type of the anywidget model: the connection of one widget to Python.

import type { FromPython } from "./types";

// The payload of an event depends on its name: a message for "msg:custom", nothing useful for the others.
export type Callback = (message: FromPython) => void;

/** The part of an anywidget model that this widget uses. */
export interface Model {
  get(name: string): unknown;
  on(event: string, callback: Callback): void;
  off(event: string, callback: Callback): void;
  send(content: unknown): void;
}
