/** A small line over time, with its words for those who do not see it. */

import { drawing } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;

/** The last `length` values of one series. */
export class Sparkline {
  constructor(host, label, length) {
    Object.assign(this, { label, length, values: [] });
    this._line = drawing("path", { class: "line" });
    this._area = drawing("path", { class: "area" });
    this._svg = drawing(
      "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this._area, this._line,
    );
    host.append(this._svg);
    this._draw("nothing yet");
  }

  /** @param {number|null} value null: there was nothing to measure
   * @param {(value: number) => string} words */
  add(value, words) {
    this.values = [...this.values, value].slice(-this.length);
    const known = this.values.filter((each) => each !== null);
    const now = value === null ? "nothing now" : `now ${words(value)}`;
    this._draw(known.length ? `${now}, at most ${words(Math.max(...known))} lately` : now);
  }

  _draw(words) {
    this._svg.setAttribute("aria-label", `${this.label}: ${words}`);
    const top = Math.max(0, ...this.values);
    const step = WIDTH / (this.length - 1);
    const start = WIDTH - (this.values.length - 1) * step;
    const y = (value) => (HEIGHT - 2 - (top > 0 ? (value / top) * (HEIGHT - 5) : 0)).toFixed(1);
    // A gap in the values is a gap in the line.
    let line = "";
    let area = "";
    let begun = null;
    const x = (i) => (start + i * step).toFixed(1);
    this.values.forEach((value, i) => {
      if (value === null) return;
      const fresh = this.values[i - 1] === null || i === 0;
      if (fresh) begun = i;
      line += `${fresh ? "M" : "L"}${x(i)} ${y(value)}`;
      area += fresh ? `M${x(i)} ${HEIGHT}L${x(i)} ${y(value)}` : `L${x(i)} ${y(value)}`;
      const last = i === this.values.length - 1 || this.values[i + 1] === null;
      if (last && begun === i) line += "h0.1";
      if (last) area += `L${x(i)} ${HEIGHT}Z`;
    });
    this._line.setAttribute("d", line);
    this._area.setAttribute("d", area);
  }
}
