"""A compiled module is used only if it matches its source and the installed PyTorch."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch

import lazyviz
from lazyviz.torch_internals import native_module_loader

NAME = "lazyviz.torch_internals.native.something"


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module that stands for a compiled one, of the source that it is said to be of."""
    (tmp_path / "something.cpp").write_text("// a source\n")
    made = type(sys)(NAME)
    made.SOURCE = hashlib.sha256(b"// a source\n").hexdigest()
    made.TORCH = torch.__version__
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(native_module_loader, "_FOLDER", tmp_path)
    monkeypatch.setattr(native_module_loader, "loaded", [])
    monkeypatch.setattr(native_module_loader, "refused", {})
    monkeypatch.setattr(native_module_loader, "_warned", set())
    monkeypatch.delenv("LAZYVIZ_PURE_PYTHON", raising=False)
    return made


def found():
    return native_module_loader.load("something.cpp")


def test_a_module_of_its_source_is_used(module, recwarn):
    assert found() is module
    assert not recwarn
    assert native_module_loader.loaded == ["something"]


def test_one_without_a_word_on_pytorch_serves_every_version(module):
    del module.TORCH
    assert found() is module


def test_an_older_one_is_not_used(module):
    module.SOURCE = hashlib.sha256(b"as it was").hexdigest()
    with pytest.warns(UserWarning, match="older than its source"):
        assert found() is None


def test_one_for_another_pytorch_is_not_used(module):
    module.TORCH = "2.0.0"
    with pytest.warns(UserWarning, match=r"for another PyTorch than \d"):
        assert found() is None


def test_those_for_another_pytorch_are_not_even_loaded_and_refused_in_one_line(
    module, monkeypatch, tmp_path, recwarn
):
    monkeypatch.setattr(native_module_loader.importlib, "import_module", lambda name: pytest.fail("loaded"))
    for name in ("something", "another"):
        (tmp_path / f"{name}.cpp").write_text('add("TORCH", LAZYVIZ_TORCH);')
        (tmp_path / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x002.0.0\x00")
        assert native_module_loader.load(f"{name}.cpp") is None
    (warning,) = recwarn
    assert "\n" not in str(warning.message) and warning.filename == __file__
    assert list(native_module_loader.refused) == ["something", "another"]


def test_one_that_cannot_be_loaded_is_not_used(module, monkeypatch):
    def refuse(name):
        raise ImportError("undefined symbol: of another PyTorch")

    monkeypatch.setattr(native_module_loader.importlib, "import_module", refuse)
    with pytest.warns(UserWarning, match="cannot be loaded .*undefined symbol"):
        assert found() is None


def test_none_is_used_where_python_alone_is_asked_for(module, monkeypatch):
    monkeypatch.setenv("LAZYVIZ_PURE_PYTHON", "1")
    assert found() is None


def test_none_is_no_error(monkeypatch):
    monkeypatch.delenv("LAZYVIZ_PURE_PYTHON", raising=False)
    assert native_module_loader.load("not_there.cpp") is None


@pytest.mark.skipif("LAZYVIZ_PURE_PYTHON" in os.environ, reason="Python alone is asked for")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is installed")
@pytest.mark.parametrize(
    "source",
    [
        "recorder.pyx",
        "short_runs.pyx",
        "dispatch.cpp",
        "allocations.cpp",
        "backward_nodes.cpp",
        "graph_release.cpp",
        "interpreter.cpp",
        "node_passes.cpp",
        "op_stream.cpp",
        "plan_passes.pyx",
    ],
)
def test_all_are_here_where_they_can_be_compiled(source):
    name = source.partition(".")[0]
    assert name in lazyviz.metrics()["compiled modules"], f"{name} has not been compiled for this PyTorch"


@pytest.mark.parametrize(("checkout", "command"), [(True, "build_native.py"), (False, "lazyviz compile")])
def test_the_warning_names_the_command_that_rebuilds_it(module, checkout, command, monkeypatch, tmp_path):
    if checkout:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "build_native.py").touch()
    monkeypatch.setattr(native_module_loader, "_ROOT", tmp_path)
    module.TORCH = "2.0.0"
    with pytest.warns(UserWarning, match=command):
        assert found() is None
