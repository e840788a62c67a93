import { describe, expect, it } from "vitest";
import { bandOf, BoxDrawing } from "../src/graph/boxes";
import { Colours } from "../src/graph/colors";
import type { Frame } from "../src/model/scene";
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

describe("Colours", () => {
  it("have no bar for boxes without a time, and measure by the longest", () => {
    const colours = new Colours();
    const boxes = [box("a", { seconds: 1 }), box("b", { seconds: 0.25 }), box("c")];
    colours.by = "time";
    colours.learn(boxes, boxes);
    expect(boxes.map((each) => colours.bar(each)[0]?.[1])).toEqual([1, 0.25, 0]);
    expect(boxes.map((each) => colours.number(each))).toEqual(["1.00 s", "250 ms", "not run"]);
    expect(colours.legend().ticks).toEqual(["0", "500 ms", "1.00 s"]);
  });

  it("show what is held at the peak by category, on a linear scale that is as long as the peak", () => {
    const colours = new Colours();
    colours.peak = 4096;
    const boxes = [box("a", { bytes: 9999, held: 3072, by: [["activations", 2048], ["parameters", 1024]] }), box("b", { bytes: 10 })];
    colours.learn(boxes, boxes);
    expect(colours.bar(boxes[0] as BoxData)).toEqual([["activations", 0.5], ["parameters", 0.25]]);
    expect(boxes.map((each) => colours.number(each))).toEqual(["3.00 KiB at peak", "0 B at peak"]);
    colours.by = "memory";
    colours.learn(boxes, boxes);
    expect(boxes.map((each) => colours.number(each))).toEqual(["9.76 KiB allocated", "10 B allocated"]);
  });

  it("show what is held where the chart is read, with the peak pale below it", () => {
    const colours = new Colours();
    colours.peak = 4096;
    const held = box("a", { held: 3072, by: [["activations", 3072]] });
    colours.learn([held], [held]);
    expect(colours.barNow(held)).toBeNull();
    colours.now = { a: [["activations", 1024], ["temporaries", 512]] };
    expect(colours.bar(held)).toEqual([["activations", 0.75]]);
    expect(colours.barNow(held)).toEqual([["activations", 0.25], ["temporaries", 0.125]]);
    expect([held, box("b")].map((each) => colours.number(each))).toEqual(["1.50 KiB now", "0 B now"]);
    const drawing = new BoxDrawing(frame(held));
    drawing.paint(colours);
    expect([...drawing.element.querySelectorAll(".lz-part")].map((part) => part.classList.contains("lz-pale"))).toEqual([true, false, false]);
    colours.by = "memory";
    expect(colours.barNow(held)).toBeNull();
  });

  it("show projected times and FLOPs until there are measured ones", () => {
    const colours = new Colours();
    const boxes = [box("a", { numbers: { time: [0.5, 0.5, ""], flops: [2e9, 2e9, "2 GFLOP"] } }), box("b", { seconds: 0.25, state: "done", numbers: { time: [9, 9, ""] } })];
    colours.by = "time";
    colours.learn(boxes, boxes);
    expect(boxes.map((each) => colours.number(each))).toEqual(["500 ms projected", "250 ms"]);
    expect(boxes.map((each) => colours.bar(each)[0]?.[1])).toEqual([1, 0.5]);
    colours.by = "flops";
    colours.learn(boxes, boxes);
    expect(boxes.map((each) => colours.number(each))).toEqual(["2 GFLOP", ""]);
    expect(colours.legend().ticks).toEqual(["0", "1 GFLOP", "2 GFLOP"]);
  });

  it("show the user's own numbers, those below zero in another hue, measured by the largest of all", () => {
    const colours = new Colours();
    colours.notes = [["norm", -4, 2, "-4", "2"]];
    colours.by = "note:norm";
    const boxes = [box("a", { numbers: { "note:norm": [-4, -4, "-4"] } }), box("b", { numbers: { "note:norm": [1, 2, "1 to 2"] } }), box("c")];
    colours.learn(boxes, boxes);
    expect(boxes.map((each) => colours.number(each))).toEqual(["-4 norm", "1 to 2 norm", ""]);
    expect(boxes.map((each) => colours.bar(each)[0] ?? [])).toEqual([["below", 1], ["note", 0.5], []]);
    expect(boxes.map((each) => Boolean(colours.style(each)))).toEqual([true, true, false]);
    expect(colours.legend().ticks).toEqual(["-4", "0", "4"]);
  });

  it("keep a module's colour while other modules come and go", () => {
    const colours = new Colours();
    colours.by = "module";
    const stays = box("a", { module: "wte", bytes: 1 });
    const first = [stays, box("b", { module: "h", bytes: 9 })];
    colours.learn(first, first);
    const before = colours.style(stays);
    const later = [box("c", { module: "h.0", bytes: 50 }), box("d", { module: "h.1", bytes: 60 }), stays];
    colours.learn(later, later);
    expect(colours.style(stays)).toBe(before);
    expect(new Set(later.map((each) => colours.style(each))).size).toBe(3);
  });

  it("give the same parts of a repeated module one colour where there are many", () => {
    const colours = new Colours();
    colours.by = "module";
    const parts = Array.from({ length: 12 }, (_, n) => [box(`a${n}`, { module: `h.${n}.attn` }), box(`m${n}`, { module: `h.${n}.mlp` })]);
    colours.learn(parts.flat(), parts.flat());
    expect(colours.legend().entries.map(({ text }) => text)).toEqual(["h.*.attn", "h.*.mlp"]);
  });
});

describe("bandOf", () => {
  it("never lets words get smaller than 9 pixels on screen", () => {
    for (let scale = 4; scale > 0.02; scale *= 0.97) {
      const band = bandOf(scale);
      const drawing = new BoxDrawing(frame(box("n1")));
      drawing.write(band);
      for (const text of drawing.element.querySelectorAll("text")) {
        if (text.textContent) expect(parseFloat(text.style.fontSize) * scale).toBeGreaterThanOrEqual(8.8);
      }
    }
  });

  it("gives up second lines before first ones, and writes nothing where nothing can be read", () => {
    expect([1, 0.6, 0.45, 0.32, 0.2].map((scale) => bandOf(scale).lines)).toEqual([2, 2, 1, 1, 0]);
  });
});

describe("BoxDrawing", () => {
  it("leaves out the end of what has no room and says the whole on hover", () => {
    const drawing = new BoxDrawing(frame(box("n1")));
    drawing.write(bandOf(1));
    expect(drawing.element.querySelector(".lz-label")?.textContent).toMatch(/^scaled_dot.*…$/);
    expect(drawing.element.querySelector("title")?.textContent).toContain("scaled_dot_product_attention_forward · 8×128");
  });

  it("marks what failed and where a value is not a number, in words too", () => {
    const data = box("n1", { state: "failed" });
    const drawing = new BoxDrawing(frame(data));
    expect(drawing.element.dataset["state"]).toBe("failed");
    data.state = "done";
    data.alarm = "nan";
    drawing.tell();
    expect(drawing.element.querySelector(".lz-alarm text")?.textContent).toBe("NaN");
    expect(drawing.element.querySelector("title")?.textContent).toContain("has NaN");
  });

  it("draws parameters unlike ops and unlike inputs", () => {
    const shapes = ["parameter", "input"].map((role) => new BoxDrawing(frame(box("g1", { kind: "input", role }))).element);
    expect(shapes.map((element) => element.querySelector(".lz-card")?.tagName)).toEqual(["path", "rect"]);
  });
});
