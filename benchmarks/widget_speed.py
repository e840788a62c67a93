"""Speed of the widget in a real JupyterLab, in a Chromium with software rendering.

    python benchmarks/widget_speed.py [--out benchmarks/results/widget_speed.json]

A training step of GPT-2 small (transformers, AdamW), and a loop of about 100,000 operations: seconds from the
recording's end, in the kernel, to the first box in the page; seconds from the click on a group
to what is in it, for groups one after the other, inner ones too; frames a second while the wheel
zooms and the mouse drags, with 600 boxes in sight; bytes that a notebook would save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OPENINGS = 40
VISIBLE = 600


def one(
    page: Any, speed: Any, directory: Path, address: str, name: str, cells: tuple[str, str]
) -> dict[str, Any]:
    """Measure one notebook."""
    from tests.browser.support import jupyterlab

    speed.opened(page, directory, address, f"{name}.ipynb", speed.SETUP, *cells, speed.REPORT)
    for number in (0, 1):
        jupyterlab.run_cell(page, number, timeout=180_000)
    result: dict[str, Any] = speed.first_picture(page, 2, 3)
    times = speed.openings(page, OPENINGS)
    result["openings"] = len(times)
    result["opening, median"] = round(statistics.median(took for took, _ in times), 3)
    result["opening, slowest"] = round(max(took for took, _ in times), 3)
    result["opening, slowest has boxes"] = max(times)[1]
    result["boxes in sight"] = speed.crowd(page, VISIBLE)
    result["frames a second, zoom"] = round(speed.frames(page, drag=False), 1)
    result["frames a second, pan"] = round(speed.frames(page, drag=True), 1)
    result["first picture"] = round(result["first picture"], 2)
    return result


def main() -> None:
    from playwright.sync_api import sync_playwright

    from tests.browser.support import jupyterlab, speed

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("gpt2", "loop"))
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    notebooks = {
        "gpt2": (speed.GPT2, speed.GPT2_STEP),
        "loop": (speed.LOOP, speed.LOOP_STEPS.format(steps=options.steps)),
    }
    result: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, software rendering"}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        directory = Path(folder)
        browser = playwright.chromium.launch(
            executable_path=jupyterlab.chromium(), args=jupyterlab.CHROMIUM_ARGS
        )
        result["chromium"] = browser.version
        with jupyterlab.jupyter_lab(directory) as address:
            for name, cells in notebooks.items():
                if options.only in (None, name):
                    page = browser.new_page(viewport={"width": 1500, "height": 1100})
                    load = os.getloadavg()[0]
                    result[name] = one(page, speed, directory, address, name, cells)
                    result[name]["load of the machine"] = [round(load, 1), round(os.getloadavg()[0], 1)]
                    page.close()
                    print(name, json.dumps(result[name], indent=1), flush=True)
        browser.close()
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
