/** Numbers as people read them. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** 12,345 */
export const whole = (value) => WHOLE.format(value);

/** 3 significant digits; large numbers whole. */
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  return Math.abs(value) >= 1000 ? WHOLE.format(value) : SHORT.format(value);
}

/** 6.85M */
export const compact = (value) => COMPACT.format(value);

/** Seconds as ms below one second. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 1 ? `${SHORT.format(value * 1000)} ms` : `${SHORT.format(value)} s`;
}

/** 2 min 5 s */
export function duration(value) {
  const all = Math.round(value);
  if (all < 60) return `${all} s`;
  return all < 3600
    ? `${Math.floor(all / 60)} min ${all % 60} s`
    : `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
}

/** 22.5 KiB */
export function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${SHORT.format(value)} ${units[unit]}`;
}

/** How long until a time in seconds since 1970. */
export function until(time, now = Date.now() / 1000) {
  const left = time - now;
  if (left <= 0) return "now";
  const steps = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const [size, name] = steps.find(([each]) => left >= 2 * each) ?? [1, "second"];
  const count = Math.max(1, Math.floor(left / size));
  return `in ${count} ${name}${count === 1 ? "" : "s"}`;
}

/** A log-probability as a percentage. */
export function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  if (value >= 99.95) return "100 %";
  if (value >= 0.1) return `${value.toFixed(1)} %`;
  return value >= 0.001 ? `${value.toFixed(3)} %` : "< 0.001 %";
}

/** A token's name with its blanks to be seen. */
export function visible(name) {
  if (name === "") return "(no text)";
  return name.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}
