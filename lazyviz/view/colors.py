"""Colors of static pictures: layer kinds as in layers.css, and colors of dark pages."""

from __future__ import annotations

import re

LAYER_TINTS = {
    "embedding": "#e2f3f8",
    "linear": "#e9edfb",
    "norm": "#eceff3",
    "dropout": "#eceff3",
    "attention": "#f9e9f4",
    "activation": "#fbf1dd",
    "loss": "#fbebe3",
    "block": "#e8ebf0",
    "optimizer": "#f0eaf8",
}
LAYER_INKS = {
    "embedding": "#0b6f8a",
    "linear": "#3451b0",
    "norm": "#566274",
    "dropout": "#566274",
    "attention": "#9a2f78",
    "activation": "#8a5200",
    "loss": "#9c3f14",
    "block": "#3d4858",
    "optimizer": "#7048a8",
}
# Paths in a square of 16 by 16, as in js/src/page/icons.ts.
LAYER_ICONS = {
    "embedding": "M3,3h10M3,8h10M3,13h10M3,3v10M7,8v5",
    "linear": "M3,4l10,8M3,12l10,-8M3,4h10M3,12h10",
    "norm": "M2,12c4,0 3,-8 6,-8s2,8 6,8",
    "dropout": "M4,4l8,8M12,4l-8,8",
    "attention": "M8,2v12M2,8h12M4,8a4,4 0 1 0 8,0a4,4 0 1 0 -8,0",
    "activation": "M2,12h3c3,0 3,-8 6,-8h3",
    "loss": "M2,3c1,7 5,10 12,10",
    "block": "M8,2l6,3l-6,3l-6,-3ZM2,8l6,3l6,-3M2,11l6,3l6,-3",
    "optimizer": "M13,8a5,5 0 1 1 -2,-4M11,1.5v3h-3",
}
# Every color of a light picture, and its replacement on a dark page.
DARK = {
    # Page, lines, and text.
    "#ffffff": "#1b2027",
    "#f6f8fa": "#23292f",
    "#e3e8ee": "#363e48",
    "#cfd6de": "#3f4854",
    "#cfd6df": "#3f4854",
    "#b9c3cd": "#4d5764",
    "#98a4b1": "#8591a0",
    "#5c6874": "#a9b3bd",
    "#1d2733": "#eceff2",
    "#e8f0fc": "#1c2d4a",
    "#1b5fcc": "#79aefc",
    "#fdecea": "#3a1917",
    "#b42318": "#ff8f85",
    "#9b2c22": "#ff8f85",
    # Categories and roles.
    "#2f63e0": "#3f74f0",
    "#d62957": "#c73d78",
    "#4d2187": "#b08be0",
    "#14a07a": "#2cc48f",
    "#b46cc0": "#b43c9c",
    "#184c62": "#bde6f2",
    "#605400": "#9c6000",
    "#d67c05": "#efac32",
    "#787890": "#90a8c0",
    # Phases and verdicts.
    "#2466ab": "#82b4f0",
    "#a84f12": "#f0a36c",
    "#7048a8": "#c0a2ee",
    "#5f6b7a": "#9aa7b5",
    "#1a7f4b": "#4cc38a",
    "#c0352b": "#ff7b72",
    "#0b6b45": "#4cc38a",
    # Numbers.
    "#1769c2": "#58a6ff",
    "#c2571a": "#f0935a",
    "#1976d2": "#58a6ff",
    # Kinds of layers.
    "#e2f3f8": "#15323c",
    "#e9edfb": "#222b4d",
    "#eceff3": "#272e38",
    "#f9e9f4": "#3d2036",
    "#fbf1dd": "#3a2c12",
    "#fbebe3": "#3d2419",
    "#e8ebf0": "#2a323d",
    "#f0eaf8": "#2f2545",
    "#0b6f8a": "#67c6df",
    "#3451b0": "#95aaf7",
    "#566274": "#a5afbe",
    "#9a2f78": "#e88cc7",
    "#8a5200": "#e9b862",
    "#9c3f14": "#f0a07a",
    "#3d4858": "#b9c3d1",
}
_PAINT = re.compile(r' (fill|stroke)="(#[0-9a-f]{6})"')


def darkened(svg: str) -> str:
    """A light picture in the colors of a dark page.

    Only attributes match :data:`_PAINT`, because quotation marks in text are escaped.
    """
    return _PAINT.sub(lambda found: f' {found[1]}="{DARK[found[2]]}"', svg)


def adapted(svg: str) -> str:
    """A light picture that switches to dark colors where its page prefers a dark color scheme."""
    used = sorted({found.groups() for found in _PAINT.finditer(svg)})
    rules = "".join(f'[{kind}="{color}"]{{{kind}:{DARK[color]}}}' for kind, color in used)
    end = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:end]}<style>@media (prefers-color-scheme:dark){{{rules}}}</style>{svg[end:]}"
