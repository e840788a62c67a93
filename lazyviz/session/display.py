"""The pictures of a recorded graph: a part of :class:`lazyviz.session.lazy_graph.LazyGraph`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..graph.ir import Graph
from ..process.gc_pause import paused

if TYPE_CHECKING:
    import graphviz
    import torch

    from ..view.scene.boxes import Hierarchy
    from ..view.scene.scene import Scene
    from ..view.widget.plan_choice import Plans


class Shown:
    """What shows a graph.  Nothing here evaluates anything, and ``view`` is imported when it is used."""

    ir: Graph
    title: str
    report: Any
    state: Any
    plan: Callable[..., Any]
    _widget: Any = None
    _drawn: Hierarchy | None = None
    shown_plans: Plans | None = None

    def scene(self) -> Scene:
        """What every picture of the graph is drawn from; its boxes are kept, its plan is made anew."""
        from ..view.scene.scene import Scene

        scene = Scene(self.ir, self.plan(), drawn=self._drawn)
        self._drawn = scene.hierarchy
        return scene

    def text(self) -> str:
        """The graph and its plan as text."""
        from ..view.render.text import render_text

        scene = self.scene()
        return render_text(self.ir, scene.plan, scene=scene)

    def to_dot(self) -> graphviz.Digraph:
        from ..view.render.dot import to_dot

        return to_dot(self.ir)

    def to_fx(self) -> torch.fx.GraphModule:
        from ..graph.fx import to_fx

        return to_fx(self.ir)

    def save(
        self, path: str | Path, format: str | None = None, *, eager: bool = False, paths: bool = True
    ) -> None:
        """Write a picture or the timeline of the graph; the suffix of ``path`` says which kind.

        A file that is there is replaced once the new one is whole; if that fails it stays as it was.

        Args:
            format: instead of the suffix, or which ``.json``: ``"perfetto"``, ``"model-explorer"``.
            eager: a ``.pickle`` (PyTorch's memory snapshot) of eager PyTorch's timeline, not our run's.
            paths: False leaves out the user's code, and of its files all but their names; otherwise pages
                hold lines of code, of a cell all of it, and timelines also the full paths of files.

        Raises:
            OSError: the file cannot be written.
            ValueError: an unknown format.
            RuntimeError: nothing is installed that makes a ``.pdf`` or ``.png``, or it failed.
        """
        from ..view.export.save import save

        shown: dict[str, Any] = {"title": self.title, "state": self.state}
        if paths:
            shown |= {"drawn": self._drawn, "pictured": self}
            save(self.ir, self.plan(), path, format, eager=eager, **shown)
            return
        from ..view.export.path_redaction import WithoutPaths, without_paths

        with without_paths(self.ir) as told:
            pictured: Any = WithoutPaths(self, told)
            save(self.ir, self.plan(), path, format, eager=eager, pictured=pictured, **shown)

    @paused()
    def widget(self, scene: Scene | None = None) -> Any:
        """The interactive widget; the same one each time, until it is closed."""
        if self._widget is None or self._widget.comm is None:
            from ..view.widget.widget import LazyWidget

            self._widget = LazyWidget(self, scene=scene or self.scene())  # type: ignore[arg-type]
        return self._widget

    @paused()
    def static_bundle(self, scene: Scene | None = None) -> dict[str, str]:
        """The picture for saved notebooks: MIME type -> data."""
        from ..view.render.svg import static_bundle

        scene = scene or self.scene()
        return static_bundle(
            self.ir, scene.plan, title=self.title, state=self.state, report=self.report, scene=scene
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        bundle = self.widget()._repr_mimebundle_(include=include, exclude=exclude)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/plain"] = repr(self)
        return bundle
