// Entry point for anywidget: draws the widget into an element, and redraws it when another scene arrives.

import { keepingFocus } from "./page/announcer";
import { WidgetController } from "./widget-controller";
import { html, on } from "./page/dom";
import type { Model } from "./model/anywidget-model";
import { fetchDeferredPart } from "./page/load-deferred-bundle";
import { hideStaticPicture } from "./page/static-picture";
import { followTheme } from "./page/theme";

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const root = html("div", { class: "lazyviz", lang: "en", dir: "ltr", "data-lm-suppress-shortcuts": "true" });
  // While the widget has the focus, the notebook's keyboard shortcuts are disabled.
  on(root, "keydown", (event) => {
    event.stopPropagation();
    controller.key(event);
  });
  el.append(root);
  const leaveTheme = followTheme(root);
  const fetch = (): void => {
    fetchDeferredPart(model, (why) => {
      controller.refuse(why);
    });
  };
  for (const name of ["pointerenter", "focusin", "dragenter"] as const) root.addEventListener(name, fetch, { once: true });
  let controller = new WidgetController(model, root, fetch);
  const rebuild = (): void => {
    keepingFocus(root, () => {
      controller.stop();
      root.replaceChildren();
      controller = new WidgetController(model, root, fetch);
    });
  };
  model.on("change:scene", rebuild);
  const showPicture = hideStaticPicture(root, String(model.get("static_id") ?? ""));
  return () => {
    model.off("change:scene", rebuild);
    controller.stop();
    leaveTheme();
    showPicture();
    root.remove();
  };
}

// There is no separate export `render`, because anywidget would log a warning on every page.
export default { render };
