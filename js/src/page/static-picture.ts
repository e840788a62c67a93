// Hides the static picture in the output above a live widget; it is for readers without a kernel.

const OUTPUT = ".jp-OutputArea-child, .output_area, .cell-output";
const AREA = ".jp-OutputArea, .output, .output_container";

/** Hides the picture (with this id, else the nearest before `widget` in its cell); returns a function to undo it. */
export function hideStaticPicture(widget: HTMLElement, id: string): () => void {
  const hidden: HTMLElement[] = [];
  let timer: ReturnType<typeof setTimeout> | undefined;
  let tries = 0;
  const look = (): void => {
    const picture = id ? document.getElementById(id) : nearestBefore(widget);
    const output = picture?.closest<HTMLElement>(OUTPUT) ?? picture;
    if (output && !output.contains(widget)) {
      output.style.display = "none";
      hidden.push(output);
    } else if (tries++ < 40) {
      // The widget may be rendered before the picture's output, and before it is attached to the page.
      timer = setTimeout(look, 250);
    }
  };
  look();
  return () => {
    clearTimeout(timer);
    for (const output of hidden) output.style.removeProperty("display");
  };
}

function nearestBefore(widget: HTMLElement): HTMLElement | null {
  const area = widget.closest(AREA);
  let nearest: HTMLElement | null = null;
  for (const picture of area?.querySelectorAll<HTMLElement>("img.lazyviz-static") ?? []) {
    if (picture.compareDocumentPosition(widget) & Node.DOCUMENT_POSITION_FOLLOWING) nearest = picture;
  }
  return nearest;
}
