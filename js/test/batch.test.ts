import { beforeEach, describe, expect, it, vi } from "vitest";
import { batchSizes, shareOf, sizeAt } from "../src/toolbar/batch-controls";
import { PlanControls } from "../src/toolbar/plan-controls";
import { provideDeferredPart } from "../src/page/load-deferred-bundle";
import * as deferred from "../src/deferred-bundle-entry";
import type { Batch, Devices, LargestMessage, Memory, PlanMessage } from "../src/model/types";

provideDeferredPart(deferred); // as in a saved page

const batch: Batch = {
  size: 32,
  recorded: 32,
  group: 1,
  split: "off",
  choices: [
    ["off", "off: one piece"],
    ["auto", "auto: as few as fit"],
    ["2", "2 pieces"],
    ["4", "4 pieces"],
  ],
  words: "in one piece",
  pieces: 1,
  blocked: [],
  blockedCount: 0,
};
const memory = { peakText: "20 B", recordedOn: "cpu", verdict: "fits", verdictText: "Fits: needs 20 B of 30 B on cpu" } as Memory;

const devices: Devices = {
  chosen: "given",
  version: "0.0",
  groups: [
    ["As the block was given", [["given", "cpu · 30 B"]]],
    [
      "Data center GPUs",
      [
        ["H100-80GB", "H100-80GB · 79.6 GiB"],
        ["T4-16GB", "T4-16GB · 15.0 GiB"],
      ],
    ],
  ],
  note: "NVIDIA: no driver",
};

function answer(more: Partial<Batch>, rest: Partial<PlanMessage> = {}): PlanMessage {
  return { kind: "plan", memory, batch: { ...batch, ...more }, device: "given", version: "0.1", note: "", ...rest };
}

function largest(most: number | null, more: Partial<LargestMessage> = {}): LargestMessage {
  return { kind: "largest", most, searching: false, fixed: false, note: "", ...more };
}

function start(given: Partial<Batch> = {}): {
  controls: PlanControls;
  asked: [string, string][];
  gone: string[][];
  slider: HTMLInputElement;
  menu: HTMLSelectElement;
  slide: (size: number) => void;
  text: () => string;
} {
  const asked: [string, string][] = [];
  const gone: string[][] = [];
  const controls = new PlanControls({ batch: { ...batch, ...given }, device: "given" }, devices, memory, {
    ask: (action, id = "") => asked.push([action, id]),
    go: (chain) => gone.push(chain),
    counted: () => undefined,
  });
  document.body.replaceChildren(controls.element, ...controls.settings.map(([, each]) => each), ...controls.findings);
  const slider = document.body.querySelector<HTMLInputElement>('input[data-action="batch-size"]');
  const menu = document.querySelector<HTMLSelectElement>('select[data-action="split"]');
  if (!slider || !menu) throw new Error("no slider");
  const slide = (size: number): void => {
    slider.value = String(size);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  };
  return { controls, asked, gone, slider, menu, slide, text: () => document.body.textContent };
}

const press = (slider: HTMLInputElement, key: string): void => {
  slider.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
};

describe("the slider over the batch size", () => {
  beforeEach(() => {
    vi.useRealTimers();
  });

  it("is a labeled range from one sample to four times the batch", () => {
    const { slider, text } = start();
    expect([slider.type, slider.min, slider.max, slider.value]).toEqual(["range", "1", "128", "32"]);
    expect(slider.getAttribute("aria-label")).toContain("Batch size");
    expect(slider.getAttribute("aria-valuetext")).toBe("32 samples, peak 20 B, Fits: needs 20 B of 30 B on cpu");
    expect(text()).toContain("Batch32");
  });

  it("sends one request at a time, and then only for the newest size", () => {
    const { asked, slide, controls, slider, text } = start();
    for (const size of [33, 40, 64, 90]) slide(size);
    expect(asked).toEqual([["batch-size", "33"]]);
    expect(text()).toContain("Batch90"); // the number beside it does not wait
    controls.show(answer({ size: 33 }));
    expect(asked.slice(1)).toEqual([["batch-size", "90"]]);
    expect(slider.value).toBe("90"); // not thrown back by the answer to the first
    controls.show(answer({ size: 90, words: "in 2 pieces of 45 samples" }));
    expect(asked).toHaveLength(2);
    expect(text()).toContain("in 2 pieces of 45 samples · peak 20 B");
    expect(text()).toContain("Evaluate runs the 32 recorded");
  });

  it("extends beyond the largest batch that fits, once it is known, and marks it", () => {
    const { controls, asked, slider, text } = start();
    controls.begin();
    expect(asked).toEqual([["shown", "0.0"], ["largest", ""]]);
    expect(text()).toContain("looking for the largest batch that fits");
    controls.showLargest(largest(300, { searching: true }));
    expect(text()).toContain("300 samples fit, looking for more");
    expect(asked).toHaveLength(3); // it goes on asking
    controls.showLargest(largest(1000));
    expect(slider.max).toBe("1250");
    expect(text()).toContain("at most 1,000 samples fit");
    controls.showLargest(largest(0));
    expect(text()).toContain("not even one sample fits");
    controls.showLargest(largest(null));
    expect(slider.max).toBe("128");
  });

  it("moves by keys: to the next size, to double and half the size, and to the ends", () => {
    const { slider, controls } = start();
    const after = (key: string): string => {
      press(slider, key);
      return slider.value;
    };
    expect(["ArrowRight", "ArrowLeft", "PageUp", "PageDown", "Home", "ArrowLeft", "End"].map(after)).toEqual([
      "33",
      "32",
      "64",
      "32",
      "1",
      "1",
      "128",
    ]);
    controls.show(answer({ size: 33 }));
    controls.showLargest(largest(100_000));
    controls.show(answer({ size: 128 }));
    expect(["ArrowRight", "ArrowRight", "PageUp", "End"].map(after)).toEqual(["130", "140", "280", "125000"]);
  });

  it("announces the plan to screen readers after a pause, and nothing before the first change", () => {
    vi.useFakeTimers();
    const { controls, slide } = start();
    const said = document.body.querySelector("[aria-live]");
    controls.showLargest(largest(100));
    vi.advanceTimersByTime(2000);
    expect(said?.textContent).toBe("");
    slide(64);
    controls.show(answer({ size: 64 }));
    slide(65);
    controls.show(answer({ size: 65, words: "in 3 pieces of 22 or 21 samples" }));
    vi.advanceTimersByTime(2000);
    expect(said?.textContent).toBe("65 samples, in 3 pieces of 22 or 21 samples: Fits: needs 20 B of 30 B on cpu");
    controls.stop();
  });

  it("returns to the recorded batch", () => {
    const { controls, slide, asked, slider } = start();
    const back = document.body.querySelector<HTMLButtonElement>('[data-action="batch-recorded"]');
    expect(back?.hidden).toBe(true);
    slide(50);
    controls.show(answer({ size: 50 }));
    expect(back?.hidden).toBe(false);
    back?.click();
    expect(asked.at(-1)).toEqual(["batch-size", "32"]);
    expect(slider.value).toBe("32");
    expect(back?.hidden).toBe(true);
  });

  it("is off, with the reason, where sizes cannot be planned", () => {
    const { controls, slider, text } = start();
    controls.showLargest(largest(null, { fixed: true, note: "it is not known how odd_3 grows" }));
    expect(slider.disabled).toBe(true);
    expect(text()).toContain("it is not known how odd_3 grows");
  });
});

describe("the menu of pieces", () => {
  it("sets the pieces of Evaluate, and requests the plan and its largest batch", () => {
    const { menu, asked, controls, text } = start();
    expect([...menu.options].map((option) => option.value)).toEqual(["off", "auto", "2", "4"]);
    menu.value = "4";
    menu.dispatchEvent(new Event("change"));
    expect(asked).toEqual([["split", "4"]]);
    controls.show(answer({ split: "4", pieces: 4, words: "in 4 pieces of 8 samples" }));
    expect(menu.value).toBe("4");
    expect(text()).toContain("in 4 pieces of 8 samples");
    expect(asked.at(-1)).toEqual(["largest", ""]);
  });

  it("contains any number of pieces that the block was given", () => {
    const { controls, menu } = start();
    controls.show(answer({ split: "29" }));
    expect(menu.value).toBe("29");
    expect(menu.selectedOptions[0]?.textContent).toBe("29 pieces");
  });

  it("is disabled during a run, and when nothing is left to run", () => {
    const { controls, menu } = start();
    for (const [state, off] of [["running", true], ["interrupted", false], ["failed", false], ["done", true]] as const) {
      controls.showState(state);
      expect(menu.disabled, state).toBe(off);
    }
  });
});

describe("the device menu", () => {
  const device = (): HTMLSelectElement => {
    const menu = document.querySelector<HTMLSelectElement>('select[data-action="device"]');
    if (!menu) throw new Error("no device menu");
    return menu;
  };
  const choose = (menu: HTMLSelectElement, id: string): void => {
    menu.value = id;
    menu.dispatchEvent(new Event("change"));
  };
  const status = (): string => document.body.querySelector(".lz-planning")?.textContent ?? "";

  it("shows the devices in groups, and the driver's message", () => {
    start();
    const menu = device();
    expect([...menu.querySelectorAll("optgroup")].map((group) => group.label)).toEqual(["As the block was given", "Data center GPUs"]);
    expect([...menu.options].map((option) => option.value)).toEqual(["given", "H100-80GB", "T4-16GB"]);
    expect(menu.title).toContain("NVIDIA: no driver");
  });

  it("requests the plan, says so while waiting, and then requests the largest batch on the device", () => {
    const { controls, asked, text } = start();
    const menu = device();
    choose(menu, "H100-80GB");
    expect(asked).toEqual([["device", "H100-80GB"]]);
    expect(status()).toBe("planning for H100-80GB…");
    expect(controls.show(answer({}, { device: "H100-80GB" }))).toBe(true);
    expect(menu.value).toBe("H100-80GB");
    expect(status()).toBe("Evaluate runs on cpu");
    expect(asked.at(-1)).toEqual(["largest", ""]);
    expect(text()).toContain("looking for the largest batch");
    controls.showLargest(largest(96, { searching: true }));
    choose(menu, "T4-16GB"); // the search does not go on before it
    controls.showLargest(largest(96, { searching: true }));
    expect(asked.at(-1)).toEqual(["device", "T4-16GB"]);
    controls.show(answer({ split: "auto" }, { device: "given" }));
    expect(status()).toBe("");
  });

  it("ignores answers that a newer choice has superseded", () => {
    const { controls, asked } = start();
    const menu = device();
    choose(menu, "H100-80GB");
    choose(menu, "T4-16GB");
    expect(asked).toEqual([["device", "H100-80GB"]]);
    expect(controls.show(answer({}, { device: "H100-80GB" }))).toBe(false);
    expect(asked.at(-1)).toEqual(["device", "T4-16GB"]);
    expect(menu.value).toBe("T4-16GB");
    expect(controls.show(answer({}, { device: "T4-16GB" }))).toBe(true);
  });

  it("returns to the device of the displayed plan if another cannot be planned for", () => {
    const { controls, text } = start();
    choose(device(), "T4-16GB");
    controls.show(answer({}, { note: "There is no device 'T4-16GB'" }));
    expect(device().value).toBe("given");
    expect(text()).toContain("There is no device");
  });

  it("follows what was chosen in another widget of the graph", () => {
    const { controls, asked } = start();
    controls.show(answer({ size: 64 }, { device: "T4-16GB" }));
    expect(device().value).toBe("T4-16GB");
    expect(asked).toEqual([["largest", ""]]);
  });
});

describe("nodes that prevent a split", () => {
  it("are named as text, with the reason, and a click goes to them", () => {
    const blocked = [
      { label: "native_batch_norm_4 (<b>bn</b>, line 3)", why: "statistics over the batch", chain: ["r", "n4"] },
    ];
    const { gone, text } = start({ blocked, blockedCount: 3, words: "cannot be split", split: "4" });
    expect(text()).toContain("native_batch_norm_4 (<b>bn</b>, line 3) statistics over the batch");
    expect(text()).toContain("and 2 more");
    expect(document.body.querySelector(".lz-blocked.lz-wanted")).not.toBeNull();
    document.body.querySelector<HTMLButtonElement>(".lz-blocked button")?.click();
    expect(gone).toEqual([["r", "n4"]]);
  });
});

describe("the sizes of the slider", () => {
  it.each([
    [1, 128],
    [4, 640],
    [1, 1000],
    [3, 100_000],
    [1, 2 ** 40],
  ])("are multiples of %d up to %d, few enough to go through, the given ones among them", (group, top) => {
    const given = Math.floor(top / group / 3) * group;
    const sizes = batchSizes(group, top, [given]);
    expect(sizes).toContain(given);
    expect(sizes[0]).toBe(group);
    expect(sizes.at(-1)).toBe(Math.floor(top / group) * group);
    expect(sizes.length).toBeLessThan(1200);
    expect(sizes.every((size) => size % group === 0)).toBe(true);
    expect(sizes.every((size, i) => i === 0 || size > (sizes[i - 1] ?? 0))).toBe(true);
    for (const size of [group, given, sizes.at(-1) ?? 0]) expect(sizeAt(sizes, shareOf(sizes, size))).toBe(size);
  });

  it("are linear if there are few, and logarithmic over large ranges", () => {
    expect(shareOf(batchSizes(1, 101, []), 51)).toBeCloseTo(0.5);
    expect(shareOf(batchSizes(1, 10_000, []), 100)).toBeCloseTo(0.5);
    expect([sizeAt([1, 2, 3], -1), sizeAt([1, 2, 3], 2)]).toEqual([1, 3]);
  });
});
