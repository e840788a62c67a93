// Formatting of numbers, durations and bytes.

/** `1536` -> `"1.50 KiB"`; the rule of lazyviz/plan/units.py. */
export function bytesText(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = Math.round(bytes);
  let unit = 0;
  while (size >= 1023.5 && unit < units.length - 1) {
    size /= 1024;
    unit++;
  }
  const digits = unit === 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return `${size.toFixed(digits)} ${units[unit] ?? ""}`;
}

/** A duration in microseconds, milliseconds, seconds or minutes. */
export function seconds(value: number): string {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return value < 120 ? `${value.toPrecision(3)} s` : `${Math.round(value / 60)} min`;
}

/** The display name of a category: "KV cache" for "kv_cache". */
export const categoryText = (name: string): string => name.replace("kv_cache", "KV cache");

/** A number with thousands separators, as in 1,924. */
export function grouped(value: number): string {
  return value.toLocaleString("en");
}
