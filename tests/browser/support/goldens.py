"""Golden pictures: how they are taken and compared.

``scripts/update_golden_pictures.py`` makes them anew, and a person looks at each before it is committed.
Pixels are compared where text is drawn with the fonts that the goldens were made with; with other fonts every
letter differs, and what is compared is which boxes there are, and where.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from . import pictures
from .bare_page import Stage

FOLDER = Path(__file__).parents[1] / "golden"
STRUCTURE = FOLDER / "structure.json"
# Each graph light and wide, dark and narrow; one graph and the failed run in other ways, too.
TAKEN = ("1500-light", "900-dark")
MORE = ("gpt2-1500-dark", "gpt2-900-light", "gpt2-700-light", "failed-1500-dark", "failed-900-light")
NAMES = (*(f"{name}-{way}" for name in pictures.PICTURES if name != "failed" for way in TAKEN), *MORE)
COLORS = 160  # of the palette that a picture is kept with
DIFFERENT = 48  # of 255, in one channel: less is how an edge was smoothed
TOLERANCE = 0.002  # share of the pixels that may differ

# Times differ from run to run: all are drawn as 0 s; folders from machine to machine.  Nothing has the focus.
FREEZE = """() => {
  document.activeElement?.blur();
  const texts = document.createTreeWalker(document.querySelector(".lazyviz"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    const text = node.data
      .replace(/(\\/[\\w.-]+)+\\/(?=[\\w-]+\\.py)/g, "")
      .replace(/\\b\\d[\\d.,]*(e[-+]?\\d+)?\\s?(ns|µs|us|ms|s|min)\\b/g, "0 s");
    if (text !== node.data) node.data = text;
  }
}"""
BOXES = """() => {
  const root = document.querySelector(".lazyviz");
  const origin = root.getBoundingClientRect();
  const place = (e) => {
    const r = e.getBoundingClientRect();
    return [r.left - origin.left, r.top - origin.top, r.width, r.height].map(Math.round);
  };
  return [...root.querySelectorAll("[data-node]")].map((e) => [
    e.getAttribute("data-node"), e.getAttribute("data-kind"), e.getAttribute("data-op"),
    ...place(e.querySelector("rect") ?? e),
  ]);
}"""
FONTS = """() => {
  const context = document.createElement("canvas").getContext("2d");
  const style = getComputedStyle(document.querySelector(".lazyviz"));
  const families = [style.fontFamily, "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"];
  return families.flatMap((family) => ["400", "650"].map((weight) => {
    context.font = `${weight} 40px ${family}`;
    return Math.round(context.measureText("Handgloves 0123456789 × · → MiB").width);
  }));
}"""


def parts(name: str) -> tuple[str, int, bool]:
    """``"mlp-700-dark"`` -> the graph's name, the width in pixels, whether it is dark."""
    graph, width, theme = name.rsplit("-", 2)
    return graph, int(width), theme == "dark"


def take(browser: Any, name: str) -> tuple[Image.Image, list[Any], list[int]]:
    """The picture, the boxes in it (id, kind, op, x, y, width, height), and what tells the fonts."""
    graph, width, dark = parts(name)
    page = browser.new_page(viewport={"width": width + 16, "height": 1000}, reduced_motion="reduce")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        recorded, _ = pictures.recorded(graph)
        with pictures.same_speed(), Stage(page, recorded, width=width, dark=dark) as stage:
            if graph == "failed":
                stage.click('button[data-action="evaluate"]')
            page.mouse.move(0, 0)
            page.evaluate(FREEZE)
            boxes, fonts = page.evaluate(BOXES), page.evaluate(FONTS)
            shot = page.locator(".lazyviz").screenshot(animations="disabled", caret="hide")
    finally:
        page.close()
    assert not errors, errors
    return Image.open(io.BytesIO(shot)).convert("RGB"), boxes, fonts


def keep(picture: Image.Image, path: Path) -> None:
    """Write a small PNG."""
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def difference(golden: Image.Image, fresh: Image.Image) -> float:
    """The share of pixels that differ; all of them, if the sizes do."""
    if golden.size != fresh.size:
        return 1.0
    channels = ImageChops.difference(golden.convert("RGB"), fresh).split()
    most = ImageChops.lighter(ImageChops.lighter(channels[0], channels[1]), channels[2])
    return sum(most.histogram()[DIFFERENT:]) / (fresh.width * fresh.height)


def known() -> dict[str, Any]:
    """The boxes of the goldens by picture, and under ``"fonts"`` the widths of a text in their fonts."""
    return dict(json.loads(STRUCTURE.read_text(encoding="utf-8")))


def write_known(structure: dict[str, Any]) -> None:
    """One box a line, so that a diff shows what moved."""
    lines = [f' "fonts": {json.dumps(structure["fonts"])}']
    for name, boxes in sorted(structure.items()):
        if name != "fonts":
            rows = ",\n".join(f"  {json.dumps(box, ensure_ascii=False)}" for box in boxes)
            lines.append(f' "{name}": [\n{rows}\n ]')
    STRUCTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
