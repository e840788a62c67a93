/** What the columns of the code pane mean, said on hover. */
export const headTitles: readonly string[] = [
  "",
  "",
  "Bytes that the line's ops allocate, those of your functions and modules that it calls included. What the backward pass makes counts at the line that runs it, such as loss.backward(); hover a line for what its gradients take there",
  "Share of the projected peak: what the line made and what is alive then. Paler: its gradients, made by another line",
  "Seconds that the line's ops took in the run; before it what is projected for them, ≈",
];
