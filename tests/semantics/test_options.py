"""``lazyviz.options``: process defaults, temporary changes, and environment variables."""

from __future__ import annotations

import pytest
import torch

import lazyviz
from lazyviz.session.default_options import Options


@pytest.fixture(autouse=True)
def _as_before():
    yield
    lazyviz.options.reset()


def test_a_default_device_is_planned_for_unless_another_is_named():
    with lazyviz.options(device="RTX-3060"):
        with lazyviz.lazy() as graph:
            torch.ones(3) + 1
        with lazyviz.lazy(device="cpu") as other:
            torch.ones(3) + 1
    assert graph.plan().device == "RTX-3060"
    assert other.plan().device == "cpu"
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    assert graph.plan().device == "cpu"


def test_a_default_backend_evaluates():
    lazyviz.options.backend = "inductor"
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    assert graph.backend == "inductor"
    with lazyviz.lazy(backend="eager") as graph:
        torch.ones(3) + 1
    assert graph.backend == "eager"


def _colors(svg):
    return {each for each in svg.replace("'", '"').split('"') if each.startswith("#")}


def test_pictures_have_the_theme_and_the_number_that_are_set(tmp_path):
    with lazyviz.lazy() as graph:
        torch.ones(3) @ torch.ones(3)

    def pictures(name):
        graph.save(tmp_path / f"{name}.svg")
        return (tmp_path / f"{name}.svg").read_text(), graph.static_bundle()["text/html"]

    light, light_cell = pictures("light")
    lazyviz.options.theme = "dark"
    dark, dark_cell = pictures("dark")
    assert _colors(light) != _colors(dark) and light_cell.split("base64,")[1] != dark_cell.split("base64,")[1]
    graph.save(tmp_path / "figure.svg", theme="light")  # what is asked for comes first
    assert _colors((tmp_path / "figure.svg").read_text()) <= _colors(light)
    lazyviz.options.theme = "light"
    lazyviz.options.color = "dtype"
    by_dtype, _ = pictures("dtype")
    assert "float32" in by_dtype and "float32" not in light
    assert graph.widget().scene["by"] == "dtype"


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", "A1000"), ("backend", "none"), ("widget", "yes"), ("color", "red"), ("theme", "blue")],
)
def test_what_is_set_wrongly_is_refused_where_it_is_set(name, value):
    before = repr(lazyviz.options)
    with pytest.raises(ValueError, match=value):
        setattr(lazyviz.options, name, value)
    with pytest.raises(ValueError, match=value), lazyviz.options(**{name: value}):
        pass
    assert repr(lazyviz.options) == before


def test_an_unknown_option_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="unknown option 'colour'; available: device, backend, widget"):
        with lazyviz.options(colour="bytes"):
            pass
    with pytest.raises(AttributeError):
        lazyviz.options.colour = "bytes"


def test_contexts_nest_and_end_also_by_an_error():
    with lazyviz.options(widget=False):
        with pytest.raises(KeyError), lazyviz.options(device="H100-80GB", widget=True):
            assert (lazyviz.options.device, lazyviz.options.widget) == ("H100-80GB", True)
            raise KeyError
        assert (lazyviz.options.device, lazyviz.options.widget) == (None, False)
    assert lazyviz.options.widget is True


def test_environment_variables_apply_to_options_that_are_not_set():
    options = Options({"LAZYVIZ_DEVICE": "A100-40GB", "LAZYVIZ_WIDGET": "off", "LAZYVIZ_BACKEND": ""})
    assert (options.device, options.widget, options.backend) == ("A100-40GB", False, "eager")
    options.device = None
    assert options.device is None
    with pytest.raises(ValueError, match="LAZYVIZ_WIDGET=maybe: widget must be True or False"):
        Options({"LAZYVIZ_WIDGET": "maybe"}).widget


def test_evaluations_are_logged_if_logging_is_enabled(caplog):
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    with caplog.at_level("DEBUG", "lazyviz"):
        report = graph.evaluate()
    assert caplog.messages == [str(report)]
    assert caplog.records[0].name == "lazyviz"
