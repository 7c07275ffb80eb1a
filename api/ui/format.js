// Number formats for display.

const WHOLE = new Intl.NumberFormat("en");

export const whole = (value) => WHOLE.format(Math.round(value));

export const percent = (share) => `${Math.round(100 * share)}%`;

/** A few digits, with the unit that fits: 0.42 ms, 48 ms, 1.3 s, 2 min. */
export function seconds(value) {
  if (value >= 120) return `${Math.round(value / 60)} min`;
  if (value >= 1) return `${digits(value)} s`;
  return `${digits(1000 * value)} ms`;
}

export const milliseconds = (value) => `${digits(1000 * value)} ms`;

export function bytes(value) {
  const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${digits(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const plural = (count, one) => `${whole(count)} ${one}${count === 1 ? "" : "s"}`;

/** Three digits, about. */
export function digits(value) {
  if (value >= 100 || value === 0) return whole(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}
