"""``lazyviz compile``: builds the native modules from the files of an installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lazyviz.cli import compile_command
from lazyviz.torch_internals import find_compiler_and_build_extensions


@pytest.mark.slow
def test_what_is_there_is_not_compiled_again(monkeypatch, capsys):
    monkeypatch.setattr(find_compiler_and_build_extensions, "is_made", lambda source, torch: True)
    assert compile_command.compile_modules(force=False) == 0
    assert "--force recompiles them" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_missing_is_said_with_what_it_takes(monkeypatch, capsys):
    def cannot(source, torch=None, more=()):
        raise find_compiler_and_build_extensions.CannotBuild("there is no compiler")

    monkeypatch.setattr(find_compiler_and_build_extensions, "build", cannot)
    assert compile_command.compile_modules(force=True) == 1
    said = capsys.readouterr().err
    assert said.count("there is no compiler") == 1
    assert all(source.name in said for source in find_compiler_and_build_extensions.SOURCES)
    assert "pip install 'cython>=3.1' 'setuptools>=68', and a C and C++ compiler" in said


@pytest.mark.slow
def test_a_missing_compiler_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there --option")
    assert compile_command.compile_modules(force=True) == 1
    said = capsys.readouterr().err
    assert said.count("no C and C++ compiler found (a-compiler-that-is-not-there is not found)") == 1
    assert "lazyviz works without" in said


@pytest.mark.slow
def test_each_module_says_what_is_being_done(monkeypatch, capsys):
    monkeypatch.setattr(
        find_compiler_and_build_extensions, "build", lambda source, torch=None, more=(): source
    )
    assert compile_command.compile_modules(force=True) == 0
    shown = capsys.readouterr().out
    assert "dispatch.cpp: compiling" in shown
    assert "dispatch.cpp: compiled in 0 s" in shown
    assert f"{len(find_compiler_and_build_extensions.SOURCES)} native modules compiled" in shown


@pytest.mark.slow
def test_a_package_that_is_installed_alone_compiles_its_modules(monkeypatch, tmp_path):
    """Without the rest of a checkout; one of them stands for all."""
    folder = Path("lazyviz") / "torch_internals" / "native"
    (tmp_path / folder).mkdir(parents=True)
    source = folder / "backward_nodes.cpp"
    shutil.copy(find_compiler_and_build_extensions.ROOT / source, tmp_path / source)
    monkeypatch.setattr(find_compiler_and_build_extensions, "ROOT", tmp_path)
    torch = find_compiler_and_build_extensions.find_torch()
    assert not find_compiler_and_build_extensions.is_made(source, torch)
    made = find_compiler_and_build_extensions.build(source, torch)
    assert made.parent == tmp_path / folder
    assert find_compiler_and_build_extensions.is_made(source, torch)
