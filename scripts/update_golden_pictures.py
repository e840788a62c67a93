"""Regenerates the golden pictures of the widget; look at each of them before you commit it.

    .venv/bin/python scripts/update_golden_pictures.py [mlp gpt2 ...]

Without names, it regenerates all of them.  ``tests/browser/support/pictures.py`` defines them, and
``tests/browser/test_golden.py`` compares them.
"""

from __future__ import annotations

import sys
from typing import Any

from named_steps import ROOT, relative, say

sys.path.insert(0, str(ROOT))


def main(names: list[str]) -> int:
    """Take and save the pictures; returns the exit status."""
    from playwright.sync_api import sync_playwright

    from tests.browser.support import goldens, jupyterlab, pictures

    unknown = [name for name in names if name not in pictures.PICTURES]
    if unknown:
        say(f"no such picture: {', '.join(unknown)}; available: {', '.join(pictures.PICTURES)}")
        return 2
    structure: dict[str, Any] = goldens.known() if goldens.STRUCTURE.exists() else {}
    total = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=jupyterlab.chromium(), args=jupyterlab.CHROMIUM_ARGS
        )
        for name in goldens.NAMES:
            graph, width, _ = goldens.parts(name)
            if names and graph not in names:
                continue
            picture, boxes, fonts = goldens.take(browser, name)
            path = goldens.FOLDER / f"{name}.png"
            goldens.keep(picture, path)
            structure[f"{graph}-{width}"] = boxes
            structure["fonts"] = fonts
            total += path.stat().st_size
            say(f"{relative(path)}: {picture.width} x {picture.height}, {path.stat().st_size / 1000:.0f} kB")
        browser.close()
    kept = {f"{graph}-{width}" for graph, width, _ in map(goldens.parts, goldens.NAMES)}
    goldens.write_known({name: boxes for name, boxes in structure.items() if name in kept or name == "fonts"})
    for path in goldens.FOLDER.glob("*.png"):
        if path.stem not in goldens.NAMES:
            path.unlink()
    say(f"{total / 1e6:.2f} MB; now look at each of them")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
