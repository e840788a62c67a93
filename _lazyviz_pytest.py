"""The pytest marker ``lazyviz_peak``: a test fails if its projected memory peak is too high.

::

    @pytest.mark.lazyviz_peak("12 GiB", device="A100-40GB")
    def test_a_training_step_fits():
        model(x).sum().backward()

The PyTorch code of the marked test is recorded, not run; reading a value evaluates what it needs,
as in any lazy block.  Fixtures are not measured; of a ``unittest.TestCase`` method ``setUp`` and
``tearDown`` are.  This module stands outside of the package, since pytest imports it at every
start, and lazyviz imports torch: that happens only when a marked test runs.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

MARKER = "lazyviz_peak"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(limit, device=None, of='eager'): fail if lazyviz projects a peak of memory above the "
        "limit (bytes, or text such as '12 GiB') for what the test does; nothing of it is run",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    # Around every kind of test: pytest_pyfunc_call is not called for the methods of a unittest.TestCase.
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    from lazyviz import assert_peak_below
    from lazyviz.session import lazy_graph
    from lazyviz.testing.peak_assertion import Budget, PeakExceeded

    wrong, budget = "", None
    try:
        budget = assert_peak_below(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as error:
        wrong = f"{MARKER}: {error}"
    if budget is None:  # outside of the handler, so that the report shows one error, not two
        pytest.fail(wrong, pytrace=False)
    result: object = None
    try:
        with Budget(budget.nbytes, budget.device, of_function=True, of=budget.of, names=_names(item)):
            result = yield
    except PeakExceeded as error:
        wrong = str(error)
    finally:
        lazy_graph.cell_boundary()
    if wrong:
        # A unittest.TestCase has noted what its method alone came to: an unexpected success.
        if _may_fail(item):
            vars(item)["_excinfo"] = None
            pytest.xfail(wrong)
        pytest.fail(wrong, pytrace=False)
    return result


def _names(item: pytest.Item) -> dict[str, object]:
    """What a test can name its tensors by: its fixtures and parameters, and the ``self`` of a method."""
    found = dict(getattr(item, "funcargs", {}))
    instance = getattr(item, "instance", None)
    return found if instance is None else {**found, "self": instance}


def _may_fail(item: pytest.Item) -> bool:
    """Whether ``@unittest.expectedFailure`` is on the test or its class."""
    places = (getattr(item, "obj", None), getattr(item.parent, "obj", None))
    return any(getattr(place, "__unittest_expecting_failure__", False) for place in places)
