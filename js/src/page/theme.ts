// Which host the widget stands in, and whether it is dark there: `data-host` and the class `lz-dark`.
//
// JupyterLab and Notebook 7 mark the body with `data-jp-theme-light`; VS Code's webviews have a class on it
// (code.visualstudio.com/api/extension-guides/webview, "Theming webview content"); Colab sets `theme` on <html>
// (googlecolab/colabtools#1214).  VS Code and Colab load ipywidgets' style sheet, whose --jp-* variables are
// light whatever the theme is (microsoft/vscode-jupyter#7161), so those count in Jupyter alone.  Elsewhere
// the page's own background tells.

/** Follows the host's theme until the returned function is called. */
export function followTheme(root: HTMLElement): () => void {
  const { body, documentElement: page } = document;
  const preference = matchMedia("(prefers-color-scheme: dark)");
  const look = (): void => {
    const jupyter = document.querySelector<HTMLElement>("[data-jp-theme-light]")?.dataset["jpThemeLight"];
    const code = /\bvscode-(dark|light|high-contrast(-light)?)\b/.exec(body.className);
    const colab = page.getAttribute("theme");
    const [host, dark] =
      jupyter !== undefined
        ? ["jupyter", jupyter === "false"]
        : code
          ? ["vscode", !code[1]?.endsWith("light") && !body.classList.contains("vscode-high-contrast-light")]
          : colab !== null
            ? ["colab", colab === "dark"]
            : ["", darkPage(root, preference.matches)];
    root.dataset["host"] = host;
    root.classList.toggle("lz-dark", dark);
  };
  look();
  const observer = new MutationObserver(look);
  for (const element of [page, body]) observer.observe(element, { attributes: true });
  preference.addEventListener("change", look);
  const placed = new ResizeObserver(look); // a host may render the widget before it is in the page
  placed.observe(root);
  return () => {
    observer.disconnect();
    placed.disconnect();
    preference.removeEventListener("change", look);
  };
}

/** By the nearest background that can be seen; a page without one is white, unless it follows the preference. */
function darkPage(root: HTMLElement, preferred: boolean): boolean {
  for (let element = root.parentElement; element; element = element.parentElement) {
    const [red = 0, green = 0, blue = 0, alpha = 1] = (getComputedStyle(element).backgroundColor.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
    if (alpha > 0.5) return 0.3 * red + 0.6 * green + 0.1 * blue < 128;
  }
  return preferred && getComputedStyle(document.documentElement).colorScheme.includes("dark");
}
