"""The widget looks as in the reviewed pictures (``tests/browser/golden``)."""

from __future__ import annotations

import pytest
from PIL import Image

from .support import goldens, pictures

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def known():
    return goldens.known()


@pytest.mark.parametrize("graph", pictures.PICTURES)
def test_the_widget_looks_as_in_its_golden_pictures(graph, browser, known, screenshots, capsys):
    # All of one graph in one test: what is pending is forgotten between two tests.
    wrong = []
    for name in (name for name in goldens.NAMES if goldens.parts(name)[0] == graph):
        fresh, boxes, fonts = goldens.take(browser, name)
        expected = known[f"{graph}-{goldens.parts(name)[1]}"]
        assert [box[:3] for box in boxes] == [box[:3] for box in expected], name
        for box, before in zip(boxes, expected, strict=True):
            apart = max(abs(now - then) for now, then in zip(box[3:], before[3:], strict=True))
            # Other fonts make other lines of text above the graph, not another graph.
            assert apart <= (2 if fonts == known["fonts"] else 60), (name, box, before)
        if fonts != known["fonts"]:
            with capsys.disabled():
                print(f"\n{name}: other fonts than the golden's, so boxes were compared, not pixels")
            continue
        share = goldens.difference(Image.open(goldens.FOLDER / f"{name}.png"), fresh)
        if share > goldens.TOLERANCE:
            fresh.save(screenshots / f"{name}.png")
            wrong.append(f"{name}: {share:.2%} of the pixels")
    assert not wrong, (
        f"these differ from tests/browser/golden, see {screenshots}: {wrong}; if they are as they should be, "
        "run scripts/update_golden_pictures.py, look at the pictures and commit them"
    )


def test_another_picture_is_not_within_the_tolerance():
    fresh = Image.open(goldens.FOLDER / "gpt2-700-light.png").convert("RGB")
    moved = Image.new("RGB", fresh.size, fresh.getpixel((2, 2)))
    moved.paste(fresh, (3, 0))
    assert goldens.difference(fresh, fresh) == 0
    assert goldens.difference(fresh, moved) > goldens.TOLERANCE
    assert goldens.difference(fresh, fresh.resize((fresh.width, fresh.height + 1))) == 1


def test_the_golden_pictures_are_there_and_small():
    sizes = [(goldens.FOLDER / f"{name}.png").stat().st_size for name in goldens.NAMES]
    assert len(sizes) == 29
    assert sum(sizes) < 4_000_000
    assert {path.stem for path in goldens.FOLDER.glob("*.png")} == set(goldens.NAMES)
