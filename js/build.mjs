// Bundles the widget into lazyviz/static: an ES module, its deferred part, which the page asks Python for, and one style
// sheet; nothing is loaded from anywhere.
import { mkdir, readFile, stat } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const LIMIT = 100_000; // bytes of the first part, which every widget instance carries

const out = fileURLToPath(new URL("../lazyviz/static/", import.meta.url));
const source = fileURLToPath(new URL("src/", import.meta.url));
await mkdir(out, { recursive: true });
const options = {
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  // Methods of our own classes, which neither the page nor Python calls.
  mangleProps: /^(show|tell|leave|count|zoom|light|forget|collapse|write|enclosing|make|title)[A-Z]|^(colorBy|element|camera|slider|refresh|touched|counted|offer|choose|repaint|readout|annotate|relate|visible|frames|center|wanted|refuse|forget|rects|tops|bottoms|holding|measure|follow|picture|inner|against|legend|rail|plot|reading|describe|panBy|centerOn|closable|enclosing|labelAt|parentOf|isOpen|openAll|atFullSize|barrier|resizeTo|scaleFor|homeScale|reveal|members|selected|answered|changed|middle|grow|awaits|placed|learn|barNow)$/,
  outdir: out,
  logLevel: "warning",
};
const { mangleCache } = await esbuild.build({ ...options, mangleCache: {}, entryPoints: { widget: `${source}anywidget-entry.ts` } });
// What both parts call has the same short name in both.
await esbuild.build({ ...options, mangleCache, entryPoints: { deferred: `${source}deferred-bundle-entry.ts` } });
// The same with an offline model, for the page that graph.save("x.html") writes.
await esbuild.build({ ...options, entryPoints: { page: `${source}saved-page/page.ts` }, format: "iife" });
await esbuild.build({
  entryPoints: { widget: `${source}widget.css` },
  bundle: true,
  minify: true,
  charset: "utf8",
  outdir: out,
  logLevel: "warning",
});
const { size } = await stat(`${out}widget.js`);
const text = await readFile(`${out}widget.js`, "utf8");
if (size >= LIMIT) throw new Error(`widget.js has ${size} bytes, more than ${LIMIT}`);
const imports = text.match(/\bimport\b\s*[("'{*\w]/g) ?? [];
if (imports.length !== 1 || !text.includes("createObjectURL")) throw new Error("widget.js must import its deferred part and nothing else");
const deferred = await readFile(`${out}deferred.js`, "utf8");
if (/\bimport\b\s*[("'{*\w]/.test(deferred)) throw new Error("deferred.js must not import anything");
console.log(`widget.js: ${size} bytes, deferred.js: ${(await stat(`${out}deferred.js`)).size} bytes`);
