// The memory chart: projected bytes by category over the run, the peak, the capacity when it is near.

import { charWidth, html, svg } from "./dom";
import type { Memory } from "./types";

const HEIGHT = 176;
const LEFT = 74;
const RIGHT = 14;
const TOP = 12;
const BOTTOM = 30;

export class MemoryChart {
  readonly element: HTMLElement;
  private readonly svg: SVGSVGElement;
  private width = 0;
  private lifetime: [number, number][] = [];
  private readonly legend = html("ul", { class: "lz-legend", "aria-label": "Memory at the peak by category" });
  private readonly head = html("span", { class: "lz-muted" });
  private chosen: number | null = null; // index into memory.at

  constructor(
    private memory: Memory,
    private readonly events: { peak(): void; moment(position: number): void },
  ) {
    this.svg = svg("svg", { class: "lz-chart", "data-chart": "memory", role: "img", height: HEIGHT });
    this.tell();
    this.svg.addEventListener("click", (event) => {
      if (this.width === 0 || (event.target as Element).closest(".lz-peak")) return;
      const box = this.svg.getBoundingClientRect();
      const scale = this.width / (box.width || this.width);
      const share = ((event.clientX - box.left) * scale - LEFT) / (this.width - RIGHT - LEFT);
      if (share >= 0 && share <= 1) this.choose(Math.floor(share * this.memory.at.length));
    });
    this.svg.addEventListener("keydown", (event) => {
      const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
      if (!by) return;
      event.preventDefault();
      const peak = this.memory.peakAt === null ? 0 : this.memory.at.indexOf(this.memory.peakAt);
      this.choose((this.chosen ?? peak) + by);
    });
    this.element = html(
      "section",
      { class: "lz-memory", "aria-label": "Projected memory" },
      html(
        "div",
        { class: "lz-memory-head" },
        html("h3", {}, "Projected memory"),
        this.head,
      ),
      this.svg,
      this.legend,
    );
  }

  /** Another plan of the same graph. */
  show(memory: Memory): void {
    if (memory.count !== this.memory.count) this.lifetime = [];
    this.chosen = null;
    this.memory = memory;
    this.tell();
    this.draw();
  }

  private tell(): void {
    const { memory } = this;
    const at = memory.peakName ? ` at ${memory.peakName}` : "";
    this.svg.setAttribute("aria-label", `Projected memory over the run: peak ${memory.peakText}${at}`);
    this.head.textContent = `peak ${memory.peakText}${at} · plain eager PyTorch: ${memory.eagerText}`;
    this.legend.replaceChildren(
      ...memory.categories.map((category) =>
        html(
          "li",
          {},
          html("span", { class: `lz-swatch lz-cat-${category.name}`, "aria-hidden": "true" }),
          `${category.name} `,
          html("b", {}, category.peakText),
        ),
      ),
    );
  }

  resize(width: number): void {
    if (width < 10 || Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.draw();
  }

  /** Asks for what is alive at one of the chart's points, and marks it. */
  private choose(point: number): void {
    this.chosen = Math.min(Math.max(point, 0), this.memory.at.length - 1);
    const position = this.memory.at[this.chosen];
    this.draw();
    if (position !== undefined) this.events.moment(position);
  }

  /** Takes the mark of the chosen point away. */
  forget(): void {
    if (this.chosen === null) return;
    this.chosen = null;
    this.draw();
  }

  /** Marks the positions during which something is alive. */
  mark(lifetime: [number, number][]): void {
    this.lifetime = lifetime;
    this.draw();
  }

  private draw(): void {
    const { memory, width } = this;
    if (width === 0) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const right = width - RIGHT;
    const bottom = HEIGHT - BOTTOM;
    const points = memory.at.length;
    const near = memory.capacity !== null && memory.capacity < 2 * memory.peak;
    const most = Math.max(memory.peak, near ? (memory.capacity ?? 0) : 0, 1) * 1.08;
    const y = (bytes: number): number => bottom - (bytes / most) * (bottom - TOP);
    const step = (right - LEFT) / Math.max(points, 1);
    const xOfNode = (index: number): number => LEFT + ((right - LEFT) * index) / Math.max(memory.count, 1);
    const parts: SVGElement[] = [
      svg("rect", { class: "lz-plot", x: LEFT, y: TOP, width: Math.max(right - LEFT, 0), height: bottom - TOP }),
    ];
    for (const share of [0, 0.5, 1]) {
      const at = y(memory.peak * share);
      parts.push(svg("path", { class: "lz-grid", d: `M${LEFT},${at}H${right}` }));
      parts.push(svg("text", { class: "lz-axis", x: LEFT - 8, y: at + 4 }, bytesText(memory.peak * share)));
    }
    let below = new Array<number>(points).fill(0);
    for (const category of memory.categories) {
      const above = below.map((low, i) => low + (category.bytes[i] ?? 0));
      let path = `M${LEFT},${y(above[0] ?? 0).toFixed(1)}`;
      for (let i = 0; i < points; i++) {
        path += `V${y(above[i] ?? 0).toFixed(1)}H${(LEFT + (i + 1) * step).toFixed(1)}`;
      }
      for (let i = points - 1; i >= 0; i--) {
        path += `V${y(below[i] ?? 0).toFixed(1)}H${(LEFT + i * step).toFixed(1)}`;
      }
      parts.push(
        svg(
          "path",
          { class: `lz-area lz-cat-${category.name}`, d: `${path}Z` },
          svg("title", {}, `${category.name}: ${category.peakText} at the peak`),
        ),
      );
      below = above;
    }
    memory.pieces.forEach(([start, name], n) => {
      const x0 = xOfNode(start);
      const x1 = xOfNode(memory.pieces[n + 1]?.[0] ?? memory.count);
      if (start) parts.push(svg("path", { class: "lz-piece", d: `M${x0},${name ? 1 : TOP}V${bottom}` }));
      // In full where there is room, else the piece alone: "piece 2, and 6 more like it".
      const text = [name, name.split(",")[0] ?? ""].find((each) => each && x1 - x0 > each.length * charWidth(11) + 8);
      if (text) parts.push(svg("text", { class: "lz-piece-name", x: x0 + 5, y: TOP - 3 }, svg("title", {}, name), text));
    });
    for (const [start, stop] of this.lifetime) {
      const x0 = xOfNode(start);
      const x1 = Math.max(xOfNode(stop), x0 + 2);
      parts.push(svg("rect", { class: "lz-lifetime", x: x0, y: TOP, width: x1 - x0, height: bottom - TOP }));
      parts.push(svg("path", { class: "lz-lifetime-bar", d: `M${x0},${TOP}H${x1}` }));
    }
    if (near) {
      const at = y(memory.capacity ?? 0);
      parts.push(svg("path", { class: "lz-capacity", d: `M${LEFT},${at}H${right}` }));
      parts.push(
        svg(
          "text",
          { class: "lz-capacity-text", x: right - 4, y: at - 5 },
          `${memory.device}: ${memory.capacityText}`,
        ),
      );
    }
    memory.phases.forEach(([phase, start], n) => {
      const x0 = xOfNode(start);
      const x1 = xOfNode(memory.phases[n + 1]?.[1] ?? memory.count);
      parts.push(
        svg("rect", {
          class: `lz-phase-strip lz-phase-${phase}`,
          x: x0,
          y: bottom + 4,
          width: Math.max(x1 - x0 - 1, 1),
          height: 4,
          rx: 1,
        }),
      );
      if (x1 - x0 > 74) {
        parts.push(
          svg("text", { class: `lz-phase-name lz-phase-${phase}`, x: (x0 + x1) / 2, y: bottom + 22 }, phase),
        );
      }
    });
    if (this.chosen !== null) {
      const x = LEFT + (this.chosen + 0.5) * step;
      parts.push(svg("path", { class: "lz-cursor", d: `M${x},${TOP}V${bottom}` }));
    }
    const peakAt = memory.peakAt === null ? -1 : memory.at.indexOf(memory.peakAt);
    if (peakAt >= 0) {
      const x = LEFT + (peakAt + 0.5) * step;
      const label = `Peak ${memory.peakText}: show what is alive`;
      const peak = svg(
        "g",
        { class: "lz-peak", role: "button", tabindex: 0, "data-action": "peak", "aria-label": label },
        svg("title", {}, label),
        svg("rect", { x: x - 9, y: TOP - 8, width: 18, height: bottom - TOP + 8, class: "lz-peak-reach" }),
        svg("path", { d: `M${x},${TOP}V${bottom}` }),
        svg("circle", { cx: x, cy: y(memory.peak), r: 5 }),
      );
      peak.addEventListener("click", () => {
        this.events.peak();
      });
      peak.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        this.events.peak();
      });
      parts.push(peak);
    }
    const focused = this.svg.contains(document.activeElement);
    this.svg.replaceChildren(...parts);
    if (focused) this.svg.querySelector<SVGGElement>(".lz-peak")?.focus();
  }
}

/** `1536` -> `"1.50 KiB"`; the rule of lazyviz/plan/units.py. */
export function bytesText(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = Math.round(bytes);
  let unit = 0;
  while (size >= 1023.5 && unit < units.length - 1) {
    size /= 1024;
    unit++;
  }
  const digits = unit === 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return `${size.toFixed(digits)} ${units[unit] ?? ""}`;
}
