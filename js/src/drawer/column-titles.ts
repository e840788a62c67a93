/** Explanations of the code pane's columns, shown on hover. */
export const headTitles: readonly string[] = [
  "",
  "",
  "Bytes allocated by the line's ops, including those of functions and modules that it calls. Allocations of the backward pass count for the line that runs it, such as loss.backward(); hover over a line to see its gradients",
  "Share of the projected peak: tensors allocated by the line that are alive at the peak. Paler: its gradients, allocated by another line",
  "Seconds that the line's ops took in the run; before a run, their projected time, ≈, where the device's speed is known",
];
