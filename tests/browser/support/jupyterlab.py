"""A real JupyterLab in a headless Chromium, for the tests in this directory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

ROOT = Path(__file__).parents[3]
TOKEN = "lazyviz-test"
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def chromium() -> str | None:
    """Path of an installed Chromium or Chrome; ``None`` lets Playwright use its own."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    return None


def notebook(cells: Sequence[str]) -> dict[str, Any]:
    """A notebook of code cells, with the metadata that lets it open without asking for a kernel."""
    return {
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{number}",
                "execution_count": None,
                "metadata": {},
                "outputs": [],
                "source": source,
            }
            for number, source in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    path.write_text(json.dumps(notebook(cells)), encoding="utf-8")


def outputs_of(path: Path, cell: int) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"][cell]["outputs"]


@contextmanager
def jupyter_lab(directory: Path) -> Iterator[str]:
    """JupyterLab serving ``directory`` on a free port; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = directory / ".settings"
    settings.mkdir(exist_ok=True)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), environment.get("PYTHONPATH", "")) if part
    )
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(settings)
    environment["JUPYTERLAB_WORKSPACES_DIR"] = str(directory / ".workspaces")
    environment["JUPYTER_CONFIG_DIR"] = str(directory / ".config")
    environment["JUPYTER_RUNTIME_DIR"] = str(directory / ".runtime")
    environment["IPYTHONDIR"] = str(directory / ".ipython")
    log = (directory / ".lab.log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            f"--port={port}",
            "--ServerApp.port_retries=0",
            "--ServerApp.ip=127.0.0.1",
            f"--IdentityProvider.token={TOKEN}",
            f"--ServerApp.root_dir={directory}",
            "--LabApp.news_url=",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ],
        cwd=directory,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            if process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended: {(directory / '.lab.log').read_text()[-2000:]}")
            try:
                urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=2).close()
                break
            except OSError:
                time.sleep(0.25)
        else:
            raise RuntimeError("JupyterLab did not start within a minute")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def ask(address: str, path: str, *, method: str = "GET", content: Any = None) -> Any:
    """The server's answer to a request of its REST interface."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(f"{address}/api/{path}?token={TOKEN}", data, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def end_kernels(address: str, *, but: str = "") -> None:
    """Shut down every kernel of the server, except the one with the id ``but``."""
    for kernel in ask(address, "kernels"):
        if kernel["id"] != but:
            ask(address, f"kernels/{kernel['id']}", method="DELETE")


class SharedKernel:
    """One kernel for notebooks of several tests, each of which finds it as if it had just been started.

    What took long stays: PyTorch and lazyviz are imported.
    """

    CLEAN = (
        "import ipywidgets, lazyviz; lazyviz.reset(); ipywidgets.Widget.close_all(); "
        "get_ipython().run_line_magic('reset', '-f'); get_ipython().run_line_magic('unload_ext', 'lazyviz')"
    )

    def __init__(self, directory: Path, address: str) -> None:
        self._directory, self._address = directory, address
        self.id = ""

    def attach(self, name: str) -> None:
        """Have the notebook ``name`` opened with this kernel."""
        if not self.id:
            self.id = ask(self._address, "kernels", method="POST", content={"name": "python3"})["id"]
        content = {"path": name, "name": name, "type": "notebook", "kernel": {"id": self.id}}
        ask(self._address, "sessions", method="POST", content=content)

    def clean(self) -> None:
        """Forget the variables, widgets and pending ops of a test; a kernel that cannot is ended."""
        if not self.id:
            return
        client = BlockingKernelClient(
            connection_file=str(self._directory / ".runtime" / f"kernel-{self.id}.json")
        )
        client.load_connection_file()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=30)
            reply = client.execute_interactive(self.CLEAN, timeout=30, output_hook=lambda message: None)
            done = reply["content"]["status"] == "ok"
        except (RuntimeError, TimeoutError):
            done = False
        finally:
            client.stop_channels()
        if not done:
            self.id = ""


def set_theme(directory: Path, *, dark: bool) -> None:
    """JupyterLab's theme, for pages opened from now on."""
    folder = directory / ".settings" / "@jupyterlab" / "apputils-extension"
    folder.mkdir(parents=True, exist_ok=True)
    theme = "JupyterLab Dark" if dark else "JupyterLab Light"
    (folder / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    (folder / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )


def open_notebook(page: Any, address: str, name: str, kernel: SharedKernel | None = None) -> None:
    """Open a notebook in a fresh workspace, with nothing else on screen; without ``kernel`` with its own."""
    if kernel is not None:
        kernel.attach(name)
    workspace = f"w{time.monotonic_ns()}"
    page.goto(f"{address}/lab/workspaces/{workspace}/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)


def hide_side_bar(page: Any) -> None:
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")
        page.wait_for_timeout(300)


def wait_for_kernel(page: Any) -> None:
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
    # The indicator is idle before there is a connection, too: a cell run then is forgotten.
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=90_000)


def run_cell(page: Any, number: int, *, timeout: float = 60_000) -> None:
    """Run one code cell and wait until its prompt has a number."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    cell.locator(".jp-InputPrompt", has_text="]:").filter(has_not_text="*").filter(
        has_not_text="[ ]:"
    ).wait_for(timeout=timeout)


def save_notebook(page: Any, path: Path) -> None:
    """Save, and wait until the file is whole: the server truncates it and writes it in place."""
    before = path.stat().st_mtime_ns
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    for _ in range(80):
        if path.stat().st_mtime_ns != before and is_json(path):
            return
        page.wait_for_timeout(100)
    raise AssertionError("the notebook was not saved within 8 seconds")


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
