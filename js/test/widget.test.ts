import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { beforeEach, describe, expect, it, vi } from "vitest";
import { cut } from "../src/page/dom";
import { bytesText } from "../src/page/format";
import type { Batch, GroupData, Memory, SceneData, Syncs } from "../src/model/types";
import type { Model } from "../src/model/anywidget-model";
import { provideDeferredPart } from "../src/page/load-deferred-bundle";
import * as deferred from "../src/deferred-bundle-entry";
import widget from "../src/anywidget-entry";

provideDeferredPart(deferred); // as in a saved page; what fetches it is tried in a browser

const picture = JSON.parse(
  readFileSync(resolve(import.meta.dirname, "../../tests/view/layout/golden/picture.json"), "utf8"),
) as { root: string; groups: GroupData[] };

const memory: Memory = {
  count: 3,
  points: { range: [0, 3], at: [0, 1, 2], bytes: [[10, 20, 5]], ops: ["h.0: mm · line 1", "h.0: relu · line 1", "h.0: mm · line 2"] },
  categories: [{ name: "activations", label: "activations", peak: 20, peakText: "20 B", most: 20, mostText: "20 B" }],
  peak: 20,
  peakText: "20 B",
  peakAt: 1,
  peakName: "h.0: mm",
  eagerText: "24 B",
  otherRun: "plain eager PyTorch: 24 B",
  needed: null,
  neededText: "",
  capacity: 30,
  capacityText: "30 B",
  device: "cpu",
  recordedOn: "cpu",
  verdict: "fits",
  verdictText: "Fits: needs 20 B of 30 B on cpu",
  verdictShort: "Fits · 20 B of 30 B",
  peakChain: [],
  verdictTitle: "Fits: needs 20 B of 30 B on cpu",
  alive: [{ bytes: "20 B", category: "activations", label: "h.0 · mm", chain: [] }],
  aliveCount: 1,
  phases: [
    ["forward", 0],
    ["backward", 2],
  ],
  titles: { forward: "Forward", backward: "Backward" },
  pieces: [],
  measured: "",
};

class FakeModel implements Model {
  readonly sent: unknown[] = [];
  private readonly callbacks = new Map<string, Set<(message: never) => void>>();
  constructor(private readonly values: Record<string, unknown>) {}
  get(name: string): unknown {
    return this.values[name];
  }
  on(event: string, callback: (message: never) => void): void {
    this.callbacks.set(event, (this.callbacks.get(event) ?? new Set()).add(callback));
  }
  off(event: string, callback: (message: never) => void): void {
    this.callbacks.get(event)?.delete(callback);
  }
  send(content: unknown): void {
    this.sent.push(content);
  }
  emit(event: string, message?: unknown): void {
    for (const callback of [...(this.callbacks.get(event) ?? [])]) callback(message as never);
  }
  set(name: string, value: unknown): void {
    this.values[name] = value;
    this.emit(`change:${name}`);
  }
  get listeners(): number {
    return [...this.callbacks.values()].reduce((sum, set) => sum + set.size, 0);
  }
}

function groupsOf(ids: string[]): GroupData[] {
  return picture.groups.filter((group) => ids.includes(group.id));
}

function start(batch: Batch | null = null, syncs?: Syncs): { model: FakeModel; root: HTMLElement; stop: () => void } {
  const lanes = groupsOf([picture.root]).flatMap((group) => group.boxes.map((box) => box.id));
  const scene: SceneData = {
    title: "<b>step</b>",
    root: picture.root,
    opened: [picture.root, ...lanes],
    groups: groupsOf([picture.root, ...lanes]),
    memory,
    batch,
    devices: batch && { chosen: "given", version: "0.0", groups: [["As the block was given", [["given", "cpu · 30 B"]]]], note: "" },
    views: false,
    ...(syncs ? { syncs } : {}),
  };
  const model = new FakeModel({
    scene,
    state: "pending",
    summary: "13 ops recorded",
    report: "",
    error: null,
    progress: null,
    static_id: "",
  });
  const el = document.createElement("div");
  document.body.replaceChildren(el);
  const stop = widget.render({ model, el });
  const root = el.querySelector<HTMLElement>(".lazyviz");
  if (!root) throw new Error("nothing rendered");
  return { model, root, stop };
}

const node = (root: HTMLElement, id: string): SVGGElement | null =>
  root.querySelector<SVGGElement>(`[data-node="${id}"]`);

beforeEach(() => {
  // happy-dom lays nothing out: give elements a width, and observers a first call.
  vi.spyOn(HTMLElement.prototype, "clientWidth", "get").mockReturnValue(1000);
  vi.stubGlobal(
    "ResizeObserver",
    class {
      constructor(private readonly callback: () => void) {}
      observe(): void {
        this.callback();
      }
      disconnect(): void {
        /* nothing is observed */
      }
    },
  );
});

describe("the widget", () => {
  it("lists equal sync points as one line, and has no list if there are none", () => {
    const lines = ["item, train.py:4, x 300 (ran 900 ops in 0.1 s): <b>", "tolist, cell [7], line 3 (ran 1 op in 0.1 s)"];
    const { root } = start(null, { title: "301 sync points", lines });
    const list = root.querySelector('[data-panel="syncs"]');
    expect(list?.querySelector("h3")?.textContent).toBe("301 sync points");
    expect([...(list?.querySelectorAll("li") ?? [])].map((item) => item.textContent)).toEqual(lines);
    expect(start(null, { title: "no sync point", lines: [] }).root.querySelector('[data-panel="syncs"]')).toBeNull();
  });

  it("has the hooks that tests and style sheets rely on", () => {
    const { root } = start();
    expect(root.dataset["state"]).toBe("pending");
    for (const action of ["evaluate", "cancel", "collapse-all", "expand-all", "fit", "save"]) {
      expect(root.querySelector(`button[data-action="${action}"]`), action).not.toBeNull();
    }
    expect(root.querySelector('input[data-action="search"]')).not.toBeNull();
    expect(root.querySelector('input[data-action="batch-size"]')).toBeNull();
    expect(root.querySelector('[data-verdict="fits"]')?.textContent).toContain("Fits");
    expect(root.querySelector('[data-chart="memory"]')).not.toBeNull();
    expect(root.querySelector('[data-panel="details"]')).not.toBeNull();
    expect(root.querySelector("progress")).not.toBeNull();
    const nodes = [...root.querySelectorAll<SVGElement>("[data-node]")];
    expect(nodes.length).toBeGreaterThan(4);
    for (const each of nodes) {
      expect(each.getAttribute("data-kind")).toMatch(/^(op|module|input|output|sync|step)$/);
      expect(each.getAttribute("data-phase")).toMatch(/^(forward|backward|optimizer|other)$/);
      expect(each.hasAttribute("data-op")).toBe(true);
      expect(each.querySelector("title")?.textContent).toContain(each.getAttribute("data-kind"));
    }
  });

  it("treats everything that Python sends as text", () => {
    const { root, model } = start();
    expect(root.querySelector("h2")?.textContent).toBe("<b>step</b>");
    expect(root.querySelector("h2 b")).toBeNull();
    model.set("error", { message: "<img src=x onerror=alert(1)>", source: null, chain: [] });
    expect(root.querySelector("img")).toBeNull();
    expect(root.querySelector('[role="alert"]')?.textContent).toContain("<img");
  });

  it("requests a group when it is opened, draws it in place, and closes it without a request", () => {
    const { root, model } = start();
    const fold = root.querySelector<SVGGElement>('[data-kind="module"][data-phase="backward"]');
    const id = fold?.getAttribute("data-node") ?? "";
    expect(fold?.getAttribute("aria-expanded")).toBe("false");
    const before = root.querySelectorAll("[data-node]").length;
    fold?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    expect(model.sent).toContainEqual({ action: "open", id });
    model.emit("msg:custom", { kind: "groups", groups: groupsOf([id]), note: "" });
    expect(node(root, id)?.getAttribute("aria-expanded")).toBe("true");
    expect(root.querySelectorAll("[data-node]").length).toBe(before + 3);
    model.sent.length = 0;
    node(root, id)?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    expect(root.querySelectorAll("[data-node]").length).toBe(before);
    expect(model.sent).toEqual([{ action: "select", id }]);
  });

  it("opens a group from the keyboard", () => {
    const { root, model } = start();
    const fold = root.querySelector<SVGGElement>('[data-kind="module"]');
    fold?.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    expect(model.sent).toContainEqual({ action: "open", id: fold?.getAttribute("data-node") });
  });

  it("names an action and an id in every message, and nothing else", () => {
    const { root, model } = start();
    for (const button of root.querySelectorAll<HTMLButtonElement>("button[data-action]")) {
      if (button.dataset["action"] !== "save") button.click();
    }
    expect(model.sent.length).toBeGreaterThan(2);
    for (const message of model.sent) {
      expect(Object.keys(message as object).sort()).toEqual(["action", "id"]);
    }
  });

  it("shows progress and Cancel during a run, then the measurements", () => {
    const { root, model } = start();
    const button = (action: string): HTMLButtonElement | null => root.querySelector(`button[data-action="${action}"]`);
    expect(button("cancel")?.hidden).toBe(true);
    button("evaluate")?.click();
    expect(model.sent).toContainEqual({ action: "evaluate", id: "" });
    model.set("state", "running");
    expect(root.dataset["state"]).toBe("running");
    expect(button("evaluate")?.disabled).toBe(true);
    expect(button("cancel")?.disabled).toBe(false);
    model.set("progress", { done: 50, total: 100, seconds: 2, label: "h.0" });
    expect(root.querySelector("progress")?.value).toBe(50);
    expect(root.textContent).toContain("op 50 of 100");
    button("cancel")?.click();
    expect(model.sent).toContainEqual({ action: "cancel", id: "" });
    model.set("report", "ran 100 ops in 4 s, measured peak 20 B");
    model.set("state", "done");
    expect(root.textContent).toContain("measured peak 20 B");
    expect(button("cancel")?.hidden).toBe(true);
  });

  it("shows what is known of the clicked box, and marks its lifetime on the chart", () => {
    const { root, model } = start();
    const op = root.querySelector<SVGGElement>('[data-kind="op"]');
    const id = op?.getAttribute("data-node") ?? "";
    op?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    expect(model.sent).toContainEqual({ action: "select", id });
    const details = {
      id,
      title: "mean",
      subtitle: "",
      facts: [["op", "aten.mean.default"]],
      source: { file: "cell_compilation.py", line: 4, text: "loss = net(x)" },
      inputs: [{ name: "", shape: "4×8", dtype: "float32", bytes: "128 B", from: { label: "h.2: relu", chain: [] } }],
      outputs: [],
      forward: null,
      flows: [],
      relations: [],
      lifetime: [[1, 2]],
    };
    model.emit("msg:custom", { kind: "details", details });
    const panel = root.querySelector('[data-panel="details"]');
    expect(panel?.textContent).toContain("aten.mean.default");
    expect(panel?.textContent).toContain("cell_compilation.py, line 4");
    expect(root.querySelector(".lz-lifetime")).not.toBeNull();
    model.emit("msg:custom", { kind: "details", details: { ...details, id: "other", title: "late answer" } });
    expect(panel?.textContent).not.toContain("late answer");
  });

  it("highlights what is alive when the peak is clicked", () => {
    const lanes = groupsOf([picture.root]).flatMap((group) => group.boxes);
    const target = groupsOf([lanes[0]?.id ?? ""])[0]?.boxes.find((box) => box.kind === "op");
    const alive = memory.alive[0];
    if (alive) alive.chain = [picture.root, lanes[0]?.id ?? "", target?.id ?? ""];
    const { root } = start();
    root.querySelector(".lz-peak")?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    expect(node(root, target?.id ?? "")?.classList.contains("lz-lit")).toBe(true);
  });

  it("requests what is alive at any point of the chart, and shows the answer to the last request", () => {
    const { root, model } = start();
    const chart = root.querySelector('[data-chart="memory"]');
    const width = 1000 - 74 - 14; // of the plot: three points
    chart?.dispatchEvent(new MouseEvent("click", { bubbles: true, clientX: 74 + width * 0.9 }));
    expect(model.sent).toEqual([
      { action: "track", id: "" },
      { action: "alive", id: "2" },
      { action: "moment", id: "2" },
    ]);
    expect(root.querySelector(".lz-cursor")).not.toBeNull();
    const moment = {
      position: 2,
      chain: [],
      name: "h.0: mm",
      bytes: "5 B",
      source: { file: "cell_compilation.py", line: 7, text: "loss.backward()" },
      categories: [["activations", "5 B"]],
      alive: [
        { bytes: "5 B", category: "activations", label: "<i>h</i>", chain: [], line: "line 3", keeper: "kept by out.logits" },
      ],
      aliveCount: 3,
    };
    model.emit("msg:custom", { kind: "moment", moment: { ...moment, position: 1, name: "late answer" } });
    const panel = root.querySelector('[data-panel="alive"]');
    expect(panel?.textContent).not.toContain("late answer");
    model.emit("msg:custom", { kind: "moment", moment });
    for (const text of ["Alive at op 3", "5 B at h.0: mm", "loss.backward()", "<i>h</i>", "line 3 · kept by out.logits", "and 2 smaller"]) {
      expect(panel?.textContent).toContain(text);
    }
    const slider = root.querySelector('[role="slider"]');
    for (const key of ["ArrowLeft", "Enter"]) slider?.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    expect(model.sent.at(-1)).toEqual({ action: "moment", id: "1" });
    root.querySelector(".lz-peak")?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    expect(root.querySelector(".lz-cursor")).toBeNull();
    expect(panel?.textContent).toContain("Alive at the peak");
  });

  it("shows another plan everywhere: verdict, chart, live storages, and pieces", () => {
    const batch: Batch = {
      size: 8,
      recorded: 8,
      group: 1,
      split: "off",
      choices: [["off", "off"]],
      words: "in one piece",
      pieces: 1,
      blocked: [],
      blockedCount: 0,
    };
    const { root, model } = start(batch);
    expect(model.sent).toEqual([
      { action: "shown", id: "0.0" },
      { action: "largest", id: "" },
      { action: "track", id: "" },
    ]);
    expect(root.querySelector('input[data-action="batch-size"]')).not.toBeNull();
    const larger: Memory = {
      ...memory,
      count: 6,
      points: { range: [0, 6], at: [0, 1, 2, 3, 4, 5], bytes: [[10, 40, 5, 10, 20, 5]], ops: ["a", "b", "c", "d", "e", "f"] },
      categories: [{ name: "activations", label: "activations", peak: 40, peakText: "40 B", most: 40, mostText: "40 B" }],
      peak: 40,
      peakText: "40 B",
      peakAt: 1,
      verdict: "too-big",
      verdictText: "Too big by 10 B in 2 pieces: needs 40 B of 30 B on cpu",
      verdictShort: "Too big · 40 B of 30 B",
      alive: [{ bytes: "40 B", category: "activations", label: "h.0 · relu", chain: [] }],
      pieces: [
        [0, "piece 1"],
        [3, "piece 2"],
      ],
    };
    model.emit("msg:custom", {
      kind: "plan",
      memory: larger,
      batch: { ...batch, size: 16, words: "in 2 pieces of 8 samples", pieces: 2 },
      device: "given",
      note: "",
    });
    const chip = root.querySelector('[data-verdict="too-big"]');
    expect(chip?.textContent).toBe("Too big · 40 B of 30 B · for 16 samples");
    expect(root.querySelectorAll("[data-verdict]")).toHaveLength(1);
    expect(root.querySelector('[data-chart="memory"]')?.getAttribute("aria-label")).toContain("peak 40 B");
    expect(root.querySelector(".lz-capacity")).not.toBeNull();
    expect([...root.querySelectorAll(".lz-piece-name title")].map((name) => name.textContent)).toEqual(["piece 1", "piece 2"]);
    expect(root.querySelector('[data-panel="alive"]')?.textContent).toContain("h.0 · relu");
    expect(root.textContent).toContain("in 2 pieces of 8 samples · peak 40 B");
    model.set("state", "running");
    model.set("progress", { done: 50, total: 100, seconds: 2, label: "h.0", piece: 2, pieces: 2 });
    expect(root.textContent).toContain("piece 2 of 2 · op 50 of 100");
  });

  it("hides the static picture before it while it is alive, and leaves nothing behind", () => {
    const { model, root, stop } = start();
    stop();
    expect(root.isConnected).toBe(false);
    expect(model.listeners).toBe(0);
    const area = document.createElement("div");
    area.className = "jp-OutputArea";
    const output = document.createElement("div");
    output.className = "jp-OutputArea-child";
    const image = document.createElement("img");
    image.className = "lazyviz-static";
    output.append(image);
    const el = document.createElement("div");
    area.append(output, el);
    document.body.replaceChildren(area);
    const undo = widget.render({ model, el });
    expect(output.style.display).toBe("none");
    undo();
    expect(output.style.display).toBe("");
  });
});

describe("text", () => {
  it("is truncated at its end", () => {
    expect(cut("transformer.h.0.attn.c_attn", 80, 12)).toMatch(/^transf.*…$/);
    expect(cut("relu", 80, 12)).toBe("relu");
  });

  it.each([
    [0, "0 B"],
    [1536, "1.50 KiB"],
    [1_048_570, "1.00 MiB"],
    [151_000_000, "144 MiB"],
  ])("%d bytes read as %s", (bytes, text) => {
    expect(bytesText(bytes)).toBe(text);
  });
});
