"""Fixtures of the browser tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from .support import jupyterlab as lab_tools


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory) -> Path:
    """Where screenshots go: ``$LAZYVIZ_SCREENSHOTS``, or a temporary directory."""
    named = os.environ.get("LAZYVIZ_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: the folder that it shows, its address, and a kernel for any notebook in it."""

    directory: Path
    address: str
    kernel: lab_tools.SharedKernel


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lab")
    with lab_tools.jupyter_lab(directory) as address:
        yield Lab(directory, address, lab_tools.SharedKernel(directory, address))


@pytest.fixture
def lab(server):
    """The one JupyterLab of all tests; kernels end with their test, but for the one that notebooks share."""
    yield server
    server.kernel.clean()
    lab_tools.end_kernels(server.address, but=server.kernel.id)


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=lab_tools.chromium(), args=lab_tools.CHROMIUM_ARGS
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page whose errors fail the test."""
    page = browser.new_page(viewport={"width": 1500, "height": 1100})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not errors, errors
