// Controls of the plan: batch size, pieces, and device. Python computes the plans, because it simulates the allocator.

import { BatchControls } from "./batch-controls";
import { DeviceMenu } from "./device-menu";
import { group, html } from "../page/dom";
import { Planning } from "../model/throttled-plan-requests";
import type { Batch, Devices, LargestMessage, Memory, PlanMessage, Send, State } from "../model/types";

export interface PlanEvents {
  ask: Send;
  go(chain: string[]): void;
  /** The number of findings may have changed. */
  counted(): void;
}

export class PlanControls {
  readonly element: HTMLElement;
  readonly settings: readonly (readonly [title: string, control: HTMLElement])[];
  readonly findings: readonly HTMLElement[];
  readonly #planning: Planning;
  readonly #batch: BatchControls | null;
  readonly #device: DeviceMenu;
  #version: string;
  readonly #note = html("p", "lz-batch-note");

  #shown: { batch: Batch | null; device: string };
  readonly #events: PlanEvents;

  constructor(
    shown: { batch: Batch | null; device: string },
    devices: Devices,
    memory: Memory,
    events: PlanEvents,
  ) {
    this.#shown = shown;
    this.#events = events;
    this.#version = devices.version;
    this.#planning = new Planning(events.ask, () => {
      this.element.classList.toggle("lz-asking", this.#planning.asking);
      this.#device.refresh();
    });
    this.#device = new DeviceMenu(devices.chosen, devices, this.#planning);
    this.#batch = shown.batch ? new BatchControls(shown.batch, memory, this.#planning, events) : null;
    this.element = group("Plan", { class: "lz-batch" }, this.#device.element);
    this.#device.show(devices.chosen, memory, shown.batch);
    this.element.append(...(this.#batch?.parts ?? []));
    this.settings = this.#batch ? [["Split batch", this.#batch.split]] : [];
    this.findings = [this.#note, ...(this.#batch ? [this.#batch.blocked] : [])];
  }

  /** Requests the current plan and, because it takes longer, separately the largest batch that fits. */
  begin(): void {
    this.refresh();
    if (this.#batch) this.#planning.want("largest");
  }

  tellFit(): void {
    this.#device.tellFit();
  }

  stop(): void {
    this.#batch?.stop();
  }

  /** Requests the plan if it has changed or has new measurements. */
  refresh(): void {
    this.#events.ask("shown", this.#version);
  }

  /** Shows another plan; false if a newer choice has superseded it. */
  show(message: PlanMessage): boolean {
    const { batch, device } = message;
    this.#version = message.version;
    const overtaken = this.#planning.wanted("device") !== undefined;
    if (!overtaken) {
      this.#note.textContent = message.note;
      const other = device !== this.#shown.device || batch?.split !== this.#shown.batch?.split;
      this.#shown = { batch, device };
      if (batch) this.#batch?.show(batch, message.memory);
      if (other && this.#batch) {
        this.#batch.showLargest(null);
        this.#planning.want("largest"); // it depends on the device and the split
      }
    }
    this.#planning.answered(message);
    if (!overtaken) this.#device.show(device, message.memory, batch);
    this.#events.counted();
    return !overtaken;
  }

  showLargest(message: LargestMessage): void {
    if (message.note) this.#note.textContent = message.note;
    this.#events.counted();
    this.#planning.answered(message);
    if (this.#planning.wanted("device") === undefined) this.#batch?.showLargest(message);
  }

  showState(state: State): void {
    this.#batch?.showState(state);
  }
}
