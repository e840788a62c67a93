import { describe, expect, it, vi } from "vitest";
import { RunControls } from "../src/toolbar/run-controls";
import { provideDeferredPart } from "../src/page/load-deferred-bundle";
import * as deferred from "../src/deferred-bundle-entry";
import type { BoxData } from "../src/model/types";

provideDeferredPart(deferred); // as in a saved page

function made(): { controls: RunControls; ask: ReturnType<typeof vi.fn>; go: ReturnType<typeof vi.fn>; find: (action: string) => HTMLButtonElement } {
  const ask = vi.fn();
  const go = vi.fn();
  const controls = new RunControls(ask, go, () => undefined);
  document.body.replaceChildren(controls.element, controls.upTo, controls.values, controls.menu, controls.note, controls.progress, controls.findings);
  const find = (action: string): HTMLButtonElement => {
    const found = document.querySelector<HTMLButtonElement>(`[data-action="${action}"]`);
    if (!found) throw new Error(action);
    return found;
  };
  controls.showState("pending");
  return { controls, ask, go, find };
}

const box: BoxData = { id: "n3", kind: "op", label: "mm", sub: "", phase: "forward" };

describe("the controls of a run", () => {
  it("evaluate, resume a stopped run, and are disabled when everything has run", () => {
    const { controls, ask, find } = made();
    find("evaluate").click();
    expect(ask).toHaveBeenCalledWith("evaluate");
    controls.showState("running");
    expect(find("evaluate").disabled).toBe(true);
    expect(find("cancel").hidden).toBe(false);
    find("cancel").click();
    expect(ask).toHaveBeenLastCalledWith("cancel");
    for (const state of ["interrupted", "failed"] as const) {
      controls.showState(state);
      expect(find("evaluate").textContent).toBe("Resume");
      expect(find("evaluate").disabled).toBe(false);
      expect(find("cancel").hidden).toBe(true);
    }
    controls.showState("done");
    expect(find("evaluate").disabled).toBe(true);
  });

  it("run up to a box that has not run", () => {
    const { controls, ask, find } = made();
    expect(find("evaluate-to").disabled).toBe(true);
    controls.select(box);
    find("evaluate-to").click();
    expect(ask).toHaveBeenCalledWith("evaluate-to", "n3");
    for (const other of [{ ...box, state: "done" as const }, { ...box, kind: "input" as const }, null]) {
      controls.select(other);
      expect(find("evaluate-to").disabled).toBe(true);
    }
  });

  it("keep the focus when the focused button disappears", () => {
    const { controls, find } = made();
    find("evaluate").focus();
    controls.showState("running");
    expect(document.activeElement).toBe(find("cancel"));
    controls.showState("interrupted");
    expect(document.activeElement).toBe(find("evaluate"));
    controls.showState("done");
    expect(document.activeElement).toBe(controls.element);
  });

  it("answer to keys", () => {
    const { controls, ask } = made();
    expect(controls.key(new KeyboardEvent("keydown", { key: "Enter" }))).toBe(false);
    expect(controls.key(new KeyboardEvent("keydown", { key: "Enter", ctrlKey: true }))).toBe(true);
    expect(ask).toHaveBeenCalledWith("evaluate");
    controls.showState("running");
    controls.key(new KeyboardEvent("keydown", { key: ".", metaKey: true }));
    expect(ask).toHaveBeenLastCalledWith("cancel");
  });

  it("offer backends, with the reason if one is unavailable, and say why a choice was refused", () => {
    const { controls, ask, find } = made();
    controls.showChoices({ backend: "eager", backends: [["eager", ""], ["mine", ""], ["<ray>", "needs ray"]], summaries: true, begun: false });
    const menu = document.querySelector("select");
    if (!menu) throw new Error("no menu");
    expect([...menu.options].map((option) => [option.textContent, option.disabled])).toEqual([
      ["eager", false],
      ["mine", false],
      ["<ray> (needs ray)", true],
    ]);
    expect(find("summaries").getAttribute("aria-pressed")).toBe("true");
    find("summaries").click();
    expect(ask).toHaveBeenLastCalledWith("summaries", "off");
    menu.value = "mine";
    menu.dispatchEvent(new Event("change"));
    expect(ask).toHaveBeenLastCalledWith("backend", "mine");
    controls.refuse("cannot be");
    expect(menu.value).toBe("eager");
    expect(controls.note.textContent).toContain("cannot be");
  });

  it("show ops, time left, memory and piece", () => {
    const { controls } = made();
    controls.showState("running");
    expect(controls.progress.textContent).toBe("running");
    controls.showProgress({ done: 5, total: 1000, seconds: 2, left: 61, label: "h.0", memory: "1 MiB held", piece: 2, pieces: 4 });
    expect(controls.progress.textContent).toBe("piece 2 of 4 · op 5 of 1,000 · 2.00 s · about 61.0 s left · 1 MiB held · h.0");
    expect(controls.progress.querySelector("progress")?.value).toBe(5);
  });

  it("list the first NaN and infinity, with a link to the box", () => {
    const { controls, go } = made();
    controls.showFindings([{ kind: "nan", text: "log_3 at line 2", chain: ["g1", "n3"] }]);
    expect(controls.findings.textContent).toContain("log_3 at line 2");
    controls.findings.querySelector("button")?.click();
    expect(go).toHaveBeenCalledWith(["g1", "n3"]);
    controls.showFindings([]);
    expect(controls.findings.textContent).toBe("");
  });
});
