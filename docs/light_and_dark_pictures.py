"""Pictures in cells' outputs: each with one for dark pages beside it, of which the style sheet shows one."""

import base64
import re

from lazyviz.view.colors import darkened

PICTURE = re.compile(
    r'<img (?P<before>[^>]*)src="data:image/svg\+xml;base64,(?P<data>[A-Za-z0-9+/=]+)"(?P<after>[^>]*)>'
)
CLASS = re.compile(r'class="([^"]*)"')
ID = re.compile(r'\bid="[^"]*"\s*')


def with_dark_ones(page: str) -> str:
    """``page`` with each of lazyviz's light pictures followed by the same in dark colors."""
    return PICTURE.sub(_pair, page)


def _pair(found: re.Match[str]) -> str:
    svg = base64.b64decode(found["data"]).decode()
    try:
        dark = darkened(svg)
    except KeyError:  # a color that is not one of lazyviz's light ones
        return found[0]
    light_tag = _in_class(found[0], "lazyviz-on-light")
    data = base64.b64encode(dark.encode()).decode()
    dark_tag = _in_class(ID.sub("", found[0].replace(found["data"], data)), "lazyviz-on-dark")
    return light_tag + dark_tag


def _in_class(tag: str, name: str) -> str:
    if CLASS.search(tag):
        return CLASS.sub(lambda found: f'class="{found[1]} {name}"', tag, count=1)
    return tag.replace("<img ", f'<img class="{name}" ', 1)
