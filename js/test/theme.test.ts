import { afterEach, describe, expect, it } from "vitest";
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
  body.replaceChildren();
  for (const element of [body, page]) for (const name of element.getAttributeNames()) element.removeAttribute(name);
});

describe("the host's theme", () => {
  it("is JupyterLab's word before any other", () => {
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

  it("is the page's background where nothing is said", () => {
    expect(looked()).toEqual(["", false]);
    leave();
    body.style.backgroundColor = "rgb(20, 20, 20)";
    expect(looked()).toEqual(["", true]);
  });
});
