"""Pictures of a recorded graph: the widget, static pictures in notebooks, text, and files."""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..graph.ir import Graph
from ..plan.devices.device_lookup import DeviceLike
from ..process.gc_pause import paused
from .default_options import options

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..view.render.publication_figure import Drawing
    from ..view.scene.boxes import Hierarchy
    from ..view.scene.scene import Scene


class ShownGraph(Protocol):
    """What is shown of a graph."""

    ir: Graph
    title: str
    device: DeviceLike | None
    drawing: Drawing | None
    shown_plans: Any  # those of its widgets

    @property
    def state(self) -> str: ...
    @property
    def report(self) -> Any: ...
    def plan(self) -> Plan: ...


def _plan_to_save(graph: ShownGraph, eager: bool) -> Plan:
    """The graph's plan, or with ``eager`` the plan of plain PyTorch."""
    if not eager:
        return graph.plan()
    from ..plan.make_plan import make_plan

    return make_plan(graph.ir, device=graph.device, of="eager")


class Pictures:
    """Pictures of one graph. Nothing here evaluates ops; ``view`` is imported on first use.

    The graph is an argument of each method, because a reference to it from here would form a reference cycle.
    """

    def __init__(self) -> None:
        self._widget: Any = None
        self._drawn: Hierarchy | None = None

    def scene(self, graph: ShownGraph) -> Scene:
        """The data that all pictures of the graph are drawn from; its boxes are reused, its plan is new."""
        from ..view.scene.scene import Scene

        scene = Scene(graph.ir, graph.plan(), drawn=self._drawn, by=options.color)
        self._drawn = scene.hierarchy
        return scene

    def text(self, graph: ShownGraph) -> str:
        """The graph and its plan as text."""
        from ..view.render.text import render_text

        scene = self.scene(graph)
        return render_text(graph.ir, scene.plan, scene=scene)

    def save(
        self,
        graph: ShownGraph,
        path: str | Path,
        format: str | None,
        *,
        eager: bool,
        paths: bool,
        figure: Mapping[str, Any],
    ) -> None:
        """Write a file; see :meth:`lazyviz.session.lazy_graph.LazyGraph.save`."""
        from ..view.export.save import save
        from ..view.render.publication_figure import figure_of

        shown: dict[str, Any] = {"title": graph.title, "state": graph.state, "figure": figure_of(**figure)}
        shown |= {"drawing": graph.drawing, "theme": options.theme, "by": options.color}
        plan, plans = _plan_to_save(graph, eager), graph.shown_plans
        if eager:  # the saved page has its own plan, not the one that a widget shows
            graph.shown_plans = None
        try:
            if paths:
                shown |= {"drawn": self._drawn, "pictured": graph}
                save(graph.ir, plan, path, format, eager=eager, **shown)
                return
            from ..view.export.redact_code_and_paths import WithoutPaths, without_paths

            with without_paths(graph.ir) as redactions:
                pictured: Any = WithoutPaths(graph, redactions)
                save(graph.ir, plan, path, format, eager=eager, pictured=pictured, **shown)
        finally:
            if eager:
                graph.shown_plans = plans

    def show(self, graph: ShownGraph) -> Path:
        """Write the page and open it; see :meth:`lazyviz.session.lazy_graph.LazyGraph.show`."""
        path = Path(tempfile.mkdtemp(prefix="lazyviz-")) / "graph.html"
        whole = dict.fromkeys(("title", "show", "legend", "direction", "theme"))
        self.save(graph, path, None, eager=False, paths=True, figure=whole)
        webbrowser.open(path.as_uri())
        return path

    @paused()
    def widget(self, graph: ShownGraph, scene: Scene | None = None) -> Any:
        """The interactive widget; the same one each time, until it is closed."""
        if self._widget is None or self._widget.comm is None:
            from ..view.widget.widget import LazyWidget

            self._widget = LazyWidget(graph, scene=scene or self.scene(graph))  # type: ignore[arg-type]
        return self._widget

    @paused()
    def static_bundle(self, graph: ShownGraph, scene: Scene | None = None) -> dict[str, str]:
        """The picture for saved notebooks: MIME type -> data."""
        from ..view.render.svg import static_bundle

        scene = scene or self.scene(graph)
        return static_bundle(
            graph.ir,
            scene.plan,
            title=graph.title,
            state=graph.state,
            report=graph.report,
            scene=scene,
            theme=options.theme,
        )
