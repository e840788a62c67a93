"""The widget in each notebook front end, with the attributes that its page has there.

VS Code and Colab cannot be run here: their classes, attributes and variables are put on a bare page.
docs/notebook_front_ends.md says what was tried where.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

from .support.bare_page import Host, Stage, jupyter

pytestmark = pytest.mark.browser

# @jupyter-widgets/controls brings these for hosts without JupyterLab's themes: light, whatever the theme is.
WIDGETS = ":root{--jp-layout-color0:#fff;--jp-layout-color1:#fff;--jp-layout-color2:#eee;"
WIDGETS += (
    "--jp-border-color1:#bdbdbd;--jp-border-color2:#e0e0e0;"
    "--jp-ui-font-color1:rgba(0,0,0,.87);--jp-ui-font-color2:rgba(0,0,0,.54)}"
)
VSCODE = (
    "html{--vscode-editor-background:%s;--vscode-editor-foreground:%s;--vscode-editorWidget-background:%s;"
    "--vscode-editorWidget-border:%s;--vscode-descriptionForeground:%s;--vscode-focusBorder:%s;"
    "--vscode-textLink-foreground:%s}" + WIDGETS
)
DARK_PLUS = VSCODE % ("#1f1f1f", "#cccccc", "#202020", "#313131", "#9d9d9d", "#0078d4", "#4daafc")
LIGHT_PLUS = VSCODE % ("#ffffff", "#3b3b3b", "#f8f8f8", "#c8c8c8", "#3b3b3b", "#005fb8", "#005fb8")
# Colab's own style sheet for widgets overrides two of ipywidgets' variables and no others.
COLAB = WIDGETS + (
    "html[theme=dark]{--jp-ui-font-color1:#e3e3e3;--jp-layout-color2:#383838}body{background:%s}"
)
HOSTS = {
    "jupyter": (jupyter(), False),
    "jupyter-dark": (jupyter(dark=True), True),
    "vscode": (
        Host(body='class="vscode-light" data-vscode-theme-kind="vscode-light"', style=LIGHT_PLUS),
        False,
    ),
    "vscode-dark": (
        Host(body='class="vscode-dark" data-vscode-theme-kind="vscode-dark"', style=DARK_PLUS),
        True,
    ),
    "vscode-high-contrast": (
        Host(body='class="vscode-high-contrast"', style="html{--vscode-contrastBorder:#6fc3df}" + DARK_PLUS),
        True,
    ),
    "vscode-high-contrast-light": (
        Host(body='class="vscode-high-contrast vscode-high-contrast-light"', style=LIGHT_PLUS),
        False,
    ),
    "colab": (Host(style=COLAB % "#fff"), False),
    "colab-marked": (Host(page='theme="light"', style=COLAB % "#fff"), False),
    "colab-dark": (Host(page='theme="dark"', style=COLAB % "#1e1e1e"), True),
    "unknown": (Host(), False),
    "unknown-dark": (Host(style="body{background:#202020}"), True),
}
# The contrast (WCAG 2) of texts with what is painted behind them.
CONTRAST = """
() => {
  const rgb = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith("color(srgb") ? 255 : 1;
    return [r * unit, g * unit, b * unit, a];
  };
  const over = (top, below) => top.slice(0, 3).map((v, n) => v * top[3] + below[n] * (1 - top[3]));
  const light = (color) => {
    const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const seen = [];
    for (; element; element = element.parentElement) {
      const color = rgb(getComputedStyle(element).backgroundColor);
      seen.push(color);
      if (color[3] === 1) break;
    }
    return seen.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.querySelector(".lazyviz"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (element.closest("svg, :disabled, option")) continue;
    const below = behind(element);
    const a = light(over(rgb(getComputedStyle(element).color), below)), b = light(below);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return found;
}
"""


def small_step():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    with lazyviz.lazy(batch=[x]) as graph:
        loss = net(x).sum()
        loss.backward()
    return graph, (net, x, loss)


@pytest.mark.parametrize("name", HOSTS)
def test_in_each_host_the_widget_is_dark_where_the_host_is_and_can_be_read(page, screenshots, name):
    host, dark = HOSTS[name]
    graph, _keep = small_step()
    with Stage(page, graph, host=host, width=900) as stage:
        root = page.locator(".lazyviz")
        assert ("lz-dark" in root.get_attribute("class")) is dark
        assert root.get_attribute("data-host") == name.partition("-")[0].replace("unknown", "").replace(
            "colab", "" if name == "colab" else "colab"
        )
        stage.click('[data-node][data-kind="op"]')
        page.screenshot(path=screenshots / f"host-{name}.png", full_page=True)
        assert page.evaluate(CONTRAST) == []


def test_a_host_that_changes_its_theme_is_followed(page):
    graph, _keep = small_step()
    host, _ = HOSTS["vscode-dark"]
    with Stage(page, graph, host=host, width=900) as stage:
        assert page.locator(".lazyviz.lz-dark").count() == 1
        page.evaluate("document.body.className = 'vscode-light'")
        stage.settle()
        assert page.locator(".lazyviz.lz-dark").count() == 0
    with Stage(page, graph, host=jupyter(), width=900) as stage:
        page.evaluate("document.body.dataset.jpThemeLight = 'false'")
        stage.settle()
        assert page.locator(".lazyviz.lz-dark").count() == 1


def test_a_widget_that_is_put_into_the_page_late_gets_the_pages_theme(page):
    graph, _keep = small_step()
    with Stage(page, graph, host=Host(style="main{background:#202020}"), width=900) as stage:
        root = page.locator(".lazyviz")
        page.evaluate("document.body.append(document.querySelector('.stage'))")  # out of the dark part
        page.evaluate("document.querySelector('.stage').style.width = '800px'")
        stage.settle()
        assert "lz-dark" not in root.get_attribute("class")


def test_a_page_that_follows_the_readers_preference_is_followed_too(browser):
    graph, _keep = small_step()
    page = browser.new_page(color_scheme="dark")
    with Stage(page, graph, host=Host(style=":root{color-scheme:light dark}"), width=900):
        assert page.locator(".lazyviz.lz-dark").count() == 1
    with Stage(page, graph, host=Host(), width=900):  # says nothing: it is white
        assert page.locator(".lazyviz.lz-dark").count() == 0
    page.close()


IN_A_SHADOW_TREE = """
(css) => {
  const host = document.querySelector("main").appendChild(document.createElement("div"));
  const tree = host.attachShadow({ mode: "open" });
  const style = tree.appendChild(document.createElement("style"));
  style.textContent = css;
  const el = tree.appendChild(document.createElement("div"));
  el.style.width = "1000px";
  window.stage.draw(el);
}
"""


def test_in_a_shadow_tree_as_in_marimo_theme_popovers_hits_and_focus_work(page):
    graph, _keep = small_step()
    # Tailwind's colors, with a host that marks the theme in no way of another host's.
    host = Host(style="body{background:color(srgb 0.0941176 0.109804 0.101961)}")
    with Stage(page, graph, host=host, views=0) as stage:
        page.evaluate(IN_A_SHADOW_TREE, stage.widget._css)
        stage.settle()
        root = page.locator(".lazyviz")  # Playwright's selectors see into shadow trees
        assert "lz-dark" in root.get_attribute("class")
        root.get_by_role("button", name="Settings").click()
        root.locator(".lz-pop-settings .lz-row-title").first.click()
        assert root.get_by_label("Color by").is_visible()  # a click inside leaves the popover open
        page.mouse.click(5, 5)
        assert not root.get_by_label("Color by").is_visible()
        root.locator('input[data-action="search"]').press_sequentially("relu")
        stage.settle()
        assert root.locator(".lz-search li").first.is_visible()
        page.keyboard.press("Escape")
        root.locator('button[data-action="table"]').click()
        stage.settle()
        sort = root.locator('thead button[data-sort="bytes"]')
        sort.click()
        stage.settle()
        assert sort.evaluate("(button) => button.matches(':focus')")  # the table's head is drawn again
        page.keyboard.press("?")
        root.get_by_role("button", name="Close the list of keys").click()
        assert sort.evaluate("(button) => button.matches(':focus')")


def test_the_widget_asks_the_network_for_nothing(page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    graph, _keep = small_step()
    with Stage(page, graph, width=900) as stage:
        stage.click('button[data-action="expand-all"]')
        page.locator('[data-node][data-kind="op"]').first.focus()
        page.keyboard.press("Enter")
        page.locator('input[data-action="search"]').fill("addmm")
        stage.settle()
        stage.click('button[data-action="evaluate"]')
    assert [url for url in asked if not url.startswith(("blob:", "data:"))] == []


def test_expand_all_opens_everything_once_its_last_message_has_come(page, monkeypatch):
    monkeypatch.setattr("lazyviz.view.widget.page_messages.MESSAGE_BYTES", 400)
    graph, _keep = small_step()
    with Stage(page, graph, width=900) as stage:
        stage.click('button[data-action="expand-all"]')
        assert sum(message["kind"] == "groups" for message in stage.messages) > 1
        drawn = {box.get_attribute("data-node") for box in page.locator(".lazyviz [data-node]").all()}
        boxes = graph.scene().hierarchy.boxes.values()
        assert drawn >= {box.id for box in boxes if box.kind not in ("root", "lane")}
