"""Importing lazyviz is fast: slow imports are deferred until they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SLOW = ("torch._dynamo", "torch._inductor", "sympy", "IPython")


def in_new_process(program: str) -> str:
    """What ``program`` prints; a failure of it is one of the test."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_import_and_a_first_block_import_neither_dynamo_nor_ipython() -> None:
    print_loaded = f"print([name for name in {SLOW!r} if name in sys.modules])"
    assert in_new_process(f"import sys, torch\n{print_loaded}").split("\n")[0] == "[]"  # of torch
    shown = in_new_process(
        f"""
        import sys
        import torch
        import lazyviz
        {print_loaded}
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        with lazyviz.lazy() as graph:
            loss = torch.nn.functional.cross_entropy(net(torch.randn(4, 8)), torch.tensor([0, 1, 0, 1]))
            loss.backward()
        graph.plan().peak_bytes
        graph.evaluate()
        print(len(graph.nodes) > 10, net[0].weight.grad is not None)
        {print_loaded}
        """
    )
    assert shown.splitlines() == ["[]", "True True", "[]"]


@pytest.mark.slow
def test_names_that_are_imported_late_are_there_as_any_other() -> None:
    shown = in_new_process(
        """
        import sys
        import lazyviz
        late = [name for name in lazyviz.__all__ if name not in vars(lazyviz)]
        print(len(late) > 5, "lazyviz.plan.make_plan" in sys.modules)
        print(set(lazyviz.__all__) | {"testing"} <= set(dir(lazyviz)))
        print([name for name in late if getattr(lazyviz, name) is not vars(lazyviz)[name]])
        print(len(lazyviz.testing.PROGRAMS) > 0, hasattr(lazyviz, "no_such_name"))
        from lazyviz import *
        print(advise is lazyviz.advise, Plan.__module__)
        """
    )
    assert shown.splitlines() == ["True False", "True", "[]", "True False", "True lazyviz.plan.plan"]


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_an_import_runs_no_full_garbage_collection_and_leaves_the_collector_as_it_was(enabled: bool) -> None:
    shown = in_new_process(
        f"""
        import gc, torch
        gc.enable() if {enabled} else gc.disable()
        runs = []
        gc.callbacks.append(lambda phase, info: runs.append(info["generation"]))
        import lazyviz
        gc.callbacks.clear()
        print(2 in runs, gc.isenabled())
        """
    )
    assert shown == f"False {enabled}\n"


@pytest.mark.slow
def test_an_import_leaves_nothing_in_pytorch() -> None:
    shown = in_new_process("import torch, lazyviz\nprint(lazyviz.doctor().leftovers)")
    assert shown == "()\n"


STEP = """
    import sys
    import torch
    import lazyviz
    {before}
    torch.manual_seed(0)
    net, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        {watching}
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)  # imports Dynamo
        y = torch.sinc(net(x)) + torch.randn(4).erfinv()
        y.sum().backward()
        optimizer.step()
    graph.evaluate()
    print([str(node.op) for node in graph.nodes])
    print(len(graph.sync_points), [p.flatten().tolist() for p in net.parameters()])
    loader = torch._dynamo.__spec__.loader
    print(lazyviz.doctor().leftovers, type(loader).__name__, torch._dynamo.__loader__ is loader)
    print(torch.manual_seed.__module__, hasattr(torch.manual_seed, "__wrapped__"))
    print([finder for finder in sys.meta_path if "lazyviz" in type(finder).__module__])
    print(torch.compile(lambda t: t.sin() + 1, backend="eager", fullgraph=True)(torch.zeros(1)).item())
"""


@pytest.mark.slow
def test_an_import_of_dynamo_in_a_block_changes_nothing() -> None:
    """Neither what is recorded and computed, nor what Dynamo has found of PyTorch."""
    watching = "print('lazyviz' in type(sys.meta_path[0]).__module__, 'torch._dynamo' in sys.modules)"
    late = in_new_process(STEP.format(before="", watching=watching))
    early = in_new_process(STEP.format(before="import torch._dynamo", watching=watching))
    assert late.splitlines()[0] == "True False"
    assert early.splitlines()[0] == "True True"  # other libraries are waited for, too
    assert late.splitlines()[1:] == early.splitlines()[1:]
    assert late.splitlines()[3:] == ["() SourceFileLoader True", "torch.random True", "[]", "1.0"]


@pytest.mark.slow
def test_dynamo_finds_nothing_of_ours_for_a_planned_gpu() -> None:
    shown = in_new_process(
        """
        import torch
        import lazyviz
        original = torch.cuda.is_available, torch.cuda.current_device, torch.Tensor.__setitem__
        with lazyviz.lazy(device="A100-40GB") as graph:
            assert torch.cuda.is_available()
            net = torch.nn.Linear(4, 4, device="cuda")
            torch.optim.SGD(net.parameters(), lr=0.1)  # imports Dynamo
            assert torch.cuda.is_available()
        import torch._dynamo.variables.torch as kept
        assert (torch.cuda.is_available, torch.cuda.current_device, torch.Tensor.__setitem__) == original
        functions = [f for f in vars(kept).values() if isinstance(f, (list, dict, set, frozenset))]
        flat = [f for each in functions for f in each if callable(f)]
        print(len(flat) > 10, torch.cuda.is_available in flat)
        ours = [f for f in flat if getattr(f, "__globals__", {}).get("__name__", "").startswith("lazyviz")]
        print(ours)
        """
    )
    assert shown.splitlines() == ["True True", "[]"]


@pytest.mark.takes_times
def test_an_import_and_a_first_block_take_a_small_part_of_the_import_of_torch(tmp_path: object) -> None:
    """The least of five, with bytecode, as in an installed package.

    Relative, since seconds are of a machine. PyTorch's import leaves a full collection due, which takes
    0.1 s at the next allocations of whatever code; it is not counted here.
    """
    program = """
        import gc, time
        begin = time.process_time()
        import torch
        of_torch = time.process_time() - begin
        gc.collect()
        begin = time.process_time()
        import lazyviz
        imported = time.process_time()
        net = torch.nn.Linear(8, 8)
        with lazyviz.lazy() as graph:
            net(torch.randn(4, 8)).sum().backward()
        print(of_torch, imported - begin, time.process_time() - imported)
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    figures = []
    for _ in range(6):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True, text=True, timeout=300, env=env, check=True,
        )  # fmt: skip
        figures.append([float(figure) for figure in done.stdout.split()])
    of_torch, imports, blocks = zip(*figures[1:])
    assert min(imports) < 0.15 * min(of_torch)
    assert min(blocks) < 0.05 * min(of_torch)


@pytest.mark.slow
def test_a_missing_numpy_is_not_warned_of(tmp_path):
    """What ``pip install torch lazyviz`` brings has none; ``.numpy()`` says so where it is called."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code = "import lazyviz, torch\nwith lazyviz.lazy():\n    x = torch.ones(3) + 1\nprint(x.tolist())"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0, 2.0]\n"), done.stderr


@pytest.mark.slow
def test_an_import_that_was_interrupted_can_be_repeated() -> None:
    """At the end of each module that defines operators, which PyTorch's registry keeps."""
    shown = in_new_process(
        """
        import importlib, os, sys
        import torch

        def interrupted(name, file):
            def trace(frame, event, argument):
                if frame.f_code.co_name != "<module>" or not frame.f_code.co_filename.endswith(file):
                    return None
                if event == "return":
                    sys.settrace(None)
                    raise KeyboardInterrupt(file)
                return trace

            sys.settrace(trace)
            try:
                importlib.import_module(name)
            except KeyboardInterrupt as error:
                return error  # which keeps the variables of the module
            finally:
                sys.settrace(None)

        kept = [
            interrupted("lazyviz", os.path.join("lazyviz", *file))
            for file in (
                ("record", "random_draw_order.py"),
                ("record", "eager_fallback.py"),
                ("session", "connect_packages_and_exit_handlers.py"),
            )
        ]
        import lazyviz
        kept.append(interrupted("lazyviz.torch_internals.nccl", "nccl.py"))
        importlib.import_module("lazyviz.torch_internals.nccl")
        for name in ("bernoulli_custom_ops", "random_draws_up_front", "fx_lowering"):
            file = os.path.join("compiler", f"{name}.py")
            kept.append(interrupted("lazyviz.execute.compiler.partitioned_run", file))
        importlib.import_module("lazyviz.execute.compiler.partitioned_run")
        with lazyviz.lazy() as graph:
            with torch.random.fork_rng():
                x = torch.rand(3)
            y = torch.rand(3)
        graph.evaluate()
        print(torch.equal(x, y), kept.count(None), len(kept), lazyviz.doctor().ok)
        """
    )
    assert shown.splitlines() == ["True 0 7 True"]
