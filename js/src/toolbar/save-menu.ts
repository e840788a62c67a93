// The Save menu: the picture as drawn (SVG, PNG), and files that Python writes (PDF, DOT, the interactive page).

import { html, on, plainButton } from "../page/dom";
import type { FileMessage, Send } from "../model/types";

type Format = [id: string, label: string, python?: boolean];

const FORMATS: Format[] = [
  ["svg", "SVG, as drawn"],
  ["png", "PNG, as drawn"],
  ["pdf", "PDF, as drawn", true],
  ["dot", "DOT, every op", true],
  ["html", "HTML, interactive", true],
];
const LONGEST = 16_000; // maximum pixels per side in browsers
const LARGEST = 2e8; // maximum pixels in total

export class SaveMenu {
  readonly element: HTMLElement;
  readonly #button: HTMLButtonElement;
  readonly #menu = html("div", { class: "lz-save-menu", role: "menu", "aria-label": "Save as", hidden: true });
  readonly #name: string;
  #pieces: Uint8Array<ArrayBuffer>[] = [];

  /** Opens below `button`; `draw` returns the picture as SVG, with its size; `say` reports errors. */
  constructor(
    button: HTMLButtonElement,
    title: string,
    private readonly draw: () => [svg: string, width: number, height: number],
    ask: Send,
    private readonly say: (text: string) => void,
  ) {
    this.#button = button;
    this.#name = title.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|-+$/g, "") || "lazyviz";
    for (const [id, label, python] of FORMATS) {
      const item = plainButton({ role: "menuitem", tabindex: -1, "data-format": id, "data-python": python }, label);
      on(item, "click", () => {
        this.#close();
        if (!python) void this.#save(id);
        else {
          this.#wait(true);
          ask("export", id);
        }
      });
      this.#menu.append(item);
    }
    this.element = button.parentElement ?? html("span", {}, button);
    this.element.append(this.#menu);
    on(this.element, "keydown", (event) => {
      this.#key(event);
    });
    on(this.element, "focusout", (event) => {
      if (!this.element.contains(event.relatedTarget as Node | null)) this.#close(false);
    });
  }

  toggle(): void {
    if (this.#menu.hidden) this.#open();
    else this.#close();
  }

  hear(message: FileMessage): void {
    this.#pieces.push(Uint8Array.from(atob(message.data), (letter) => letter.charCodeAt(0)));
    if (message.more) return;
    const blob = new Blob(this.#pieces, { type: message.type });
    this.#pieces = [];
    this.#wait(false);
    this.say(message.error && `Not saved: ${message.error}`);
    if (!message.error) this.#download(blob, message.format);
  }

  private get items(): HTMLElement[] {
    return [...this.#menu.children].filter((item): item is HTMLElement => getComputedStyle(item).display !== "none");
  }

  #open(): void {
    this.#menu.hidden = false;
    this.#button.setAttribute("aria-expanded", "true");
    const room = this.element.closest(".lazyviz")?.getBoundingClientRect().right ?? Infinity;
    this.#menu.classList.toggle("lz-to-left", this.#button.getBoundingClientRect().left + this.#menu.offsetWidth > room);
    this.items[0]?.focus();
  }

  #close(focus = true): void {
    if (this.#menu.hidden) return;
    this.#menu.hidden = true;
    this.#button.setAttribute("aria-expanded", "false");
    if (focus) this.#button.focus();
  }

  #key(event: KeyboardEvent): void {
    if (this.#menu.hidden) return;
    if (event.key === "Escape") this.#close();
    else {
      const { items } = this;
      const at = items.indexOf(event.target as HTMLElement);
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
      if (to === undefined) return;
      items.at(to % items.length)?.focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  async #save(format: string): Promise<void> {
    const [text, width, height] = this.draw();
    if (format === "svg") this.#download(new Blob([text], { type: "image/svg+xml" }), format);
    else this.#download(await drawn(text, width, height), format);
  }

  #wait(on: boolean): void {
    this.#button.setAttribute("aria-label", on ? "Saving…" : "Save");
    this.#button.setAttribute("aria-busy", String(on));
  }

  #download(blob: Blob | null, suffix: string): void {
    if (!blob) {
      this.say("Not saved: the browser cannot draw a picture of this size");
      return;
    }
    const href = URL.createObjectURL(blob);
    const link = html("a", { href, download: `${this.#name}.${suffix}`, hidden: true });
    this.element.append(link); // VS Code handles the click only if the link is in the page
    link.click();
    link.remove();
    setTimeout(() => {
      URL.revokeObjectURL(href);
    }, 10_000);
  }
}

/** The picture as a PNG at twice its size in pixels. */
async function drawn(text: string, width: number, height: number): Promise<Blob | null> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const scale = Math.min(2, LONGEST / width, LONGEST / height, Math.sqrt(LARGEST / width / height));
  const canvas = html("canvas", { width: Math.round(width * scale), height: Math.round(height * scale) });
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => {
    canvas.toBlob(done, "image/png");
  });
}
