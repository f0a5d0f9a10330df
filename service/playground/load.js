/** What the server is doing: a few of its metrics, asked for while somebody looks. */

import { byId, element } from "./dom.js";
import { sums } from "./exposition.js";
import { seconds, short, whole } from "./format.js";
import { Sparkline } from "./sparkline.js";

const EVERY_MS = 2000;
const LENGTH = 60; // values: two minutes

const gauge = (name) => (now) => now.get(name) ?? null;
const SERIES = [
  { label: "Running", read: gauge("minserve_requests_running"), words: whole },
  { label: "Waiting", read: gauge("minserve_requests_waiting"), words: whole },
  { label: "Tokens/s", read: rate("minserve_generation_tokens_total"), words: short },
  { label: "First token", read: mean("minserve_time_to_first_token_seconds"), words: seconds },
];

/** The figures and their sparklines. */
export class Load {
  /** @param {import("./server.js").Server} server */
  constructor(server) {
    this.server = server;
    this._before = null;
    this._timer = 0;
    this._rows = SERIES.map((series) => {
      const value = element("b", {}, "–");
      const row = element("div", {}, element("span", {}, series.label), value);
      byId("load").append(row);
      return { ...series, value, line: new Sparkline(row, series.label, LENGTH) };
    });
    document.addEventListener("visibilitychange", () => this.watch());
  }

  /** Begins to ask, or goes on; a page that nobody sees asks nothing. */
  watch() {
    clearTimeout(this._timer);
    if (document.hidden) this._before = null;
    else this._ask();
  }

  async _ask() {
    const note = byId("load-error");
    try {
      const response = await this.server.ask("metrics", { quiet: true });
      this._take(sums(await response.text()), performance.now() / 1000);
      note.hidden = true;
    } catch (error) {
      note.textContent = `No metrics: ${error.message}`;
      note.hidden = false;
      this._before = null;
      // A key that does not open them will not do so later; a new one begins again.
      if (error.status === 401 || error.status === 403) return;
    }
    clearTimeout(this._timer);
    if (!document.hidden) this._timer = setTimeout(() => this._ask(), EVERY_MS);
  }

  _take(now, time) {
    const before = this._before;
    for (const { read, words, line, value } of this._rows) {
      const found = read(now, before?.samples, time - (before?.time ?? time));
      line.add(found, words);
      value.textContent = found === null ? "–" : words(found);
    }
    this._before = { samples: now, time };
  }
}

/** Per second, of a counter; one that fell has begun again. */
function rate(name) {
  return (now, before, passed) => {
    const more = now.get(name) - before?.get(name);
    return more >= 0 && passed > 0 ? more / passed : null;
  };
}

/** Of what a histogram was told since; null where it was told nothing. */
function mean(name) {
  return (now, before) => {
    const count = now.get(`${name}_count`) - before?.get(`${name}_count`);
    const sum = now.get(`${name}_sum`) - before?.get(`${name}_sum`);
    return count > 0 ? sum / count : null;
  };
}
