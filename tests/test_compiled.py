"""A compiled module is used where it was made of its source as it is, for the PyTorch that is there."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys

import pytest
import torch

import lazyviz
from lazyviz import _compiled

NAME = "lazyviz._something"


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module that stands for a compiled one, of the source that it is said to be of."""
    (tmp_path / "_something.cpp").write_text("// a source\n")
    made = type(sys)(NAME)
    made.SOURCE = hashlib.sha256(b"// a source\n").hexdigest()
    made.TORCH = torch.__version__
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(_compiled, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_compiled, "loaded", [])
    monkeypatch.delenv("LAZYVIZ_PURE_PYTHON", raising=False)
    return made


def found():
    return _compiled.load("_something", "_something.cpp")


def test_a_module_of_its_source_is_used(module, recwarn):
    assert found() is module
    assert not recwarn
    assert _compiled.loaded == ["_something"]


def test_one_without_a_word_on_pytorch_serves_every_version(module):
    del module.TORCH
    assert found() is module


def test_an_older_one_is_not_used(module):
    module.SOURCE = hashlib.sha256(b"as it was").hexdigest()
    with pytest.warns(UserWarning, match="older than its source"):
        assert found() is None


def test_one_for_another_pytorch_is_not_used(module):
    module.TORCH = "2.0.0"
    with pytest.warns(UserWarning, match=r"for PyTorch 2\.0\.0"):
        assert found() is None


def test_one_that_cannot_be_loaded_is_not_used(module, monkeypatch):
    def refuse(name):
        raise ImportError("undefined symbol: of another PyTorch")

    monkeypatch.setattr(_compiled.importlib, "import_module", refuse)
    with pytest.warns(UserWarning, match="cannot be loaded .*undefined symbol"):
        assert found() is None


def test_none_is_used_where_python_alone_is_asked_for(module, monkeypatch):
    monkeypatch.setenv("LAZYVIZ_PURE_PYTHON", "1")
    assert found() is None


def test_none_is_no_error(monkeypatch):
    monkeypatch.delenv("LAZYVIZ_PURE_PYTHON", raising=False)
    assert _compiled.load("_not_there", "_not_there.cpp") is None


@pytest.mark.skipif("LAZYVIZ_PURE_PYTHON" in os.environ, reason="Python alone is asked for")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is installed")
@pytest.mark.parametrize(
    "source",
    [
        "record/_accelerator.pyx",
        "record/_dispatch.cpp",
        "record/_engine.cpp",
        "record/_release.cpp",
        "execute/_program.cpp",
        "execute/_sweep.cpp",
    ],
)
def test_all_are_here_where_they_can_be_compiled(source):
    name = source.partition(".")[0].replace("/", ".")
    assert name in lazyviz.metrics()["compiled modules"], f"{name} has not been compiled for this PyTorch"


@pytest.mark.parametrize(("checkout", "command"), [(True, "accelerator_build.py"), (False, "pip install")])
def test_the_warning_names_the_command_that_makes_it_anew(module, checkout, command, monkeypatch, tmp_path):
    package = tmp_path / "lazyviz"
    package.mkdir()
    (tmp_path / "_something.cpp").rename(package / "_something.cpp")
    if checkout:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "accelerator_build.py").touch()
    monkeypatch.setattr(_compiled, "_PACKAGE", package)
    module.TORCH = "2.0.0"
    with pytest.warns(UserWarning, match=command):
        assert found() is None
