"""First pictures of cells that make their model, too, and of titles and words that are close together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

from .support import pictures
from .support.bare_page import Stage
from .support.models import training

pytestmark = pytest.mark.browser


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU())
        self.mu, self.logvar = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid())

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


def step():
    """All of it in one cell: the model, the optimizer, the data."""
    torch.manual_seed(0)
    with lazyviz.lazy("cpu:1GiB") as graph:
        vae = Autoencoder()
        optimizer = torch.optim.Adam(vae.parameters())
        x = torch.rand(128, 784)
        again, mu, logvar = vae(x)
        loss = F.binary_cross_entropy(again, x, reduction="sum") - 0.5 * (1 + logvar - mu**2).sum()
        loss.backward()
        optimizer.step()
    return graph, (vae, optimizer, x, again, mu, logvar, loss)


def loop():
    """Steps that each read their loss, with a model that is made before the first."""
    with lazyviz.lazy("cpu:1GiB") as graph:
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            loss = F.mse_loss(net(torch.randn(64, 32)), torch.randn(64, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    return graph, (net, optimizer, loss)


@pytest.fixture
def drawn(browser):
    """``drawn(program, width)``: a page with the widget of what the program records."""
    made = []

    def draw(program, width, **options):
        graph, keep = program()
        page = browser.new_page(viewport={"width": width + 16, "height": 1000}, reduced_motion="reduce")
        made.append((page, Stage(page, graph, width=width, **options), keep))
        return page, made[-1][1]

    yield draw
    for page, stage, _ in made:
        stage.widget.close()
        page.close()


def box_of(page, name, phase):
    return page.locator(f'[data-name="{name}"][data-phase="{phase}"]').first.bounding_box()


@pytest.mark.parametrize("width", [1320, 900, 720])
def test_the_lanes_beside_forward_and_backward_are_rails_and_layers_stand_side_by_side(drawn, width):
    page, _ = drawn(step, width)
    for phase in ("other", "optimizer"):
        assert page.locator(f'[data-lane="{phase}"]').bounding_box()["width"] < 80
    graph = page.locator(".lz-graph").bounding_box()
    for phase in ("forward", "backward"):
        lane = page.locator(f'[data-lane="{phase}"]').bounding_box()
        assert graph["x"] <= lane["x"] and lane["x"] + lane["width"] <= graph["x"] + graph["width"] + 1
    for name in ("vae.encoder", "vae.decoder"):
        one, other = box_of(page, name, "forward"), box_of(page, name, "backward")
        middles = [each["y"] + each["height"] / 2 for each in (one, other)]
        assert abs(middles[0] - middles[1]) < 2, name
    labels = page.locator(".lz-op .lz-label").all_text_contents()
    assert "x = rand" in labels and "uniform_" not in labels


@pytest.mark.parametrize("width", [1320, 720])
def test_the_lanes_of_a_step_fill_its_frame_and_the_view(drawn, width):
    page, _ = drawn(loop, width)
    frame = page.locator(".lz-open > .lz-frame").nth(1).bounding_box()  # of the step, in the loop's
    lanes = [each.bounding_box() for each in page.locator("[data-lane]").all()]
    left, right = min(lane["x"] for lane in lanes), max(lane["x"] + lane["width"] for lane in lanes)
    assert abs(left - frame["x"]) < 20 and abs(frame["x"] + frame["width"] - right) < 20
    graph = page.locator(".lz-graph").bounding_box()
    assert frame["x"] >= graph["x"] and frame["x"] + frame["width"] <= graph["x"] + graph["width"] + 1


@pytest.mark.parametrize("width", [720, 640])
def test_the_toolbar_is_one_row_where_there_is_little_room(drawn, width):
    for program in (step, lambda: pictures.recorded("shapes"), lambda: training(2)):
        page, _ = drawn(program, width)
        bar = page.locator('[data-part="toolbar"]').bounding_box()
        assert bar["height"] <= 44
        for control in page.locator(".lz-toolbar button:not([hidden])").all():
            if not control.is_visible():
                continue
            place = control.bounding_box()
            assert bar["x"] <= place["x"] and place["x"] + place["width"] <= bar["x"] + bar["width"]


def test_the_small_map_does_not_lie_over_the_first_picture(drawn):
    page, stage = drawn(step, 900)
    page.locator(".lz-verdict").hover()  # which brings the deferred part
    stage.settle()
    minimap = page.locator(".lz-minimap")
    assert minimap.count() == 1 and not minimap.is_visible()
    page.get_by_label("Zoom in").click()
    assert minimap.is_visible()


def test_the_line_that_holds_most_is_in_sight(drawn):
    page, _ = drawn(step, 1320)
    shares = page.evaluate("""() => {
      const body = document.querySelector(".lz-code-body").getBoundingClientRect();
      return [...document.querySelectorAll(".lz-code tr[data-line]:not(.lz-none)")].map((row) => {
        const { top, bottom } = row.getBoundingClientRect();
        const share = parseFloat(row.cells[3].textContent.replace("<", "")) || 0;
        return [share, top >= body.top && bottom <= body.bottom];
      });
    }""")
    assert max(shares)[1], "the line with the largest share"


def test_titles_of_open_groups_stand_over_lines_and_the_peak_s_flag_over_no_words(drawn):
    page, _ = drawn(step, 1320)
    order = page.evaluate("""() => {
      const [line, title] = [".lz-edge-line", ".lz-frame-title"].map((each) => document.querySelector(each));
      return Boolean(line.compareDocumentPosition(title) & Node.DOCUMENT_POSITION_FOLLOWING);
    }""")
    assert order, "drawn after the lines"
    graph, keep = pictures.recorded("unet")
    page, _ = drawn(lambda: (graph, keep), 1320)
    hit = page.evaluate("""() => {
      const flag = document.querySelector(".lz-peak-flag .lz-flag").getBoundingClientRect();
      return [...document.querySelectorAll(".lz-edge-label")].some((each) => {
        const words = each.getBoundingClientRect();
        const beside = words.left >= flag.right || words.right <= flag.left;
        return !beside && words.top < flag.bottom && words.bottom > flag.top;
      });
    }""")
    assert not hit


def test_an_error_says_where_its_sizes_are_from_and_cuts_no_number(drawn):
    page, stage = drawn(lambda: pictures.recorded("shapes"), 1320)
    page.locator(".lz-verdict").hover()
    stage.settle()
    told = page.locator(".lz-error li").all_text_contents()
    assert len(told) == 3 and told[-1].endswith("would take it with in_features=16 instead of 8")
    assert (
        page.locator(".lz-error pre").first.evaluate("(pre) => getComputedStyle(pre).wordBreak") == "normal"
    )
