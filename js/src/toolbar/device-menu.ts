// The device menu: devices of this machine and known GPUs to plan for. Nothing runs on the device chosen here.

import { html, on } from "../page/dom";
import type { Planning } from "../model/throttled-plan-requests";
import type { Batch, Devices, Memory } from "../model/types";

const OWN = "given"; // the device of the block

export class DeviceMenu {
  readonly element: HTMLElement;
  readonly #menu = html("select", { class: "lz-button", "data-action": "device", "aria-label": "Device to plan for" });
  readonly #status = html("span", { class: "lz-said lz-planning", role: "status" });

  #told = "";

  #chosen: string;
  readonly #planning: Planning;

  constructor(
    chosen: string,
    devices: Devices,
    planning: Planning,
  ) {
    this.#chosen = chosen;
    this.#planning = planning;
    this.#menu.title = `Device to plan for; Evaluate runs where the tensors are. ${devices.note}`;
    for (const [title, entries] of devices.groups) {
      const options = entries.map(([value, label]) => html("option", { value }, label));
      this.#menu.append(html("optgroup", { label: title }, ...options));
    }
    this.#menu.value = chosen;
    on(this.#menu, "change", () => {
      planning.want("device", this.#menu.value);
    });
    this.element = html("span", "lz-batch-pair", this.#menu, this.#status);
  }

  /** Shows the device of the displayed plan. */
  show(device: string, memory: Memory, batch: Batch | null): void {
    this.#chosen = device;
    const cut = batch?.split === "auto" ? ", in as few pieces as fit there" : "";
    this.#told = device === OWN ? "" : `Evaluate runs on ${memory.recordedOn}${cut}`;
    this.refresh();
  }

  /** Shows that the plan for another device is being computed. */
  refresh(): void {
    const waits = this.#planning.awaits("device");
    if (!waits) this.#menu.value = this.#chosen;
    const name = this.#menu.value === OWN ? "the block's own device" : this.#menu.value;
    this.#status.textContent = waits ? `planning for ${name}…` : this.#told;
    this.element.title = this.#status.textContent;
    this.tellFit();
  }

  /** Shows the name of the chosen device, with its memory if there is room. */
  tellFit(): void {
    const menu = this.#menu;
    for (const option of menu.options) option.text = option.title ||= option.text;
    const chosen = menu.options[menu.selectedIndex];
    // Below its maximum width, the menu is as wide as its text.
    if (chosen && menu.offsetWidth >= parseFloat(getComputedStyle(menu).maxWidth)) chosen.text = chosen.text.split(" · ")[0] ?? "";
  }
}
