"""Conversion of the picture to PDF or PNG, by CairoSVG or a Chromium-like browser.

Both keep lines and text in a PDF as vectors. The browser is started only for this, without a window, profile,
or network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SCALE = 2  # pixels of a PNG per pixel of the picture
SECONDS = 60.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
MAC_BROWSERS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)
_HALO = re.compile(
    r'<text([^>]*) paint-order="stroke"((?: stroke(?:-width|-linejoin)?="[^"]*")+)([^>]*)>(.*?)</text>'
)
_FONTS = re.compile(r'font-family="[^"]*,\s*([\w-]+)"')
REMEDY = "`pip install cairosvg` (with the cairo library), or install Chromium, Chrome or Graphviz"


def convert(svg: str, kind: str) -> bytes | None:
    """``svg`` as ``"pdf"`` or ``"png"``; ``None`` if no program for it is installed."""
    return _by_cairo(svg, kind) or _by_browser(svg, kind)


def _by_cairo(svg: str, kind: str) -> bytes | None:
    try:
        import cairosvg
    except (ImportError, OSError):  # OSError: the package is installed, the cairo library is not
        return None
    # CairoSVG does not support `paint-order`, and would paint the halo of a text over the text.
    below = _HALO.sub(r"<text\1\2\3>\4</text><text\1\3>\4</text>", svg)
    # Of a list of fonts it tries only the first.
    below = _FONTS.sub(r'font-family="\1"', below)
    make = cairosvg.svg2pdf if kind == "pdf" else cairosvg.svg2png
    made: bytes = make(bytestring=below.encode(), scale=1 if kind == "pdf" else SCALE)
    return made


def _by_browser(svg: str, kind: str) -> bytes | None:
    program = browser()
    found = re.search(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)
    if program is None or found is None:
        return None
    width, height = (round(float(size)) for size in found.groups())
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    style = f"@page{{size:{width}px {height}px;margin:0}}html,body{{margin:0}}svg{{display:block}}"
    page = (
        '<!doctype html><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>{svg}'
    )
    with tempfile.TemporaryDirectory(prefix="lazyviz-") as folder:
        source, target = Path(folder, "picture.html"), Path(folder, f"picture.{kind}")
        source.write_text(page, encoding="utf-8")
        options = ["--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}/profile"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--no-sandbox")  # the sandbox does not work for root
        if kind == "pdf":
            options += [f"--print-to-pdf={target}", "--no-pdf-header-footer"]
        else:
            options += [f"--screenshot={target}", f"--window-size={width},{height}"]
            options += [f"--force-device-scale-factor={SCALE}", "--hide-scrollbars"]
        try:
            subprocess.run(
                [program, *options, source.as_uri()], capture_output=True, timeout=SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return target.read_bytes() if target.exists() else None


def browser() -> str | None:
    """An installed browser with a headless mode."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    if sys.platform == "darwin":
        return next((path for path in MAC_BROWSERS if Path(path).exists()), None)
    return None
