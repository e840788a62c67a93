// The static picture in the output before the widget is for readers without a kernel: a live widget hides it.

/** Hides the picture with this id as soon as it is there; returns how to stop looking and show it again. */
export function hideStaticPicture(id: string): () => void {
  if (!id) return () => undefined;
  const hidden: HTMLElement[] = [];
  let timer: ReturnType<typeof setTimeout> | undefined;
  let tries = 0;
  const look = (): void => {
    for (const picture of document.querySelectorAll<HTMLElement>(`img[id="${CSS.escape(id)}"]`)) {
      const output = picture.closest<HTMLElement>(".jp-OutputArea-child, .output_area, .cell-output") ?? picture;
      if (output.querySelector(".lazyviz")) continue;
      output.style.display = "none";
      hidden.push(output);
    }
    // The picture's output may be rendered after the widget's.
    if (!hidden.length && tries++ < 40) timer = setTimeout(look, 250);
  };
  look();
  return () => {
    clearTimeout(timer);
    for (const output of hidden) output.style.removeProperty("display");
  };
}
