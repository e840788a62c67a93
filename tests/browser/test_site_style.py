"""The documentation site's own style, in light and in dark colors."""

from __future__ import annotations

from pathlib import Path

import pytest

STYLE = Path(__file__).parents[2] / "docs" / "_static" / "site.css"
CODE = '<div class="cell_input"><div class="highlight"><pre><span class="nn">torch</span></pre></div></div>'
# What Furo and MyST-NB bring: code whose names look like links, and a border that is bright on dark pages.
THEIRS = """
body { --color-background-border: rgb(48, 51, 53); }
body[data-theme] .highlight .nn { text-decoration: underline; }
:root { --mystnb-source-border-color: rgb(175, 175, 175); }
.cell_input { border: 1px var(--mystnb-source-border-color) solid; }
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_names_in_code_do_not_look_like_links_and_cells_have_the_borders_of_the_page(page, theme):
    page.set_content(f'<body data-theme="{theme}">{CODE}</body>')
    page.add_style_tag(content=THEIRS)
    page.add_style_tag(path=str(STYLE))
    found = page.evaluate(
        "[getComputedStyle(document.querySelector('.nn')).textDecorationLine, "
        "getComputedStyle(document.querySelector('.cell_input')).borderRightColor]"
    )
    assert found == ["none", "rgb(48, 51, 53)"]
