"""A process exits as it would without lazyviz: with the same status, and without aborting."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "support" / "exiting_children.py"
_spec = importlib.util.spec_from_file_location("exits", SCRIPT)
exits = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(exits)

COUNTS = {
    False: {"compiled": 3, "python": 1},
    True: {"compiled": 200, "python": 20},
}


@pytest.fixture(scope="module")
def inductor_cache(tmp_path_factory):
    """An empty cache, because nothing would be compiled with one from earlier runs."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module", params=["compiled", "python"])
def ended(request, inductor_cache):
    """How children of one process ended: (how many of each kind, what is known of each).

    Only of the kinds that are asked for in this session.
    """
    count = COUNTS[request.config.getoption("--all")][request.param]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache)}
    if request.param == "python":
        env["LAZYVIZ_PURE_PYTHON"] = "1"
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]
    kinds = [each["kind"] for each in asked if each["ended"] == request.param]
    command = [sys.executable, str(SCRIPT), str(count), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return count, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", list(exits.KINDS))
def test_a_process_ends_with_its_own_status_and_says_nothing_else(kind, ended):
    count, children = ended
    _, status, says = exits.KINDS[kind]
    own = [child for child in children if child["kind"] == kind]
    assert len(own) == count
    for child in own:
        assert child["status"] == status, child
        assert (says in child["stderr"]) if says else not child["stderr"], child
