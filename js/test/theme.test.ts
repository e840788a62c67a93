import { afterEach, describe, expect, it, vi } from "vitest";
import { followTheme } from "../src/page/theme";

const { body, documentElement: page } = document;
let leave = (): void => undefined;

function looked(): [host: string | undefined, dark: boolean] {
  const root = document.createElement("div");
  body.append(root);
  leave = followTheme(root);
  return [root.dataset["host"], root.classList.contains("lz-dark")];
}

afterEach(() => {
  leave();
  vi.restoreAllMocks();
  body.replaceChildren();
  for (const element of [body, page]) for (const name of element.getAttributeNames()) element.removeAttribute(name);
});

describe("the host's theme", () => {
  it("follows JupyterLab's attribute first", () => {
    body.dataset["jpThemeLight"] = "false";
    body.className = "vscode-light";
    expect(looked()).toEqual(["jupyter", true]);
  });

  it.each([
    ["vscode-dark", true],
    ["vscode-light", false],
    ["vscode-high-contrast", true],
    ["vscode-high-contrast-light", false],
    ["vscode-high-contrast vscode-high-contrast-light", false],
  ])("is VS Code's class %s", (name, dark) => {
    body.className = `some ${name}`;
    expect(looked()).toEqual(["vscode", dark]);
  });

  it("is found by a widget that is rendered before it is in the page", () => {
    body.dataset["jpThemeLight"] = "false";
    const root = document.createElement("div");
    leave = followTheme(root);
    expect([root.dataset["host"], root.classList.contains("lz-dark")]).toEqual(["jupyter", true]);
  });

  it("is Colab's attribute", () => {
    page.setAttribute("theme", "dark");
    expect(looked()).toEqual(["colab", true]);
  });

  it("is decided by the page's background if no attribute is set", () => {
    expect(looked()).toEqual(["", false]);
    leave();
    body.style.backgroundColor = "rgb(20, 20, 20)";
    expect(looked()).toEqual(["", true]);
  });

  it.each([
    ["rgba(20, 20, 20, 0.9)", true],
    ["rgba(20, 20, 20, 0.1)", false],
    ["color(srgb 0.0941176 0.109804 0.101961)", true],
    ["color(srgb 0.98 0.98 0.97 / 0.9)", false],
    ["color(display-p3 0.1 2e-7 0.1)", true],
    ["oklch(0.2 0.01 160)", true],
    ["oklab(0.97 -0.01 0.02)", false],
    ["lab(9 -0.5 1)", true],
    ["lch(96 2 100)", false],
  ])("is a background of %s", (color, dark) => {
    vi.spyOn(window, "getComputedStyle").mockImplementation(
      (element) => ({ backgroundColor: element === body ? color : "", colorScheme: "" }) as CSSStyleDeclaration,
    );
    expect(looked()).toEqual(["", dark]);
  });

  it("is found from inside of a shadow tree", () => {
    body.style.backgroundColor = "rgb(20, 20, 20)";
    const host = document.createElement("div");
    body.append(host);
    const root = document.createElement("div");
    host.attachShadow({ mode: "open" }).append(root);
    leave = followTheme(root);
    expect(root.classList.contains("lz-dark")).toBe(true);
  });
});
