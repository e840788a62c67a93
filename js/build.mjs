// Bundles the widget into lazyviz/static: one ES module and one style sheet, nothing loaded at run time.
import { mkdir, readFile, stat } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const LIMIT = 100_000; // bytes; every widget instance carries the bundle

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
  mangleProps: /^(show|tell|leave|count|zoom|colour|light|forget|collapse|write|enclosing|make|title)[A-Z]|^(panBy|closable|enclosing|labelAt|parentOf|isOpen|openAll|atFullSize|barrier|resizeTo|scaleFor|homeScale)$/,
  outdir: out,
  logLevel: "warning",
};
await esbuild.build({ ...options, entryPoints: { widget: `${source}widget.ts` } });
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
if (/^\s*import\b|\bimport\(/m.test(text)) throw new Error("widget.js must not import anything at run time");
console.log(`widget.js: ${size} bytes`);
