// Detects the notebook host and whether its theme is dark; sets `data-host` and the class `lz-dark`.
//
// JupyterLab and Notebook 7 mark the body with `data-jp-theme-light`; VS Code's webviews have a class on it
// (code.visualstudio.com/api/extension-guides/webview, "Theming webview content"); Colab sets `theme` on <html>
// (googlecolab/colabtools#1214).  VS Code and Colab load ipywidgets' style sheet, whose --jp-* variables are
// light whatever the theme is (microsoft/vscode-jupyter#7161), so they are used only in Jupyter. Elsewhere, the
// background of the page decides.

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
  const placed = new ResizeObserver(look); // a host may render the widget before attaching it to the page
  placed.observe(root);
  return () => {
    observer.disconnect();
    placed.disconnect();
    preference.removeEventListener("change", look);
  };
}

/** Decides by the nearest visible background. A page without one is white, unless it follows the user's preference. */
function darkPage(root: HTMLElement, preferred: boolean): boolean {
  for (let node: Node | null = root.parentNode; node; node = node instanceof ShadowRoot ? node.host : node.parentNode) {
    const light = node instanceof Element ? lightness(getComputedStyle(node).backgroundColor) : null;
    if (light !== null) return light < 0.5;
  }
  return preferred && getComputedStyle(document.documentElement).colorScheme.includes("dark");
}

/** The lightness, from 0 to 1; null for a nearly transparent color. Computed styles are `rgb(24 28 26)`, `color(srgb 0.1 0.11 0.1)`, `oklch(0.2 0 0)`, `lab(9 0 0)`. */
function lightness(color: string): number | null {
  const [first = 0, green = 0, blue = 0, alpha = 1] = (color.match(/\b[\d.]+(e-\d+)?/g) ?? [0, 0, 0, 0]).map(Number);
  if (alpha <= 0.5) return null;
  if (/^(ok)?l/.test(color)) return color.startsWith("o") ? first : first / 100;
  return (0.3 * first + 0.6 * green + 0.1 * blue) / (color.startsWith("c") ? 1 : 255);
}
