// What is wrong with the graph as it is on screen now: what overlaps, is cut or too small, in words.
() => {
  const faults = [];
  const seen = (box) => box.width > 0 && box.height > 0;
  const shapes = [...document.querySelectorAll('.lz-graph .lz-box, .lz-graph .lz-lane')].map((element) => ({
    id: element.dataset.node ?? element.dataset.lane,
    open: element.querySelector('.lz-frame') !== null,
    box: element.querySelector('.lz-frame, .lz-card:not(.lz-behind)').getBoundingClientRect(),
    texts: [...element.querySelectorAll('text')].filter((text) => text.textContent),
  }));
  const apart = (a, b, by = 0) =>
    a.right <= b.left + by || b.right <= a.left + by || a.bottom <= b.top + by || b.bottom <= a.top + by;
  const inside = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
  shapes.forEach((one, n) => {
    for (const other of shapes.slice(0, n)) {
      if (apart(one.box, other.box, 0.5)) continue;
      const [inner, outer] = one.box.width * one.box.height < other.box.width * other.box.height ? [one, other] : [other, one];
      if (!outer.open || !inside(inner.box, outer.box)) faults.push(`${one.id} and ${other.id} overlap`);
    }
    one.texts.forEach((text, at) => {
      const box = text.getBoundingClientRect();
      if (!inside(box, { left: one.box.left - 0.5, right: one.box.right + 7, top: one.box.top - 9, bottom: one.box.bottom + 2 }))
        faults.push(`"${text.textContent}" reaches out of ${one.id}`);
      for (const other of one.texts.slice(0, at)) {
        if (!apart(box, other.getBoundingClientRect(), 4)) faults.push(`"${text.textContent}" is over "${other.textContent}"`);
      }
      if (box.height < 8) faults.push(`"${text.textContent}" is ${box.height} pixels high`);
    });
    if (one.open) {
      for (const text of one.texts) {
        for (const other of shapes) {
          if (other !== one && !other.open && !apart(text.getBoundingClientRect(), other.box, 3)) {
            faults.push(`the title "${text.textContent}" is over ${other.id}`);
          }
        }
      }
    }
  });
  const labels = [...document.querySelectorAll('.lz-edge-label')].map((text) => [text, text.getBoundingClientRect()]);
  const lines = [...document.querySelectorAll('.lz-edge-line')];
  for (const [text, box] of labels.filter(([, box]) => seen(box))) {
    for (const shape of shapes) {
      if (!shape.open && !apart(box, shape.box, 3)) faults.push(`the label "${text.textContent}" is over ${shape.id}`);
    }
    for (const [other, its] of labels) {
      if (other !== text && seen(its) && !apart(box, its, 2)) faults.push(`two labels "${text.textContent}" overlap`);
    }
    if (text.classList.contains('lz-edge-shape')) continue; // on its line
    for (const line of lines) {
      const around = line.getBoundingClientRect();
      if (apart({ left: around.left - 1, right: around.right + 1, top: around.top, bottom: around.bottom }, box)) continue;
      const matrix = line.getScreenCTM();
      const length = line.getTotalLength();
      for (let at = 0; at <= length; at += 2) {
        const point = line.getPointAtLength(at).matrixTransform(matrix);
        if (point.x > box.left && point.x < box.right && point.y > box.top + 2 && point.y < box.bottom - 2) {
          faults.push(`a line crosses the label "${text.textContent}"`);
          break;
        }
      }
    }
  }
  const titles = [...document.querySelectorAll('.lz-frame-title')].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const flag = document.querySelector('.lz-graph .lz-flag')?.getBoundingClientRect();
  for (const [text, box] of titles.filter(([, box]) => seen(box))) {
    if (flag && !apart(flag, box)) faults.push(`the flag of the peak is over the title "${text}"`);
    for (const line of lines) {
      const matrix = line.getScreenCTM();
      const length = line.getTotalLength();
      if (matrix.a < 0.8) continue; // titles are larger than what they are about
      let behind = 0; // pixels that it runs along the title
      let last = null;
      for (let at = 0; at <= length; at += 2) {
        const point = line.getPointAtLength(at).matrixTransform(matrix);
        const within = point.x > box.left && point.x < box.right && point.y > box.top + 2 && point.y < box.bottom - 2;
        if (within && last) behind += Math.abs(point.x - last.x);
        last = within ? point : null;
      }
      if (behind > 12) faults.push(`a line runs behind the title "${text}"`);
    }
  }
  return faults;
}
