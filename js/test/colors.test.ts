import { describe, expect, it } from "vitest";
import { bandOf, BoxDrawing } from "../src/graph/boxes";
import { Colors } from "../src/graph/colors";
import type { Frame } from "../src/model/open-groups-and-layout";
import type { BoxData } from "../src/model/types";

const box = (id: string, more: Partial<BoxData> = {}): BoxData => ({
  id,
  kind: "op",
  label: "scaled_dot_product_attention_forward",
  sub: "8×128 · 4.00 KiB",
  phase: "forward",
  ...more,
});
const frame = (data: BoxData, more: Partial<Frame> = {}): Frame => ({
  box: data,
  x: 0,
  y: 0,
  width: 184,
  height: 42,
  open: false,
  parent: "g0",
  ...more,
});

describe("Colors", () => {
  it("draw no bar for boxes without a time, and scale bars by the longest", () => {
    const colors = new Colors();
    const boxes = [box("a", { seconds: 1 }), box("b", { seconds: 0.25 }), box("c")];
    colors.by = "time";
    colors.learn(boxes, boxes);
    expect(boxes.map((each) => colors.bar(each)[0]?.[1])).toEqual([1, 0.25, 0]);
    expect(boxes.map((each) => colors.number(each))).toEqual(["1.00 s", "250 ms", "not run"]);
    expect(colors.legend().ticks).toEqual(["0", "500 ms", "1.00 s"]);
  });

  it("show what is held at the peak by category, on a linear scale that is as long as the peak", () => {
    const colors = new Colors();
    colors.peak = 4096;
    const boxes = [box("a", { bytes: 9999, held: 3072, by: [["activations", 2048], ["parameters", 1024]] }), box("b", { bytes: 10 })];
    colors.learn(boxes, boxes);
    expect(colors.bar(boxes[0] as BoxData)).toEqual([["activations", 0.5], ["parameters", 0.25]]);
    expect(boxes.map((each) => colors.number(each))).toEqual(["3.00 KiB at peak", "0 B at peak"]);
    colors.by = "memory";
    colors.learn(boxes, boxes);
    expect(boxes.map((each) => colors.number(each))).toEqual(["9.76 KiB allocated", "10 B allocated"]);
  });

  it("show what is held at the chart cursor, with the peak pale behind it", () => {
    const colors = new Colors();
    colors.peak = 4096;
    const held = box("a", { held: 3072, by: [["activations", 3072]] });
    colors.learn([held], [held]);
    expect(colors.barNow(held)).toBeNull();
    colors.now = { a: [["activations", 1024], ["temporaries", 512]] };
    expect(colors.bar(held)).toEqual([["activations", 0.75]]);
    expect(colors.barNow(held)).toEqual([["activations", 0.25], ["temporaries", 0.125]]);
    expect([held, box("b")].map((each) => colors.number(each))).toEqual(["1.50 KiB now", "0 B now"]);
    const drawing = new BoxDrawing(frame(held));
    drawing.paint(colors);
    expect([...drawing.element.querySelectorAll(".lz-part")].map((part) => part.classList.contains("lz-pale"))).toEqual([true, false, false]);
    colors.by = "memory";
    expect(colors.barNow(held)).toBeNull();
  });

  it("show projected times and FLOPs until there are measured ones", () => {
    const colors = new Colors();
    const boxes = [box("a", { numbers: { time: [0.5, 0.5, ""], flops: [2e9, 2e9, "2 GFLOP"] } }), box("b", { seconds: 0.25, state: "done", numbers: { time: [9, 9, ""] } })];
    colors.by = "time";
    colors.learn(boxes, boxes);
    expect(boxes.map((each) => colors.number(each))).toEqual(["500 ms projected", "250 ms"]);
    expect(boxes.map((each) => colors.bar(each)[0]?.[1])).toEqual([1, 0.5]);
    colors.by = "flops";
    colors.learn(boxes, boxes);
    expect(boxes.map((each) => colors.number(each))).toEqual(["2 GFLOP", ""]);
    expect(colors.legend().ticks).toEqual(["0", "1 GFLOP", "2 GFLOP"]);
  });

  it("show annotations, negative ones in another hue, scaled by the largest", () => {
    const colors = new Colors();
    colors.notes = [["norm", -4, 2, "-4", "2"]];
    colors.by = "note:norm";
    const boxes = [box("a", { numbers: { "note:norm": [-4, -4, "-4"] } }), box("b", { numbers: { "note:norm": [1, 2, "1 to 2"] } }), box("c")];
    colors.learn(boxes, boxes);
    expect(boxes.map((each) => colors.number(each))).toEqual(["-4 norm", "1 to 2 norm", ""]);
    expect(boxes.map((each) => colors.bar(each)[0] ?? [])).toEqual([["below", 1], ["note", 0.5], []]);
    expect(boxes.map((each) => Boolean(colors.style(each)))).toEqual([true, true, false]);
    expect(colors.legend().ticks).toEqual(["-4", "0", "4"]);
  });

  it("keep a module's color while other modules come and go", () => {
    const colors = new Colors();
    colors.by = "module";
    const stays = box("a", { module: "wte", bytes: 1 });
    const first = [stays, box("b", { module: "h", bytes: 9 })];
    colors.learn(first, first);
    const before = colors.style(stays);
    const later = [box("c", { module: "h.0", bytes: 50 }), box("d", { module: "h.1", bytes: 60 }), stays];
    colors.learn(later, later);
    expect(colors.style(stays)).toBe(before);
    expect(new Set(later.map((each) => colors.style(each))).size).toBe(3);
  });

  it("give the same parts of a repeated module one color where there are many", () => {
    const colors = new Colors();
    colors.by = "module";
    const parts = Array.from({ length: 12 }, (_, n) => [box(`a${n}`, { module: `h.${n}.attn` }), box(`m${n}`, { module: `h.${n}.mlp` })]);
    colors.learn(parts.flat(), parts.flat());
    expect(colors.legend().entries.map(({ text }) => text)).toEqual(["h.*.attn", "h.*.mlp"]);
  });
});

describe("bandOf", () => {
  it("never draws text smaller than 9 pixels on screen", () => {
    for (let scale = 4; scale > 0.02; scale *= 0.97) {
      const band = bandOf(scale);
      const drawing = new BoxDrawing(frame(box("n1")));
      drawing.write(band);
      for (const text of drawing.element.querySelectorAll("text")) {
        if (text.textContent) expect(parseFloat(text.style.fontSize) * scale).toBeGreaterThanOrEqual(8.8);
      }
    }
  });

  it("drops second lines before first ones, and draws no illegible text", () => {
    expect([1, 0.6, 0.45, 0.32, 0.2].map((scale) => bandOf(scale).lines)).toEqual([2, 2, 1, 1, 0]);
  });
});

describe("BoxDrawing", () => {
  it("truncates text that does not fit, and shows it in full on hover", () => {
    const drawing = new BoxDrawing(frame(box("n1")));
    drawing.write(bandOf(1));
    expect(drawing.element.querySelector(".lz-label")?.textContent).toMatch(/^scaled_dot.*…$/);
    expect(drawing.element.querySelector("title")?.textContent).toContain("scaled_dot_product_attention_forward · 8×128");
  });

  it("marks failed ops and NaN, also as text", () => {
    const data = box("n1", { state: "failed" });
    const drawing = new BoxDrawing(frame(data));
    expect(drawing.element.dataset["state"]).toBe("failed");
    data.state = "done";
    data.alarm = "nan";
    drawing.tell();
    expect(drawing.element.querySelector(".lz-alarm text")?.textContent).toBe("NaN");
    expect(drawing.element.querySelector("title")?.textContent).toContain("has NaN");
  });

  it("draws parameters differently from ops and inputs", () => {
    const shapes = ["parameter", "input"].map((role) => new BoxDrawing(frame(box("g1", { kind: "input", role }))).element);
    expect(shapes.map((element) => element.querySelector(".lz-card")?.tagName)).toEqual(["path", "rect"]);
  });
});
