/** Forking: one sentence, gone on with after up to three states side by side. */

import { byId, element, say } from "./dom.js";
import { BEGINNING, Column, NONE } from "./column.js";
import { Notice } from "./notice.js";

const LABELS = ["First column", "Second column", "Third column"];

/** The panel Fork. */
export class Forking {
  /** @param parts as of a column */
  constructor(parts) {
    this.parts = parts;
    this.field = byId("sentence");
    this.notice = new Notice(byId("fork-error"));
    const host = byId("fork-columns");
    this._columns = LABELS.map((label) => {
      const place = element("section", { class: "column", "aria-label": label });
      host.append(place);
      return new Column(place, label, parts, () => this._show());
    });
    parts.states.listeners.push(() => this._offer());
    byId("run-fork").addEventListener("click", () => this.run());
    byId("stop-fork").addEventListener("click", () => this.stop());
    this._offer();
    this._show();
  }

  /** The texts whose tokens may be looked at. */
  get texts() {
    return this._columns.map((column) => column.answer.grown);
  }

  /** The columns have states of their own. */
  moveTo() {}

  async run() {
    if (this._columns.some((column) => column.running || column.notice.waiting)) return;
    this.notice.clear();
    const used = this._columns.filter((column) => column.used);
    if (!used.length) {
      this.notice.show(new Error("Choose for at least one column what it goes on after."));
      return;
    }
    this.parts.sampling.mark(null);
    for (const column of this._columns) if (!column.used) column.clear();
    say("Generating.");
    await Promise.all(used.map((column) => column.run(this.field.value)));
    say("Ended.");
    // States of starts that were made meanwhile are to be seen in the tree.
    await this.parts.states.load().catch(() => {});
  }

  /** Ends what is under way in every column. */
  stop() {
    for (const column of this._columns) column.stop();
  }

  _offer() {
    const { starts, all } = this.parts.states;
    const ids = [...starts, ...all].map(({ id }) => id);
    const first = [...new Set([...ids, BEGINNING])];
    this._columns.forEach((column, i) => column.offer(first[i] ?? NONE));
  }

  _show() {
    const running = this._columns.some((column) => column.running);
    const run = byId("run-fork");
    const stop = byId("stop-fork");
    // Focus goes with the button that takes the other's place.
    const held = document.activeElement === (running ? run : stop);
    run.hidden = running;
    stop.hidden = !running;
    if (held) (running ? stop : run).focus({ preventScroll: true });
    stop.parentElement.classList.toggle("running", running);
  }
}
