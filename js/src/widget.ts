// The widget in anywidget's form: drawn into an element for a model, again when another picture arrives.

import { keepingFocus } from "./page/announcer";
import { Body } from "./body";
import { html, on } from "./page/dom";
import type { Model } from "./model/model";
import { fetchDeferredPart } from "./page/deferred-part";
import { hideStaticPicture } from "./page/static-picture";
import { followTheme } from "./page/theme";

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const root = html("div", { class: "lazyviz", lang: "en", dir: "ltr", "data-lm-suppress-shortcuts": "true" });
  // Keys are the widget's while the focus is in it, not the notebook's shortcuts.
  on(root, "keydown", (event) => {
    event.stopPropagation();
    body.key(event);
  });
  el.append(root);
  const leaveTheme = followTheme(root);
  const fetch = (): void => {
    fetchDeferredPart(model, (why) => {
      body.refuse(why);
    });
  };
  for (const name of ["pointerenter", "focusin", "dragenter"] as const) root.addEventListener(name, fetch, { once: true });
  let body = new Body(model, root, fetch);
  const rebuild = (): void => {
    keepingFocus(root, () => {
      body.stop();
      root.replaceChildren();
      body = new Body(model, root, fetch);
    });
  };
  model.on("change:scene", rebuild);
  const showPicture = hideStaticPicture(root, String(model.get("static_id") ?? ""));
  return () => {
    model.off("change:scene", rebuild);
    body.stop();
    leaveTheme();
    showPicture();
    root.remove();
  };
}

// Without a "render" of its own: anywidget warns of such an export in every page.
export default { render };
