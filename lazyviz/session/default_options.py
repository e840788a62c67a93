"""``lazyviz.options``: default options of blocks and cells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..execute.backend_registry import find_backend
from ..plan.devices.device_lookup import DeviceLike, planned
from ..view.render.publication_figure import CHOICES, THEMES

_SWITCHES = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}
_SWITCHED = ("widget", "progress")
NAMES = ("device", "backend", "widget", "progress", "color", "theme")
_CHOICES = {"color": tuple(CHOICES), "theme": THEMES}


class Options:
    """Defaults of this process, for ``lazyviz.lazy``, ``%%lazy`` and ``lazyviz plan``.

    Set them as attributes, temporarily with ``with lazyviz.options(device="A100-40GB"):``, or with
    environment variables before the process starts: ``LAZYVIZ_DEVICE``, ``LAZYVIZ_BACKEND``,
    ``LAZYVIZ_WIDGET``, ``LAZYVIZ_PROGRESS``, ``LAZYVIZ_COLOR``, and ``LAZYVIZ_THEME``.  An invalid value
    raises ``ValueError`` when it is set, or when the environment variable is first used.

    Attributes:
        device: device to plan for: a device, a profile, or its name; ``None``: the device that ops run on.
        backend: backend that evaluates.
        widget: whether cells show the widget in addition to the static picture.
        progress: whether runs and compilations that take longer than a second show a tqdm progress bar;
            ``None``: only in notebooks and terminals.
        color: what boxes initially show and are colored by: ``"peak"`` (bytes held at the peak), ``"memory"``
            (allocated), ``"time"``, ``"flops"``, ``"dtype"``, or ``"module"``.
        theme: theme of saved pictures and of pictures in notebooks: ``"light"`` or ``"dark"``.  The widget
            uses the theme of its host, and comparisons that of their page unless one is set.
    """

    __slots__ = ("_environment", "_set")

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._set: dict[str, Any] = {}

    @property
    def device(self) -> DeviceLike | None:
        return self._value("device", None)

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        self._change("device", device)

    @property
    def backend(self) -> str:
        found: str = self._value("backend", "eager")
        return found

    @backend.setter
    def backend(self, backend: str) -> None:
        self._change("backend", backend)

    @property
    def widget(self) -> bool:
        found: bool = self._value("widget", True)
        return found

    @widget.setter
    def widget(self, widget: bool) -> None:
        self._change("widget", widget)

    @property
    def progress(self) -> bool | None:
        found: bool | None = self._value("progress", None)
        return found

    @progress.setter
    def progress(self, progress: bool | None) -> None:
        self._change("progress", progress)

    @property
    def color(self) -> str:
        found: str = self._value("color", "peak")
        return found

    @color.setter
    def color(self, color: str) -> None:
        self._change("color", color)

    @property
    def theme(self) -> str:
        found: str = self._value("theme", "light")
        return found

    @theme.setter
    def theme(self, theme: str) -> None:
        self._change("theme", theme)

    def _theme_of_pages(self) -> str | None:
        """The theme of pictures that follow their page, unless one has been chosen."""
        found: str | None = self._value("theme", None)
        return found

    def _value(self, name: str, default: Any) -> Any:
        if name in self._set:
            return self._set[name]
        variable = f"LAZYVIZ_{name.upper()}"
        text = self._environment.get(variable)
        if not text:
            return default
        try:
            return _checked(name, _SWITCHES.get(text.lower(), text) if name in _SWITCHED else text)
        except ValueError as error:
            raise ValueError(f"{variable}={text}: {error}") from None

    def _change(self, name: str, value: Any) -> None:
        self._set = {**self._set, name: _checked(name, value)}

    def check(self) -> None:
        """Read the options that are used after a block, so that an invalid environment variable is an error
        before the block runs.  A block itself reads ``device`` and ``backend``.

        Raises:
            ValueError: an environment variable has an invalid value.
        """
        for name in ("widget", "progress", "color", "theme"):
            getattr(self, name)

    def reset(self) -> None:
        """Restore the values from the start of the process."""
        self._set = {}

    @contextmanager
    def __call__(self, **changes: Any) -> Iterator[Options]:
        """Context manager that applies ``changes``, by name."""
        before = self._set
        unknown = [name for name in changes if name not in NAMES]
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; available: {', '.join(NAMES)}")
        self._set = {**before, **{name: _checked(name, value) for name, value in changes.items()}}
        try:
            yield self
        finally:
            self._set = before

    def __repr__(self) -> str:
        return f"lazyviz.options({', '.join(f'{name}={getattr(self, name)!r}' for name in NAMES)})"


def _checked(name: str, value: Any) -> Any:
    if name == "device" and value is not None:
        planned(value)
    elif name == "backend":
        find_backend(value)
    elif name == "widget" and not isinstance(value, bool):
        raise ValueError(f"widget must be True or False, not {value!r}")
    elif name == "progress" and value is not None and not isinstance(value, bool):
        raise ValueError(f"progress must be True, False, or None, not {value!r}")
    elif name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
    return value


options = Options()
