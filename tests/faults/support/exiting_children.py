"""A process whose children, forked after importing PyTorch and lazyviz, each exit in one way.

    python exiting_children.py COUNT KIND [KIND ...]

Prints a line of JSON for each child: its kind, number, status (as ``subprocess`` gives it; ``None``: it did
not end) and what it wrote to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time

import torch
import torch._dynamo  # each child would import it, for almost a second: optimizers and fake tensors do
from torch import nn

import lazyviz

# Dynamo's exit handler imports it where it is installed, and with it modules that evaluate text, by which
# Python forgets that an interrupt ended the program: its status is then 1, not that of SIGINT.
with contextlib.suppress(ImportError):
    import tabulate  # noqa: F401

LIMIT = 120.0  # seconds for a child
PURE_PYTHON = bool(os.environ.get("LAZYVIZ_PURE_PYTHON"))  # compiles other code: both modes share one cache
KINDS = {}


def kind(status=0, says=""):
    """A way to end: the status it is to end with, and what it may say on stderr."""

    def add(function):
        KINDS[function.__name__] = (function, status, says)
        return function

    return add


def recorded(size=64, ops=400, **options):
    """A block of some ops, and its last result."""
    with lazyviz.lazy(**options) as graph:
        weight = torch.eye(size)
        result = torch.ones(size, size)
        for _ in range(ops // 2):
            result = torch.relu(result @ weight)
    return graph, result


def drop_in_a_run(make):
    """Evaluate something, and drop the only reference to what ``make`` returns meanwhile."""
    garbage = [make()]
    graph, _ = recorded(8, 8)
    graph.evaluate(progress=lambda *_: garbage.clear())


def daemon(work):
    """Have ``work`` go on and on in a daemon thread until the process ends, at no certain moment."""

    def forever():
        while True:
            work()

    threading.Thread(target=forever, daemon=True).start()
    time.sleep(random.random() / 5)


@kind()
def after_a_compiled_run():
    graph, result = recorded(8, 10 if PURE_PYTHON else 8, backend="inductor")
    graph.evaluate()
    assert result.sum() == 64


@kind()
def while_a_daemon_compiles():
    size = random.randrange(3, 10**4)  # nothing that is known

    def work():
        with lazyviz.lazy(backend="inductor"):
            result = torch.ones(size) * size + 1
        lazyviz.evaluate(result)

    threading.Thread(target=work, daemon=True).start()
    time.sleep(random.random())


@kind()
def while_a_daemon_evaluates():
    graph, _ = recorded(256, 3_000)
    daemon(lambda: graph.evaluate() if graph.pending else time.sleep(0.001))


@kind()
def while_a_daemon_records_and_evaluates():
    def work():
        _, result = recorded(16, 100)
        lazyviz.evaluate(result)

    daemon(work)


@kind()
def while_a_daemon_reads():
    def work():
        with lazyviz.lazy():
            total = torch.ones(3)
            while total.sum().item() >= 0:
                total = torch.cos(total).abs()

    daemon(work)


@kind()
def while_a_daemon_goes_on_after_errors():
    graph, _ = recorded(64, 6_000)

    def work():
        try:
            graph.evaluate()
        except Exception:
            pass
        time.sleep(0)

    daemon(work)


@kind()
def while_two_daemons_wait_for_each_other():
    graph, result = recorded(128, 6_000)
    threading.Thread(target=graph.evaluate, daemon=True).start()
    threading.Thread(target=lambda: result.sum().item(), daemon=True).start()
    time.sleep(random.random() / 5)


@kind()
def while_a_widget_evaluates():
    graph, _ = recorded(128, 6_000)
    widget = graph.widget()
    widget.run()
    time.sleep(random.random() / 5)


@kind(says="from the handler")
def while_a_daemon_reads_and_ctrl_c_comes_again():
    from lazyviz.execute import stop_runs_at_exit

    def handler(number, frame):
        raise RuntimeError("from the handler")

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds):
            stop_runs_at_exit.time = time
            signal.raise_signal(signal.SIGUSR1)
            time.sleep(seconds)

    while_a_daemon_reads()
    signal.signal(signal.SIGUSR1, handler)
    stop_runs_at_exit.time = Clock


SLOW_MODULE = """
import os, threading, time
imported.set()
try:
    for _ in range(100):  # longer than the end of the process waits before it interrupts a thread
        time.sleep(0.01)
except BaseException as error:
    print("stopped in an import:", repr(error), file=sys.stderr)
    raise
"""


@kind()
def while_a_daemon_is_in_a_callback_of_a_library():
    graph, _ = recorded()

    def work():
        try:
            while True:
                graph.text()
        except SystemExit:  # CairoSVG: an OSError that the output could not be written
            raise OSError("the callback failed") from None

    daemon(work)


@kind()
def while_a_daemon_finalizes():
    """Python reports the exceptions of a ``__del__``, and the process interrupts this thread inside of it."""
    finalizes = threading.Event()

    class Slow:
        def __del__(self):
            finalizes.set()
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass

    daemon(lambda: drop_in_a_run(Slow))
    assert finalizes.wait(30)


@kind()
def while_a_daemon_imports():
    """An exception inside of an import may leave the module's lock taken."""
    imported = threading.Event()

    class Loader(importlib.abc.Loader):
        def exec_module(self, module):
            exec(SLOW_MODULE, {"imported": imported, "sys": sys})

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, Loader()) if name == "a_slow_module" else None

    class Imports:
        def __del__(self):
            importlib.import_module("a_slow_module")

    sys.meta_path.insert(0, Finder())
    threading.Thread(target=drop_in_a_run, args=(Imports,), daemon=True).start()
    assert imported.wait(60)


@kind()
def while_a_daemon_begins_when_all_others_were_stopped():
    import atexit

    from lazyviz.execute import stop_runs_at_exit

    graph, _ = recorded(128, 6_000)
    begins = threading.Event()

    def late():  # its thread had no turn until now
        begins.set()
        time.sleep(random.random() / 5)

    atexit.unregister(stop_runs_at_exit.stop_all)
    atexit.register(late)  # the last that is registered is the first that is called
    atexit.register(stop_runs_at_exit.stop_all)

    def work():
        begins.wait()
        graph.evaluate()

    threading.Thread(target=work, daemon=True).start()


@kind()
def while_another_thread_evaluates():
    graph, _ = recorded(64, 2_000)
    threading.Thread(target=graph.evaluate).start()  # which Python waits for


@kind()
def while_a_cluster_works():
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "execute", "microbatch"))
    from in_process_cluster import Here

    lazyviz.register_backend("here", Here())
    model, batch = nn.Linear(8, 8), torch.randn(64, 8)

    def work():
        with lazyviz.lazy(batch=[batch], split=32, backend="here") as graph:
            model(batch).sum().backward()
        graph.evaluate()

    daemon(work)


@kind()
def with_a_pending_graph():
    global kept
    kept = recorded()


@kind()
def with_a_pending_graph_in_a_cycle():
    graph, result = recorded()
    graph.itself = graph
    result.graph = graph


@kind()
def with_a_suspended_loop():
    global kept
    total, kept = torch.zeros(3), iter(lazyviz.steps(range(100)))
    for number in kept:
        total = total + number
        if number == random.choice((3, 30)):  # its iterations are recorded, or run in eager mode
            break


@kind()
def with_a_suspended_block():
    global kept

    def generator():
        with lazyviz.lazy():
            yield torch.ones(3) + 1

    kept = generator()
    next(kept)


@kind(status=7)
def by_sys_exit_in_a_block():
    with lazyviz.lazy():
        torch.ones(3) + 1
        sys.exit(7)


@kind(status=8)
def by_os_exit_in_a_block():
    with lazyviz.lazy():
        torch.ones(3) + 1
        os._exit(8)


@kind(status=1, says="ZeroDivisionError")
def by_an_exception_in_a_block():
    with lazyviz.lazy():
        torch.ones(3) + 1
        1 / 0


@kind(status=-signal.SIGINT, says="KeyboardInterrupt")
def by_an_interrupt_of_a_run():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    graph, _ = recorded(128, 6_000)
    main = os.getpid()
    timer = threading.Timer(random.random() / 10, os.kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()
    while True:  # it may come before or after the run
        graph.evaluate()


@kind()
def evaluating_in_an_exit_handler():
    import atexit

    graph, result = recorded()

    def last():
        graph.evaluate()
        assert torch.equal(result, torch.ones(64, 64))

    atexit.register(last)


def report(name, number, child, errors):
    """Wait for ``child`` and say how it ended."""
    begin = time.monotonic()
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() - begin < LIMIT:
        time.sleep(0.005)
        ended, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if ended else None
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    errors.seek(0)
    text = errors.read().decode(errors="replace")
    print(json.dumps({"kind": name, "number": number, "status": code, "stderr": text[-2000:]}), flush=True)


if __name__ == "__main__":
    count, names = int(sys.argv[1]), sys.argv[2:]
    gc.freeze()  # or each child copies and traverses all of PyTorch's objects when it ends
    for name, number in [(name, number) for name in names for number in range(count)]:
        with tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                random.seed(number + 1_000_000 * PURE_PYTHON)
                torch.manual_seed(number)
                KINDS[name][0]()
                break  # to the end of the program, as any other process
            report(name, number, child, errors)
