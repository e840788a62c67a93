import js from "@eslint/js";
import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["node_modules/"] },
  js.configs.recommended,
  ...tseslint.configs.strict,
  {
    files: ["src/**/*.ts"],
    rules: {
      "max-lines-per-function": ["error", { max: 60, skipBlankLines: true, skipComments: true }],
      // Everything from Python is data: it reaches the page as text only.
      "no-restricted-properties": [
        "error",
        { property: "innerHTML", message: "use textContent: labels are data" },
        { property: "outerHTML", message: "use textContent: labels are data" },
        { property: "insertAdjacentHTML", message: "use textContent: labels are data" },
      ],
      "no-restricted-globals": ["error", "fetch", "XMLHttpRequest", "WebSocket", "eval"],
    },
  },
  { files: ["*.mjs"], languageOptions: { globals: { process: "readonly", console: "readonly", URL: "readonly" } } },
);
