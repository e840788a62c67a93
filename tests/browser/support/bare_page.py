"""The widget on a bare page, with its Python side in this process; starts fast, because there is no Jupyter.

What only a notebook can show (cells, kernels, themes of the host) is tried in a real
JupyterLab, see :mod:`.lab`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lazyviz.view.widget.page_state import bundle
from lazyviz.view.widget.widget import LazyWidget

# Colors of JupyterLab's two themes, as far as the widget reads them.
LIGHT = {
    "--jp-layout-color0": "#fff",
    "--jp-layout-color1": "#fff",
    "--jp-layout-color2": "#eee",
    "--jp-border-color1": "#bdbdbd",
    "--jp-border-color2": "#e0e0e0",
    "--jp-ui-font-color1": "rgba(0,0,0,0.87)",
    "--jp-ui-font-color2": "rgba(0,0,0,0.54)",
    "--jp-brand-color1": "#1976d2",
}
DARK = {
    "--jp-layout-color0": "#111",
    "--jp-layout-color1": "#212121",
    "--jp-layout-color2": "#424242",
    "--jp-border-color1": "#616161",
    "--jp-border-color2": "#424242",
    "--jp-ui-font-color1": "rgba(255,255,255,1)",
    "--jp-ui-font-color2": "rgba(255,255,255,0.7)",
    "--jp-brand-color1": "#2196f3",
}


@dataclass(frozen=True)
class Host:
    """What a notebook's front end puts around a widget: attributes of the page, and its style sheet."""

    page: str = ""
    body: str = ""
    style: str = ""


def jupyter(*, dark: bool = False) -> Host:
    colors = "".join(f"{name}:{value};" for name, value in (DARK if dark else LIGHT).items())
    return Host(
        body=f'data-jp-theme-light="{str(not dark).lower()}"',
        style=f":root{{{colors}}}body{{background:var(--jp-layout-color1)}}",
    )


TRAITS = ("scene", "state", "summary", "progress", "report", "error", "choices", "findings", "static_id")
# Timers up to this delay are waited for (a search's, for example); animations up to this length are ended.
LONGEST_TIMER = 200  # milliseconds
PAGE = """
async ([code, deferred, css, traits, longest]) => {
  const style = document.createElement("style");
  style.textContent = css;
  document.head.append(style);
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const browser = window.browserFunctions ??= {
    setTimeout: window.setTimeout.bind(window),
    clearTimeout: window.clearTimeout.bind(window),
    createObjectURL: URL.createObjectURL.bind(URL),
    revokeObjectURL: URL.revokeObjectURL.bind(URL),
  };
  const timers = new Set();
  window.setTimeout = (callback, delay = 0, ...rest) => {
    const id = browser.setTimeout(() => { timers.delete(id); callback(...rest); }, delay);
    if (delay <= longest) timers.add(id);
    return id;
  };
  window.clearTimeout = (id) => { timers.delete(id); browser.clearTimeout(id); };
  const scripts = new Set();  // the URL of a script is revoked when it has been imported
  URL.createObjectURL = (content) => {
    const url = browser.createObjectURL(content);
    if (content.type === "text/javascript") scripts.add(url);
    return url;
  };
  URL.revokeObjectURL = (url) => { scripts.delete(url); browser.revokeObjectURL(url); };
  let sending = 0;
  const frame = () => new Promise((done) => requestAnimationFrame(() => browser.setTimeout(done)));
  const handlers = new Map();
  const fire = (event, value) => { for (const each of [...(handlers.get(event) ?? [])]) each(value); };
  window.stage = {
    // Resolved after the next frame at which no timer, import, animation or message is left.
    idle: async () => {
      do {
        for (const animation of document.getAnimations()) {
          if (animation.effect?.getComputedTiming().endTime <= longest) animation.finish();
        }
        await frame();
      } while (timers.size || scripts.size || sending);
    },
    model: {
      get: (name) => traits[name],
      on: (event, callback) => { handlers.set(event, [...(handlers.get(event) ?? []), callback]); },
      off: (event, callback) => {
        handlers.set(event, (handlers.get(event) ?? []).filter((each) => each !== callback));
      },
      send: (content) => {
        // Sent as Python would, without a turn of the test: what it brings is there for whoever clicks.
        if (content.action === "deferred-part") {
          setTimeout(() => { fire("msg:custom", { kind: "deferred-part", code: deferred }); });
        } else {
          sending++;
          window.toPython(JSON.stringify(content)).finally(() => { sending--; });
        }
      },
      set: (name, value) => { traits[name] = value; fire("change:" + name, value); },
      save_changes: () => {},
    },
    hear: (messages) => {
      for (const [name, value] of messages) {
        if (name === null) fire("msg:custom", value);
        else { traits[name] = value; fire("change:" + name, value); }
      }
    },
  };
  const widget = (await import(url)).default;
  window.stage.draw = (el) => widget.render({ model: window.stage.model, el });
  for (const el of document.querySelectorAll(".stage")) window.stage.draw(el);
}
"""


SHOW = """(element) => {
  const popover = element.closest(".lz-popover");
  if (popover?.hidden) popover.previousElementSibling.click();
  const panel = element.closest('.lz-drawer > [role="tabpanel"]');
  if (!panel) return;
  const drawer = panel.closest(".lz-drawer");
  const narrow = getComputedStyle(panel).display === "none" && !panel.hidden;
  const tab = drawer.querySelectorAll('[role="tab"]')[[...drawer.children].indexOf(panel) - 1];
  if (panel.hidden || narrow) tab.click();
}"""


def shown(locator: Any) -> Any:
    """The element, once the popover or the drawer's panel that it is in has been opened."""
    locator.evaluate(SHOW)
    return locator


def saving() -> bool:
    """Whether a thread of Python writes a file that the widget will be told about."""
    return any(thread.name == "lazyviz-save" for thread in threading.enumerate())


class Stage:
    """A widget of ``graph`` on ``page``, drawn ``views`` times; messages move while :meth:`settle` waits."""

    def __init__(
        self,
        page: Any,
        graph: Any,
        *,
        width: int = 1000,
        dark: bool = False,
        views: int = 1,
        host: Host | None = None,
    ) -> None:
        self.page = page
        self.widget = LazyWidget(graph)
        self._inbox: deque[str] = deque()
        self._outbox: deque[tuple[str | None, Any]] = deque()
        self.messages: list[Any] = []  # custom messages to the page, in order
        self.widget.send = self._custom  # type: ignore[method-assign]
        self.widget.observe(lambda change: self._outbox.append((change["name"], change["new"])), TRAITS)
        host = host or jupyter(dark=dark)
        hosts = f'<div class="stage" style="width:{width}px;margin:0 0 12px"></div>' * views
        page.set_content(
            f'<!doctype html><html lang="en" {host.page}><head><title>lazyviz</title>'
            f"<style>body{{margin:8px}}{host.style}</style></head>"
            f"<body {host.body}><main>{hosts}</main></body></html>"
        )
        if not hasattr(page, "_lazyviz_stage"):
            page.expose_function("toPython", lambda text: page._lazyviz_stage._heard(text))
        page._lazyviz_stage = self  # the page is on one stage at a time
        traits = {name: getattr(self.widget, name) for name in TRAITS}
        page.evaluate(
            PAGE, [self.widget._esm, bundle("deferred.js"), self.widget._css, traits, LONGEST_TIMER]
        )
        self.settle()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.widget.close()

    def _custom(self, content: Any, buffers: Any = None) -> None:
        self.messages.append(content)
        self._outbox.append((None, content))

    def _heard(self, text: str) -> None:
        self._inbox.append(text)

    def display_again(self) -> Any:
        """Another view of the widget, as when the graph is displayed by a later cell; returns its root."""
        self.page.evaluate(
            "() => { const el = document.createElement('div'); el.className = 'stage';"
            " document.querySelector('main').append(el); window.stage.draw(el); }"
        )
        self.settle()
        return self.page.locator(".lazyviz").last

    def pump(self) -> bool:
        """Carry over what waits on either side; whether there was anything."""
        moved = False
        while self._inbox:
            moved = True
            self.widget._handle_custom_msg(json.loads(self._inbox.popleft()), [])
        if self._outbox:
            moved = True
            batch = [self._outbox.popleft() for _ in range(len(self._outbox))]
            self.page.evaluate("(messages) => window.stage.hear(messages)", batch)
        return moved

    def settle(self, *, seconds: float = 20.0) -> None:
        """Wait until nothing is left to do: messages, the graph's run, the page's short timers and frames."""
        end = time.monotonic() + seconds
        quiet = 0
        while quiet < 2:
            if time.monotonic() > end:
                raise AssertionError(f"the widget did not come to rest within {seconds:g} seconds")
            self.page.evaluate("() => window.stage.idle()")
            moved, busy = self.pump(), self.widget.state == "running" or saving()
            quiet = 0 if moved or busy else quiet + 1
            if busy:
                self.page.wait_for_timeout(20)

    def click(self, selector: str) -> None:
        """Click, and wait for what comes of it."""
        shown(self.page.locator(selector).first).click()
        self.settle()

    def open(self, selector: str) -> None:
        """Open or close a group by its arrow, and wait for what comes of it."""
        self.page.locator(selector).first.locator(".lz-arrow").click()
        self.settle()
