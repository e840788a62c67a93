import { beforeEach, describe, expect, it } from "vitest";
import { area, edge, Plot, pointAt, steps, totals } from "../src/memory/chart-geometry";
import { MemoryChart } from "../src/memory/memory-chart";
import { slice } from "../src/memory/chart-slice";
import { provideDeferredPart } from "../src/page/load-deferred-bundle";
import * as deferred from "../src/deferred-bundle-entry";
import { charWidth } from "../src/page/dom";
import type { Memory, Points, Range } from "../src/model/types";

provideDeferredPart(deferred); // as in a saved page

/** Points of `count` positions from `start` on, no more than `most`. */
function points(start: number, stop: number, most = 240): Points {
  const n = Math.min(stop - start, most);
  const at = Array.from({ length: n }, (_, i) => start + Math.floor((i * (stop - start)) / n));
  return { range: [start, stop], at, bytes: [at.map((i) => 100 + i), at.map(() => 50)], ops: at.map((i) => `op ${i}`) };
}

const memory = {
  count: 1000,
  points: points(0, 1000),
  categories: [
    { name: "parameters", label: "parameters", peak: 1099, peakText: "1.07 KiB", most: 1099, mostText: "1.07 KiB" },
    { name: "activations", label: "activations", peak: 50, peakText: "50 B", most: 50, mostText: "50 B" },
  ],
  peak: 1149,
  peakText: "1.12 KiB",
  peakAt: 996,
  peakName: "h.0: mm",
  eagerText: "2 KiB",
  otherRun: "plain eager PyTorch: 2 KiB",
  needed: null,
  neededText: "",
  capacity: 2000,
  capacityText: "1.95 KiB",
  device: "small",
  phases: [["forward", 0], ["backward", 400]],
  titles: { forward: "Forward", backward: "Backward" },
  pieces: [],
  measured: "",
} as unknown as Memory;

describe("the plot", () => {
  const plot = new Plot(1014, 100, 200, 1000);

  it("converts positions and bytes to coordinates and back", () => {
    expect(plot.x(100)).toBe(plot.left);
    expect(plot.x(200)).toBe(plot.right);
    expect(plot.y(0)).toBe(plot.bottom);
    expect(plot.y(1000)).toBe(plot.top);
    for (const position of [100, 133, 199]) expect(plot.position(plot.x(position))).toBeCloseTo(position);
    expect([plot.position(-50), plot.position(5000)]).toEqual([100, 200]);
  });

  it.each([
    [0, 10, 240],
    [0, 1000, 240],
    [7, 1003, 240],
    [0, 1_000_000, 240],
  ])("has one point for every position from %d to %d", (start, stop, most) => {
    const some = points(start, stop, most);
    expect([edge(some, 0), edge(some, some.at.length)]).toEqual([start, stop]);
    for (let position = start; position < stop; position += Math.ceil((stop - start) / 97)) {
      const point = pointAt(some, position);
      expect(edge(some, point)).toBeLessThanOrEqual(position);
      expect(edge(some, point + 1)).toBeGreaterThan(position);
    }
    expect([pointAt(some, start - 5), pointAt(some, stop + 5)]).toEqual([0, some.at.length - 1]);
  });

  it("sums the displayed categories", () => {
    const few = points(0, 3);
    expect(totals(few, [true, true])).toEqual([150, 151, 152]);
    expect(totals(few, [false, true])).toEqual([50, 50, 50]);
  });

  it("leaves gaps in a line for unknown values", () => {
    const few = points(100, 104);
    expect(steps(plot, few, [null, 5, 6, null]).match(/M/g)).toHaveLength(1);
    expect(steps(plot, few, [5, null, 6, 7]).match(/M/g)).toHaveLength(2);
    expect(area(plot, few, [0, 0, 0, 0], [1, 2, 3, 4])).toMatch(/^M.*Z$/);
  });

  it("stretches the known points over a range until finer ones arrive", () => {
    const part = slice(points(0, 1000), 100, 140);
    expect(part.range).toEqual([100, 140]);
    expect(part.at).toHaveLength(40);
    expect(part.bytes[0]?.every((size) => size >= 195 && size <= 240)).toBe(true);
  });
});

describe("the memory chart", () => {
  let asked: [string, ...number[]][];
  let chart: MemoryChart;
  const svg = (): SVGSVGElement => chart.svg;
  const slider = (): HTMLElement => chart.element.querySelector('[role="slider"]') as HTMLElement;
  const press = (key: string, shiftKey = false): void => {
    slider().dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  };
  const says = (): string => slider().getAttribute("aria-valuetext") ?? "";
  const back = (): HTMLElement => chart.element.querySelector('[data-action="chart-back"]') as HTMLElement;

  beforeEach(() => {
    asked = [];
    chart = new MemoryChart(memory, {
      peak: () => asked.push(["peak"]),
      moment: (position) => asked.push(["moment", position]),
      range: (start, stop) => asked.push(["range", start, stop]),
      whole: () => asked.push(["whole"]),
      read: () => undefined,
    });
    document.body.replaceChildren(chart.element);
    chart.resizeTo(1000);
  });

  it("is an image with a description", () => {
    expect(svg().getAttribute("role")).toBe("img");
    expect(svg().getAttribute("aria-label")).toBe(
      "Projected memory over the run of 1,000 ops: peak 1.12 KiB at h.0: mm, of that parameters 1.07 KiB, activations 50 B. Memory of small: 1.95 KiB.",
    );
    expect(svg().querySelector("[tabindex]")).toBeNull();
  });

  it("is read with the keyboard: position, op and bytes by category", () => {
    slider().focus();
    press("Home");
    expect(says()).toBe("op 1 of 1,000, the highest of 1 to 4 · op 0 · 150 B in all: parameters 100 B, activations 50 B");
    press("ArrowRight");
    expect(says()).toContain("op 5 of 1,000");
    expect(slider().getAttribute("aria-valuenow")).toBe("5");
    expect(chart.element.querySelector<HTMLElement>(".lz-chart-readout")?.title).toBe(says());
    expect(chart.element.querySelector('[data-category="parameters"]')?.textContent).toBe("parameters 104 B");
    press("Enter");
    expect(asked).toEqual([["moment", 4]]);
    expect(svg().querySelector(".lz-cursor")).not.toBeNull();
  });

  it("zooms into a range selected with Shift, requests its points, and returns with Escape", () => {
    slider().focus();
    press("Home");
    for (let i = 0; i < 9; i++) press("ArrowRight", true);
    expect(svg().querySelector(".lz-chart-part")).not.toBeNull();
    press("Enter");
    expect(asked).toEqual([["range", 0, 41]]);
    expect(back().hidden).toBe(false);
    expect(back().textContent).toBe("Ops 1 to 41 · back");
    const fine = { points: points(0, 41) } as Range;
    expect(chart.showRange({ points: points(0, 99) } as Range), "a stale answer").toBe(false);
    expect(chart.showRange(fine)).toBe(true);
    expect(chart.points.at).toHaveLength(41);
    press("Escape");
    expect(asked.at(-1)).toEqual(["whole"]);
    expect(back().hidden).toBe(true);
    expect(chart.showRange(fine)).toBe(false);
  });

  it("shows a single category at its own scale, with its own totals", () => {
    const entry = (name: string): HTMLElement => chart.element.querySelector(`[data-category="${name}"]`) as HTMLElement;
    expect(svg().querySelector(".lz-capacity")).not.toBeNull();
    entry("activations").click();
    expect(entry("activations").getAttribute("aria-pressed")).toBe("true");
    expect([...svg().querySelectorAll(".lz-area")].map((each) => each.getAttribute("class"))).toEqual(["lz-area lz-cat-activations"]);
    expect([...svg().querySelectorAll(".lz-axis:not(.lz-time-label)")].at(-1)?.textContent).toBe("50 B");
    expect(svg().querySelector(".lz-capacity")).toBeNull();
    slider().focus();
    press("Home");
    expect(says()).toContain("150 B in all: activations 50 B");
    (chart.element.querySelector('[data-action="all-categories"]') as HTMLElement).click();
    expect(svg().querySelectorAll(".lz-area")).toHaveLength(2);
  });

  it("draws what was measured over the projection, and says how they differ", () => {
    expect(svg().querySelector(".lz-measured")).toBeNull();
    const held = memory.points.at.map((i) => 160 + i);
    chart.show({ ...memory, measured: "measured peak 1.13 KiB, as projected", points: { ...memory.points, held } });
    expect(svg().querySelector(".lz-measured")).not.toBeNull();
    const head = chart.element.querySelector<HTMLElement>(".lz-memory-head");
    expect(head?.textContent, "what does not fit is in the tooltip").toBe("measured peak 1.13 KiB");
    expect(head?.title).toContain("measured peak 1.13 KiB, as projected");
    slider().focus();
    press("Home");
    expect(says()).toContain("150 B in all · measured 160 B");
  });

  it("shows the capacity as text if its line would be outside of the plot", () => {
    expect(svg().querySelector(".lz-capacity-text")?.textContent).toBe("small: 1.95 KiB");
    chart.show({ ...memory, capacity: 1149 * 40, capacityText: "44.9 KiB" });
    expect(svg().querySelector(".lz-capacity")).toBeNull();
    expect(chart.element.textContent).toContain("small has 44.9 KiB, 40 × the peak");
  });

  it("draws the time of each point by its bound, and shows the source of the estimate", () => {
    expect(svg().querySelector(".lz-time-bars")).toBeNull();
    const seconds = memory.points.at.map((_, n) => (n % 2 ? 0.001 : 0.004));
    const bounds = memory.points.at.map((_, n) => (n % 2 ? "m" : "c")).join("");
    const track = { text: "600 ms", words: "600 ms projected, ±30%", title: "460 ms to 780 ms", seconds, bounds, phases: ["200 ms", "400 ms"], sums: {}, keys: ["compute", "memory"] };
    chart.showTrack(track);
    expect([...svg().querySelectorAll(".lz-time-bars")].map((each) => each.textContent)).toEqual(["compute-bound", "memory-bound"]);
    expect(chart.element.textContent).toContain("600 ms projected, ±30%");
    expect([...svg().querySelectorAll(".lz-phase-name")].map((each) => each.textContent)).toEqual(["Forward200 ms", "Backward400 ms"]);
    expect([...chart.element.querySelectorAll(".lz-time-keys span")].map((each) => each.textContent)).toEqual(["compute", "memory"]);
    slider().focus();
    press("Home");
    expect(says()).toContain("4.00 ms projected, compute-bound");
    chart.showTrack({ ...track, words: "time: lazyviz.calibrate() first", seconds: [], bounds: "", phases: [], sums: {}, keys: [] });
    expect(svg().querySelector(".lz-time-bars")).toBeNull();
    expect(chart.element.textContent).toContain("lazyviz.calibrate() first");
  });

  it("names the layer of the peak's op by as much of its path as fits", () => {
    const named = (peakName: string): string | null | undefined => {
      chart.show({ ...memory, peakName });
      return svg().querySelector(".lz-flag-op")?.textContent;
    };
    expect(named("net.layers.1: mm")).toBe("net.layers.1: mm");
    expect(named("detector.transformer.decoder.layers.1.multihead_attn: mul")).toMatch(/^(\w+\.)*multihead_attn: mul$/);
    expect(named(`${"x".repeat(90)}.${"y".repeat(90)}: mul`)).toBe("mul");
  });

  it("names each phase once, with the time of all its sections, if not each has room below its own", () => {
    const phases = Array.from({ length: 80 }, (_, n): ["forward" | "backward", number] => [n % 2 ? "backward" : "forward", n * 10]);
    chart.show({ ...memory, phases });
    const names = (): (string | null)[] => [...svg().querySelectorAll(".lz-phase-name")].map((each) => each.textContent);
    expect(svg().querySelectorAll(".lz-phase-strip").length).toBe(80);
    expect(names()).toEqual(["Forward", "Backward"]);
    const times = phases.map(() => "5 ms");
    chart.showTrack({ text: "", words: "", title: "", seconds: [], bounds: "", phases: times, sums: { forward: "200 ms", backward: "400 ms" }, keys: [] });
    expect(names()).toEqual(["Forward200 ms", "Backward400 ms"]);
  });

  it("names the categories in the order in which they are stacked", () => {
    expect([...chart.element.querySelectorAll<HTMLElement>("[data-category]")].map((each) => each.dataset["category"])).toEqual(["activations", "parameters"]);
  });

  it("keeps the zoomed range for another plan, unless positions have changed", () => {
    slider().focus();
    press("Home");
    press("End", true);
    press("Home", true);
    press("ArrowRight", true);
    press("Enter");
    expect(asked.at(-1)).toEqual(["range", 0, 8]);
    chart.show({ ...memory, peakText: "9 KiB" });
    expect(asked.at(-1)).toEqual(["range", 0, 8]);
    expect(asked).toHaveLength(2);
    chart.show({ ...memory, count: 2000, points: points(0, 2000) });
    expect(back().hidden).toBe(true);
  });
});

describe("the names of pieces", () => {
  const pieces: Memory["pieces"] = [[0, "piece 1"], [250, "piece 2"], [500, "piece 3, and 5 more like it"]];

  it.each([400, 700, 1014])("are beside the flag of the peak in a chart of %d pixels", (width) => {
    let named = 0;
    for (let peakAt = 0; peakAt < 1000; peakAt += 7) {
      const chart = new MemoryChart({ ...memory, peakAt, pieces }, { peak: () => undefined, moment: () => undefined, range: () => undefined, read: () => undefined, whole: () => undefined });
      chart.resizeTo(width);
      const flag = chart.svg.querySelector(".lz-flag");
      const [left, wide] = ["x", "width"].map((name) => Number(flag?.getAttribute(name)));
      for (const text of chart.svg.querySelectorAll(".lz-piece-name")) {
        const from = Number(text.getAttribute("x"));
        const to = from + charWidth(11) * (text.lastChild?.textContent ?? "").length;
        expect(to <= (left ?? 0) || from >= (left ?? 0) + (wide ?? 0), `${peakAt}: ${text.textContent}`).toBe(true);
        named++;
      }
    }
    expect(named).toBeGreaterThan(150); // most of them have room
  });
});
