"""Memory budgets in tests: nothing runs, and a step that needs too much fails with the reason."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.nested_blocks import flattened
from lazyviz.plan.devices.device_lookup import DeviceProfile
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.units import format_bytes, format_range
from lazyviz.testing.peak_assertion import PeakExceeded

from ..warm_python import environment, python

pytest_plugins = ["pytester"]

ROOT = Path(lazyviz.__file__).parent.parent


def step(model, x):
    out = model(x)
    out.square().mean().backward()
    return out


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def test_a_step_within_its_budget_passes_and_stays_pending(model):
    x = torch.randn(32, 64)
    with lazyviz.assert_peak_below("1 GiB") as graph:
        out = step(model, x)
    assert graph.pending == len(graph.nodes) > 0
    assert lazyviz.is_lazy(out)
    assert torch.equal(out, step(model, x))  # may be used afterwards


def test_the_limit_is_compared_with_the_projected_peak_to_the_byte(model):
    x = torch.randn(32, 64)
    with lazyviz.assert_peak_below("1 GiB") as graph:
        out = step(model, x)
    peak = graph.plan().eager_peak_bytes
    del out
    model.zero_grad()
    with lazyviz.assert_peak_below(peak):
        out = step(model, x)
    del out
    model.zero_grad()
    with pytest.raises(AssertionError):
        with lazyviz.assert_peak_below(peak - 1):
            kept = step(model, x)
    assert kept is not None


def test_a_step_above_its_budget_fails_with_peak_line_largest_and_remedies(model):
    with pytest.raises(PeakExceeded) as caught:
        with lazyviz.assert_peak_below("100 KiB") as graph:
            out = step(model, torch.randn(512, 64))
    text = str(caught.value)
    assert text.startswith("cpu would need 1.") and "above the limit of 100 KiB" in text
    assert "Projected peak on cpu" in text and "test_peak_assertion.py" in text
    assert "Cheapest remedies:" in text and "largest first" in text
    assert caught.value.plan.peak_bytes > 100 * 1024
    assert graph.pending == len(graph.nodes)  # failing evaluates nothing either
    assert out.shape == (512, 64)


def test_on_a_gpu_what_is_compared_is_reserved_memory_and_the_context(model):
    x = torch.randn(32, 64)
    with lazyviz.assert_peak_below("2 GiB", device="RTX-3060") as graph:
        step(model, x)
    plan = graph.plan()
    assert plan.device == "RTX-3060"
    assert plan.needed_bytes == plan.reserved_bytes + plan._reservation.context_bytes > plan.peak_bytes
    with pytest.raises(AssertionError, match="CUDA context"):
        with lazyviz.assert_peak_below(plan.needed_bytes - 1, device="RTX-3060"):
            step(model, x)


def test_a_limit_within_the_range_of_the_need_is_reported_as_such():
    def train():
        net = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]).cuda()
        net(torch.randn(32, 64, 64, 64, device="cuda")).mean().backward()

    with lazyviz.lazy(device="RTX-3060") as graph:
        train()
    plan = graph.plan()
    low, high = plan.needed_range
    assert low < plan.needed_bytes < high
    ends = f"({format_range(low, high)})"
    with pytest.raises(PeakExceeded) as caught:
        with lazyviz.assert_peak_below(plan.needed_bytes - 1, device="RTX-3060"):
            train()
    assert str(caught.value).startswith(
        f"RTX-3060 would probably need {format_bytes(plan.needed_bytes)} {ends}"
    )
    with pytest.raises(PeakExceeded) as caught:
        with lazyviz.assert_peak_below(low - 1, device="RTX-3060"):
            train()
    assert "probably" not in str(caught.value).splitlines()[0]


def test_a_user_defined_profile_is_a_device(model):
    with pytest.raises(AssertionError, match="^mine would need"):
        with lazyviz.assert_peak_below(1000, device=DeviceProfile("mine", 10**9)):
            step(model, torch.randn(32, 64))


def test_it_is_a_decorator_too_and_may_be_called_again(model):
    @lazyviz.assert_peak_below("1 MiB")
    def train(rows):
        """Trains."""
        return step(model, torch.randn(rows, 64))

    assert train.__doc__ == "Trains."
    assert train(8).shape == (8, 64)
    with pytest.raises(AssertionError, match="above the limit of 1.00 MiB"):
        train(2000)
    assert train(16).shape == (16, 64)


def test_variables_of_a_decorated_function_count_to_its_end():
    def infer():
        layers = [nn.Linear(64, 64) for _ in range(8)]
        x = torch.ones(1, 64)
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return None

    weights = 8 * (64 * 64 + 64) * 4
    with pytest.raises(AssertionError):
        lazyviz.assert_peak_below(weights)(infer)()
    lazyviz.assert_peak_below(weights + 4096)(infer)()


async def coroutine(rows):
    return step(nn.Linear(64, 64), torch.randn(rows, 64))


def generator(rows):
    yield step(nn.Linear(64, 64), torch.randn(rows, 64))


async def asynchronous_generator(rows):
    yield step(nn.Linear(64, 64), torch.randn(rows, 64))


class Callable:
    async def __call__(self, rows):
        return await coroutine(rows)


@pytest.mark.parametrize(
    "later", [coroutine, generator, asynchronous_generator, functools.partial(coroutine, 8), Callable()]
)
def test_what_runs_after_the_call_is_refused_at_its_decoration(later):
    with pytest.raises(TypeError, match="around the ops in it"):
        lazyviz.assert_peak_below("1 KiB")(later)


@pytest.mark.parametrize("later", [coroutine, generator, asynchronous_generator])
def test_what_runs_after_the_call_is_refused_when_it_shows_only_then(later):
    with pytest.raises(TypeError, match="runs after the call"):
        lazyviz.assert_peak_below("1 KiB")(lambda rows: later(rows))(8)


def test_a_class_is_refused_since_it_would_no_longer_be_one():
    with pytest.raises(TypeError, match="Callable is a class"):
        lazyviz.assert_peak_below("1 KiB")(Callable)


def test_an_exception_of_the_block_is_its_own(model):
    with pytest.raises(ZeroDivisionError):
        with lazyviz.assert_peak_below(1):
            step(model, torch.randn(32, 64))
            1 / 0


@pytest.mark.parametrize("limit", ["twelve", "12 parsecs", "", "-1", -1, 1.5, None, True])
def test_what_is_no_size_is_refused_before_the_block_runs(limit):
    with pytest.raises(ValueError, match="not a size"):
        lazyviz.assert_peak_below(limit)


def test_an_unknown_device_is_refused_before_the_block_runs():
    with pytest.raises(ValueError, match="Voodoo"):
        lazyviz.assert_peak_below("1 GiB", device="Voodoo-2")


@pytest.fixture
def project(pytester):
    """A project of its own that has the plugin; run in a process of its own, as a user's tests are."""
    return pytester


def run(project, *arguments, fresh=False):
    """pytest in the project with only our plugin; ``fresh``: in a new process, with all installed plugins."""
    env = environment({} if fresh else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    # A checkout that is not installed has no entry point; naming the plugin twice is an error of pytest's.
    installed = [each for each in entry_points(group="pytest11") if each.value == "_lazyviz_pytest"]
    named = [] if installed and fresh else ["-p", "_lazyviz_pytest"]
    arguments = (*named, "-p", "no:cacheprovider", f"--basetemp={project.path / 'temporary'}", *arguments)
    imports = ("torch", "lazyviz", "pytest")
    done = python("-m", "pytest", *arguments, imports=imports, env=env, cwd=project.path, fresh=fresh)
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


@pytest.mark.slow
def test_a_marked_test_fails_by_its_projected_memory_and_evaluates_nothing(project):
    project.makepyfile(
        """
        import pytest, torch, lazyviz
        from torch import nn

        model = nn.Linear(256, 256)

        @pytest.mark.lazyviz_peak("8 MiB")
        def test_small():
            loss = model(torch.ones(16, 256)).sum()
            loss.backward()
            assert lazyviz.is_lazy(loss)

        @pytest.mark.lazyviz_peak("1 GiB", device="A100-40GB")
        @pytest.mark.parametrize("rows", [16, 2_000_000])
        def test_on_a_gpu(rows):
            model(torch.ones(rows, 256)).sum().backward()

        @pytest.mark.lazyviz_peak("1 GiB")
        def test_wrong_for_another_reason():
            assert 1 == 2

        def test_unmarked():
            assert not lazyviz.is_lazy(model(torch.ones(1, 256)))
        """
    )
    result = run(project, "--strict-markers")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*A100-40GB would need * GiB, * above the limit of 1.00 GiB*"])
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    assert "lazyviz/record" not in result.stdout.str()  # no stack of ours around the reason
    assert "During handling" not in result.stdout.str()


def test_a_marked_test_names_tensors_by_its_fixtures_and_self(project):
    project.makepyfile(
        """
        import pytest
        import torch

        @pytest.fixture
        def layer():
            return torch.nn.Linear(512, 512)

        @pytest.mark.lazyviz_peak("10 KiB")
        def test_fixture(layer):
            layer(torch.ones(1, 512)).sum().backward()

        class TestMethods:
            @pytest.fixture(autouse=True)
            def made(self):
                self.net = torch.nn.Linear(512, 512)

            @pytest.mark.lazyviz_peak("10 KiB")
            def test_self(self):
                self.net(torch.ones(1, 512)).sum().backward()
        """
    )
    text = run(project).stdout.str()
    assert "parameters, layer.weight" in text and "parameters, net.weight" in text
    assert "funcargs" not in text and "item." not in text


def test_a_decorated_function_names_tensors_by_its_arguments():
    @lazyviz.assert_peak_below("10 KiB")
    def checked(layer, x, *, other=None):
        layer(x).sum().backward()

    with pytest.raises(PeakExceeded, match=r"parameters, layer\.weight"):
        checked(nn.Linear(512, 512), torch.ones(1, 512))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        checked(nn.Linear(4, 4))


def test_methods_of_a_unittest_case_are_measured_with_their_set_up(project):
    project.makepyfile(
        """
        import unittest
        import pytest, torch, lazyviz

        @pytest.mark.lazyviz_peak("1 MiB")
        class Case(unittest.TestCase):
            def setUp(self):
                self.x = torch.ones(1000, 200)

            def test_small(self):
                assert lazyviz.is_lazy(self.x)

            def test_large(self):
                self.y = self.x + 1

            def test_wrong_for_another_reason(self):
                y = self.x + 1
                self.assertEqual(1, 2)

            @unittest.skip("not today")
            def test_skipped(self):
                torch.ones(1000, 1000)

        @pytest.mark.lazyviz_peak("1 MiB")
        class Asynchronous(unittest.IsolatedAsyncioTestCase):
            async def test_small(self):
                self.x = torch.ones(10)

            async def test_large(self):
                self.x = torch.ones(1000, 1000)
        """
    )
    result = run(project)
    result.assert_outcomes(passed=2, failed=3, skipped=1)
    shown = result.stdout.str()
    result.stdout.fnmatch_lines(["*AssertionError: 1 != 2*"])
    assert "cpu would need 1.53 MiB, 538 KiB above" in shown
    assert "cpu would need 3.81 MiB" in shown and "During handling" not in shown


def test_a_marker_that_makes_no_sense_fails_its_test_with_one_line(project):
    markers = {
        'lazyviz_peak("a lot")': "is not a size",
        'lazyviz_peak("1 GiB", device="Voodoo-2")': "Voodoo-2",
        "lazyviz_peak": "limit",
    }
    project.makepyfile(
        "import pytest\n"
        + "".join(
            f"@pytest.mark.{marker}\ndef test_{number}(): pass\n" for number, marker in enumerate(markers)
        )
    )
    result = run(project)
    result.assert_outcomes(failed=3)
    for reason in markers.values():
        result.stdout.fnmatch_lines([f"lazyviz_peak:*{reason}*"])


@pytest.mark.slow
def test_pytest_does_not_import_torch_for_the_plugin_s_sake(project):
    project.makepyfile("import sys\ndef test(): assert 'torch' not in sys.modules\n")
    run(project, fresh=True).assert_outcomes(passed=1)


def test_the_plugin_is_declared_as_pytest_finds_it():
    if sys.version_info >= (3, 11):
        import tomllib

        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        assert declared["pytest11"] == {"lazyviz": "_lazyviz_pytest"}
    code = "import _lazyviz_pytest, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_lazy_block_inside_counts():
    with pytest.raises(AssertionError, match=r"would need 11\.4 MiB"):
        with lazyviz.assert_peak_below("1 MiB"):
            with lazyviz.lazy():
                x = torch.ones(3000, 1000)
    assert x.shape == (3000, 1000)


def test_a_budget_inside_of_a_budget_counts_in_both():
    @lazyviz.assert_peak_below("1 GiB")
    def inner():
        return torch.ones(3000, 1000) * 2

    with pytest.raises(AssertionError, match=r"would need 22\.9 MiB.*above"):
        with lazyviz.assert_peak_below("20 MiB"):
            inner()


def test_blocks_inside_stand_where_they_were_recorded():
    """What is dropped before, in and after them is so in the whole, too."""

    def program():
        a = torch.ones(1000)
        with lazyviz.lazy():
            b = torch.ones(3000) + 1
            del a
            c = torch.ones(10)
            with lazyviz.lazy():
                d = c * 2
            del c
        e = b + 1
        return e, d

    def flat():
        a = torch.ones(1000)
        b = torch.ones(3000) + 1
        del a
        c = torch.ones(10)
        d = c * 2
        del c
        e = b + 1
        return e, d

    with lazyviz.lazy() as outer:
        kept = program()
    with lazyviz.lazy() as alone:
        same = flat()
    plan, expected = make_plan(flattened(outer.ir)), alone.plan()
    assert [node.op for node in plan._nodes] == [node.op for node in alone.nodes]
    assert plan.timeline == expected.timeline
    assert plan.eager_timeline == expected.eager_timeline
    assert plan.by_category == expected.by_category
    assert len(kept) == len(same)


def test_what_a_thread_computes_inside_is_named_since_it_is_not_counted():
    @lazyviz.assert_peak_below("1 MiB")
    def budgeted():
        thread = threading.Thread(target=lambda: torch.ones(3000, 1000) * 2, name="worker")
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="ops of worker are not counted"):
        budgeted()


def test_a_thread_that_computes_nothing_is_not_named():
    with lazyviz.assert_peak_below("1 MiB"):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()


def test_a_budget_needs_no_capacity_so_cuda_will_do_without_a_driver(monkeypatch):
    monkeypatch.setattr(
        "lazyviz.plan.devices.device_lookup.cuda_devices", lambda: ([], "no NVIDIA driver on this machine")
    )
    if torch.cuda.is_available():
        pytest.skip("cuda is there")
    with lazyviz.assert_peak_below("1 GiB", device="cuda"):
        torch.ones(10, device="cuda")
    with pytest.raises(AssertionError, match="cuda:0 would need"):
        with lazyviz.assert_peak_below("1 MiB", device="cuda"):
            x = torch.ones(1_000_000, device="cuda")
    del x
    lazyviz.session.lazy_graph.reset()


def test_a_class_method_may_be_budgeted_below_or_above_its_own_decorator():
    class Step:
        @lazyviz.assert_peak_below("1 MiB")
        @classmethod
        def small(cls):
            return torch.ones(10), cls

        @lazyviz.assert_peak_below("1 MiB")
        @staticmethod
        def large():
            return torch.ones(1000, 1000)

        @classmethod
        @lazyviz.assert_peak_below("1 MiB")
        def other(cls):
            return cls

    assert Step.small()[1] is Step and Step().other() is Step
    with pytest.raises(AssertionError):
        Step.large()


def test_a_testcase_that_is_expected_to_fail_reports_the_peak(project):
    project.makepyfile(
        """
        import unittest
        import pytest, torch

        class Test(unittest.TestCase):
            @unittest.expectedFailure
            @pytest.mark.lazyviz_peak("1 MiB")
            def test_large(self):
                self.x = torch.ones(1000, 1000)

            @unittest.expectedFailure
            @pytest.mark.lazyviz_peak("1 GiB")
            def test_small(self):
                self.x = torch.ones(10)
        """
    )
    result = run(project, "-rxf")
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_large*would need 3.81 MiB*"])
    result.stdout.fnmatch_lines(["*Unexpected success*"])
