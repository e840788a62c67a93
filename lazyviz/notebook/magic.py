"""The magics ``%%lazy`` and ``%lazy``: the life cycle of a cell, and what it displays.

A ``%%lazy`` cell is compiled and run here as ``%%time`` does it, under the file name that IPython gives the
cell: breakpoints, the recorder, and tracebacks see the user's own lines, with ``%%lazy`` as line 1.
"""

# IPython's decorators are untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType
from typing import Any

import torch
from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    line_magic,
    magics_class,
    no_var_expand,
    output_can_be_silenced,
)
from IPython.core.magic import cell_magic as ipython_cell_magic
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from ..execute.kernel_errors import STAYS
from ..plan.explain_memory import summary
from ..plan.runtime.gpu_price_comparison import compare_gpus, read_prices
from ..process.deferred_signals import deferred
from ..process.gc_pause import paused
from ..process.global_state_transaction import complete
from ..process.tracebacks import shortened
from ..record.provenance.notebook_cells import CellText
from ..record.sync_points import AbsentDeviceError
from ..record.tape import tape
from ..session import device_options, lazy_graph
from ..session.asynchronous.training_loop_steps import Rounds
from ..session.block import LazyBlock
from ..session.error_that_ended_block import note_raised
from ..session.evaluate_all_pending import REFUSED, evaluate_graphs, failures, run_all, runnable_nodes
from ..session.why_it_ran_and_status import status_of, status_of_all, unmet_options
from . import list_formatters
from .cell_compilation import compile_cell, text_below_magics, without_own_frames
from .magic_options import OPTIONS as OPTIONS
from .magic_options import VERBS, assumed, check, check_batch, option_choices, split_option, unquoted

_LATEST = "_lazy"
_ROUNDS = "_lazyviz_rounds"  # while a cell runs: wraps the iterables of its training loops
_AT_THE_END = {"now": "--now", "no_wait": "--async", "loop": "--loop"}
_NO_GRAPH = "There is no lazy graph yet: run a %%lazy cell first."


@magics_class
class LazyMagics(Magics):
    """The two magics, and the IPython hooks before and after each cell that they need."""

    shell: Any  # an InteractiveShell; its type includes None, which does not occur for registered magics

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._raw_cells: list[str] = []  # source of the running cells, which magics can nest
        self._cell_id: str | None = None
        self._widgets: dict[str, Any] = {}  # the latest widget of each cell
        # The exception of a cell that IPython has not displayed yet.
        self._raised: BaseException | None = None
        self.registered_tables: list[list_formatters.Undo] = []  # functions that unregister each formatter

    # --- %%lazy ---------------------------------------------------------------------

    @no_var_expand
    @output_can_be_silenced
    @magic_arguments("%lazy")
    @argument(
        "--as", dest="name", metavar="NAME", help="bind the LazyGraph to NAME (it is also bound to _lazy)"
    )
    @argument(
        "--device",
        metavar="DEVICE",
        help="plan for this device: cpu, cuda, cuda:1, or a profile such as A100-40GB, present or not",
    )
    @argument(
        "--batch", metavar="NAMES", help="the variables whose dim 0 is the batch: x,y (x:1 for another dim)"
    )
    @argument(
        "--split",
        metavar="off|auto|N",
        default="off",
        help="run the batch in N pieces; auto: the fewest that fit the device's free memory",
    )
    @argument(
        "--recompute",
        metavar="off|auto|SIZE",
        default="off",
        help="stay below SIZE (2GiB, '2 GiB') by dropping and recomputing activations; auto: below the "
        "device's free memory",
    )
    @argument(
        "--backend",
        metavar="NAME",
        help="what runs the graph: eager (the default, unless lazyviz.options sets another); inductor, "
        "xla, and "
        "cudagraphs compile or capture it; ipyparallel and ray run pieces of the batch on workers",
    )
    @argument("--now", action="store_true", help="evaluate at the end of the cell, and still show the graph")
    @argument(
        "--async",
        dest="no_wait",
        action="store_true",
        help="start the evaluation at the end of the cell without waiting: subgraphs that have run "
        "before run "
        "while the next cell is recorded",
    )
    @argument(
        "--loop",
        action="store_true",
        help="evaluate each iteration of the cell's training loop while the next is recorded; show the last",
    )
    @argument("--no-sync", action="store_true", help="make a sync point in this cell an error at its line")
    @argument(
        "--assume",
        metavar="LINE=VALUE",
        action="append",
        default=[],
        help="the value that a read at that line of the cell returns if only an absent device could compute "
        "it; False*127,True gives one value per read; can be repeated",
    )
    @argument(
        "--world",
        metavar="N",
        type=int,
        help="record one rank of N: torch.distributed is initialized without the other ranks",
    )
    @argument("--rank", metavar="R", type=int, default=0, help="the rank to record, with --world; default: 0")
    @argument(
        "--torch-version",
        metavar="VERSION",
        help="the PyTorch release that will run on an absent GPU, such as 1.13; default: the installed one",
    )
    @argument("--no-widget", action="store_true", help="text and static picture only")
    @ipython_cell_magic("lazy")  # type: ignore[arg-type]
    def lazy_cell(self, line: str, cell: str) -> Any:
        """Record the PyTorch ops of this cell without running them, and show their graph.

        Nothing runs until a value is needed, the Evaluate button is pressed, or ``%lazy evaluate`` is called.
        """
        options = parse_argstring(self.lazy_cell, line)
        check(options)
        assume = assumed(options.assume)
        try:
            rounds = _ROUNDS if options.loop else None
            body, last = compile_cell(self.shell, self._raw_cell_of(cell), line, cell, rounds)
        except SyntaxError:
            self._show_syntax_error_alone()
            raise
        check_batch(options.batch, self.shell.user_ns, body)
        graph: lazy_graph.LazyGraph | None = None
        result: Any = None
        raised: BaseException | None = None
        ended: Rounds | None = None
        block = self._block_for(options, cell, assume)
        if options.loop and not tape.recording.is_on_this_thread():
            ended = Rounds(block, wait=False)
        try:
            with block as graph:
                try:
                    result = self._run_in_rounds(body, last, ended) if rounds else self._run(body, last)
                except BaseException as error:
                    raised = error
                graph = block.graph or graph  # of the last iteration
                if raised is not None:
                    note_raised(graph.ir, raised)
        except (ValueError, RuntimeError) as error:
            if graph is not None:
                raise
            raise UsageError(f"%%lazy: {error}") from None
        assert graph is not None
        if raised is not None:
            if not graph.nodes and ended is not None and ended.graph is not None:
                graph = ended.graph  # it was raised by an iteration that was not recorded
            self._show_what_was_recorded(graph, options, raised)
            try:
                raise raised
            finally:
                del raised  # this frame is in its traceback
        shown = graph if ended is None or ended.graph is None else ended.graph
        self._bind(shown, options.name)
        try:
            self._evaluate_at_the_end(graph, options, ended)
        finally:
            # Also after a failed evaluation, because the picture shows which ops have run.
            self._show(shown, options.no_widget)
        for sentence in unmet_options(shown, options.batch):
            print(sentence)
        if ended is not None and ended.unrecorded:
            print(ended.what_ran_unrecorded())
        return result

    def _block_for(
        self, options: Any, cell: str, assume: dict[int | str, Any]
    ) -> LazyBlock[lazy_graph.LazyGraph]:
        return lazy_graph.lazy(
            device=options.device,
            batch=options.batch,
            split=split_option(options.split),
            recompute=unquoted(options.recompute),
            backend=options.backend,
            allow_sync=not options.no_sync,
            assume=assume,
            mesh=options.world,
            rank=options.rank,
            torch_version=options.torch_version,
            code=cell,
            names=self.shell.user_ns,
        )

    def _evaluate_at_the_end(self, graph: lazy_graph.LazyGraph, options: Any, ended: Rounds | None) -> None:
        """Evaluate the pending ops of the cell, if its options say so."""
        how = next((name for name in ("now", "no_wait", "loop") if getattr(options, name)), None)
        if how is None:
            return
        with self._errors_at_the_cell(), _refusals_as_sentences(f"%%lazy {_AT_THE_END[how]}"):
            if graph.pending and how == "no_wait":
                graph.evaluate(backend=options.backend, wait=False).follow()
            elif graph.pending:
                graph.evaluate(backend=options.backend)
            if ended is not None:
                ended.finish()

    def _show_what_was_recorded(
        self, graph: lazy_graph.LazyGraph, options: Any, error: BaseException
    ) -> None:
        """Show the graph of a cell that raised ``error``; IPython shows the error afterwards."""
        self._bind(graph, options.name)
        self._begin_traceback_in_cell(error)
        graph.title += f": ops before the {type(error).__name__}"
        if graph.nodes:
            try:
                self._show(graph, options.no_widget)
            except Exception as trouble:  # must not hide the user's own error
                warnings.warn(f"lazyviz could not show the graph: {trouble!r}")

    # --- running the cell -------------------------------------------------------------

    def _run(self, body: CodeType, last: CodeType | None) -> Any:
        namespace = self.shell.user_ns
        exec(body, namespace)
        return None if last is None else eval(last, namespace)

    def _run_in_rounds(self, body: CodeType, last: CodeType | None, ended: Rounds | None) -> Any:
        """Run the code of a cell; with ``--loop``, each iteration of its training loops is a block of its
        own.
        """
        self.shell.user_ns[_ROUNDS] = iter if ended is None else ended.of
        try:
            return self._run(body, last)
        finally:
            self.shell.user_ns.pop(_ROUNDS, None)

    def _begin_traceback_in_cell(self, error: BaseException) -> None:
        """Make IPython show ``error`` as without lazyviz, with the frames of user code and libraries.

        The outer frames are IPython's call of the magic, which would print the whole cell a second time as a
        string, and this module; the inner ones may be the recorder. ``%tb`` shows all frames.
        """
        shell = weakref.ref(self.shell)

        def render() -> list[str]:
            ip = shell()
            assert ip is not None  # it calls this method
            return ip.InteractiveTB.structured_traceback(
                type(error), error, without_own_frames(error.__traceback__), tb_offset=0
            )

        try:
            error._render_traceback_ = render  # type: ignore[attr-defined]
        except AttributeError:  # a class with slots: use IPython's own traceback
            return
        self._raised = error

    def _show_syntax_error_alone(self) -> None:
        """Make IPython show the upcoming ``SyntaxError`` as one of the cell, without a stack."""
        shown = type(self.shell).showsyntaxerror
        self.shell.showsyntaxerror = lambda filename=None, running_compiled_code=False: shown(
            self.shell, filename
        )

    # --- showing ------------------------------------------------------------------------

    def _bind(self, graph: lazy_graph.LazyGraph, name: str | None) -> None:
        self.shell.user_ns[_LATEST] = graph
        if name is not None:
            self.shell.user_ns[name] = graph

    def _show(self, graph: lazy_graph.LazyGraph, no_widget: bool) -> None:
        if not _has_frontend(self.shell):
            print(graph.text())
            if graph.report is not None and not graph.pending:
                print(f"Evaluated: {graph.report}")
            return
        with paused():  # the picture of a large graph has many objects and no cycles
            self._show_picture(graph, no_widget)

    def _show_picture(self, graph: lazy_graph.LazyGraph, no_widget: bool) -> None:
        # A separate output, which a saved notebook shows if the widget cannot run.
        scene = graph.scene()
        picture = display(graph.static_bundle(scene), raw=True, display_id=True)

        shown = graph.state, graph.pending

        def refresh() -> None:
            nonlocal shown
            now = graph.state, graph.pending
            if now[0] != "running" and now != shown:
                shown = now
                picture.update(graph.static_bundle(), raw=True)

        graph.subscribe(refresh)
        if not no_widget:
            # The cell's output is replaced, and so is the graph that only its old widget referred to.
            previous = self._widgets.pop(self._cell_id or "", None)
            if previous is not None:
                previous.close()
            widget = graph.widget(scene)
            if self._cell_id is not None:
                self._widgets[self._cell_id] = widget
            display(widget)

    # --- %lazy --------------------------------------------------------------------------

    @line_magic("lazy")  # type: ignore[arg-type]
    def lazy_line(self, line: str) -> None:
        """Show, plan, and run pending ops.

        ``%lazy VERB`` uses the latest graph, ``%lazy VERB NAME`` the graph called NAME.  Without a name,
        ``status`` and ``evaluate`` cover all pending graphs:

        * ``status``    recorded and pending ops, sync points, failed ops
        * ``evaluate``  run pending ops (NAME can also be a tensor: run the ops that it needs)
        * ``plan``      peak memory, what would lower it, and whether it fits
        * ``explain``   the full plan: what is alive at the peak, by category, module, and line, and why
        * ``why``       the cause of the last evaluation
        * ``reset``     drop all pending ops, and restore PyTorch from any state
        * ``devices``   the devices of this machine and the known profiles; ``devices --time [NAME]``: the
          projected time of the graph's last step on each known GPU, with ``--price FILE`` its cost by a CSV
          file of GPUs and prices per hour, with ``--epoch N`` the cost of N samples
        """
        verb, _, rest = line.strip().partition(" ")
        if verb == "devices" and rest:
            self._devices_in_time(rest)
            return
        names = rest.split()
        if verb not in VERBS:
            known = ", ".join(VERBS)
            raise UsageError(
                f"%lazy {verb}: unknown verb, use one of {known}." if verb else f"%lazy needs one of {known}."
            )
        if len(names) > (0 if verb in ("why", "reset", "devices") else 1):
            raise UsageError(f"%lazy {verb}: too many names.")
        if verb == "devices":
            print(lazy_graph.devices())
        elif verb == "why":
            print(lazy_graph.why())
        elif verb == "reset":
            lazy_graph.reset()
            print("All pending ops were dropped.")
        elif verb == "evaluate" and not names and tape.pending:
            self._evaluate_everything()
        elif verb == "status" and not names and tape.pending:
            print(status_of_all(self.shell.user_ns.get(_LATEST)))
        else:
            self._on_graph(verb, names[0] if names else None)

    @magic_arguments("%lazy devices")
    @argument("--time", action="store_true", help="the projected time of the latest graph on each known GPU")
    @argument("--price", metavar="FILE", help="a CSV file; each line has a GPU and its price per hour")
    @argument("--epoch", metavar="N", type=int, help="the number of samples in an epoch, to show its cost")
    @argument("name", nargs="?", help="the graph, by default the latest")
    def _devices_in_time(self, line: str) -> None:
        options = parse_argstring(self._devices_in_time, line)
        if not options.time:
            raise UsageError("%lazy devices: --price, --epoch, and the name of a graph need --time.")
        name = options.name or _LATEST
        target = self.shell.user_ns.get(name)
        if not isinstance(target, lazy_graph.LazyGraph):
            missing = f"{name!r} is not a lazy graph." if options.name else _NO_GRAPH
            raise UsageError(f"%lazy devices --time: {missing}")
        try:
            prices = read_prices(unquoted(options.price)) if options.price else None
            print(compare_gpus(target.plan(), None, prices, options.epoch).table().text())
        except (OSError, ValueError) as error:
            raise UsageError(f"%lazy devices --time: {error}") from None

    def _on_graph(self, verb: str, name: str | None) -> None:
        namespace = self.shell.user_ns
        if name is None and _LATEST not in namespace:
            raise UsageError(f"%lazy {verb}: {_NO_GRAPH}")
        if name is not None and name not in namespace:
            raise UsageError(f"%lazy {verb}: there is no variable {name!r}.")
        target = namespace[name or _LATEST]
        if verb == "evaluate" and isinstance(target, (torch.Tensor, lazy_graph.LazyGraph)):
            with self._errors_at_the_cell(), _refusals_as_sentences():
                print(_evaluated(target))
        elif not isinstance(target, lazy_graph.LazyGraph):
            raise UsageError(
                f"%lazy {verb}: {name or _LATEST} is not a lazy graph but a {type(target).__name__}."
            )
        elif verb == "status":
            print(status_of(target))
        elif verb == "plan":
            print("\n".join(summary(target.plan())))
        else:
            print(target.plan().explain())

    def _evaluate_everything(self) -> None:
        with self._errors_at_the_cell():
            reports, refused = evaluate_graphs("%lazy evaluate")
        several = len(reports) > 1
        for graph, report in reports:
            where = graph.ir.where if graph is not None else "the rest"
            text = f"{where}: {report}" if several else str(report)
            # If no op ran, print only the errors that the report lists.
            print(text if report.ops_run or not several else text.partition("\n")[2])
        left = set(failures()).difference(*[report.left for _, report in reports])
        for text in sorted(left):
            print(f"  failed: {text}")
        sentences = "\n".join(str(reason) for reason in refused)
        if refused and not all(isinstance(reason, AbsentDeviceError) and reports for reason in refused):
            raise UsageError(f"%lazy evaluate: {sentences}")
        if sentences:
            print(sentences)

    @contextmanager
    def _errors_at_the_cell(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, (UsageError, *REFUSED)):
                self._begin_traceback_in_cell(error)
            raise

    # --- around cells ---------------------------------------------------------------------

    def before_cell(self, info: Any) -> None:
        raw = info.raw_cell or ""
        self._raw_cells.append(raw)
        sources = tape.scopes.sources
        name = self.shell.compile.get_code_name(
            raw, getattr(info, "transformed_cell", None) or raw, self.shell.execution_count
        )
        sources.parts.pop(name, None)
        if len(self._raw_cells) > 1:
            if sources.cell is not None and (part := sources.cell.part(raw)) is not None:
                sources.parts[name] = part
        else:
            self._cell_id = getattr(info, "cell_id", None)
            if above := text_below_magics(raw):
                number, lines = self.shell.displayhook.prompt_count, raw.rstrip().split("\n")
                sources.cell = CellText(f"<ipython-input-{number}>", number, lines, above, above)

    def _raw_cell_of(self, text: str) -> str:
        """The outermost running cell that ends with ``text``; "" if there is none."""
        return next((raw for raw in self._raw_cells if raw.rstrip().endswith(text.rstrip())), "")

    def after_cell(self, result: Any = None) -> None:
        del self._raw_cells[-1:]
        if self._raw_cells:  # it was a nested cell, which a magic ran
            return
        tape.scopes.sources.cell = None
        if self._raised is not None:
            # It has been displayed; if it is raised again elsewhere, it is treated like any other exception.
            vars(self._raised).pop("_render_traceback_", None)
            self._raised = None
        vars(self.shell).pop("showsyntaxerror", None)
        lazy_graph.cell_boundary()

    # --- completion -----------------------------------------------------------------------

    @context_matcher(identifier="lazyviz")
    def complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """TAB completions on a ``%%lazy`` or ``%lazy`` line; no others are offered there."""
        typed = context.text_until_cursor
        words = typed.split()
        if typed.endswith(" "):
            words.append("")
        choices: Iterable[str] = ()
        ours = len(words) > 1 and words[0] in ("%%lazy", "%lazy")
        if ours and words[0] == "%%lazy":
            choices = option_choices(words)
        elif ours and len(words) == 2:
            choices = VERBS
        elif ours and len(words) == 3:
            choices = sorted(
                name
                for name, value in list(self.shell.user_ns.items())
                if isinstance(value, lazy_graph.LazyGraph)
            )
        token = context.token
        return {
            "completions": [
                SimpleCompletion(text=choice, type="param") for choice in choices if choice.startswith(token)
            ],
            "suppress": ours,
            "do_not_suppress": set(),
            "matched_fragment": token,
            "ordered": True,
        }


def _has_frontend(shell: InteractiveShell) -> bool:
    """Whether outputs go to a Jupyter front end (which can show widgets), not to a terminal."""
    return hasattr(shell, "kernel")


def _evaluated(target: torch.Tensor | lazy_graph.LazyGraph) -> str:
    if isinstance(target, torch.Tensor):
        return str(lazy_graph.evaluate(target))
    return str(target.evaluate()) if target.pending else "Nothing is pending."


@contextmanager
def _refusals_as_sentences(what: str = "%lazy evaluate") -> Iterator[None]:
    try:
        yield
    except REFUSED as error:
        raise UsageError(f"{what}: {error}") from None


# --- loading and unloading ------------------------------------------------------------------

_loaded: weakref.WeakKeyDictionary[InteractiveShell, LazyMagics] = weakref.WeakKeyDictionary()


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%%lazy`` and ``%lazy``, all or nothing; idempotent."""
    if ipython in _loaded:
        return
    magics = LazyMagics(ipython)
    try:
        with deferred():
            _loaded[ipython] = magics
            list_formatters.register(ipython, magics.registered_tables)
            ipython.register_magics(magics)
            ipython.Completer.custom_matchers.append(magics.complete)
            ipython.events.register("pre_run_cell", magics.before_cell)
            ipython.events.register("post_run_cell", magics.after_cell)
    except BaseException:
        complete(partial(_withdraw, ipython, magics))
        raise


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Undo everything that loading the extension did.

    Pending ops are evaluated first, so that all tensors get their values, and no hook of lazyviz is left in
    PyTorch. If that is stopped before everything has run that can, by an interrupt or by an exception of a
    signal handler, the extension stays loaded, and no op is lost.
    """
    magics = _loaded.get(ipython)
    if magics is None:
        return
    try:
        _evaluate_before_unloading()
    except Exception as error:
        if runnable_nodes():  # the error is not that of an op
            raise
        if error.args and isinstance(error.args[0], str):
            message = error.args[0].replace(f"\n{STAYS}", "")
            error.args = (f"{message}\n{_what_is_lost()}", *error.args[1:])
        else:
            print(_what_is_lost())
        complete(partial(_withdraw, ipython, magics))
        if ipython.extension_manager is not None:  # IPython would refuse to load it again
            ipython.extension_manager.loaded.discard("lazyviz")
        raise
    if failures():  # ops whose errors have been raised before
        print(_what_is_lost())
    complete(partial(_withdraw, ipython, magics))


@shortened
def _evaluate_before_unloading() -> None:
    cause = "unloading lazyviz"
    with tape.runs.lock:
        failure: Exception | None = None
        try:
            evaluate_graphs(cause)
        except Exception as error:
            if not failures():
                raise
            failure = error
        run_all(cause)  # also ops that cannot run with the options of their block
        if failure is not None:
            raise failure


def _what_is_lost() -> str:
    """A message about the pending ops that are lost when lazyviz is unloaded, and their errors."""
    count = len(tape.pending)
    what = f"{count:,} pending op{' has' if count == 1 else 's have'} no result and never will"
    return "\n  ".join([f"lazyviz is unloaded; {what}. Failed:", *failures()])


def _withdraw(ipython: InteractiveShell, magics: LazyMagics) -> None:
    """Remove from IPython what loading the extension has registered; idempotent."""
    device_options.forget()
    for event, callback in (("pre_run_cell", magics.before_cell), ("post_run_cell", magics.after_cell)):
        with suppress(ValueError):  # it is not registered
            ipython.events.unregister(event, callback)
    for unregister in magics.registered_tables:
        unregister()
    matchers = ipython.Completer.custom_matchers
    if magics.complete in matchers:
        matchers.remove(magics.complete)
    manager = ipython.magics_manager
    manager.registry.pop(type(magics).__name__, None)
    for kind in ("line", "cell"):
        manager.magics[kind].pop("lazy", None)
    ipython.user_ns.pop(_LATEST, None)
    _loaded.pop(ipython, None)
    lazy_graph.unload()
