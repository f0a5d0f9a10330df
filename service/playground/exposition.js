/** Prometheus' text exposition, as far as the page needs it: samples by name. */

/**
 * The sums over labels of every series, by name. Lines that are none are passed over.
 * @param {string} text @returns {Map<string, number>}
 */
export function sums(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*$/.exec(line);
    if (!match) continue;
    const value = { "+Inf": Infinity, "-Inf": -Infinity }[match[2]] ?? Number(match[2]);
    if (!Number.isNaN(value)) found.set(match[1], (found.get(match[1]) ?? 0) + value);
  }
  return found;
}
