/** What the model's folder offers to begin from: a button for each start. A press begins after it,
 * the next one at the beginning again. */

import { button, byId } from "./dom.js";
import { Notice } from "./notice.js";

/** The buttons. */
export class Starts {
  /** @param {{states: any, tree: any, model: () => string|undefined, onModelGone: () => void}} parts */
  constructor(parts) {
    this.parts = parts;
    this.notice = new Notice(byId("starts-error"));
    this._host = byId("starts-offer");
    this._busy = false;
    parts.states.listeners.push(() => this.render());
  }

  render() {
    const { states, tree } = this.parts;
    byId("starts").hidden = states.starts.length === 0;
    const made = [...this._host.children];
    const same = made.length === states.starts.length
      && made.every((one, i) => one.dataset.start === states.starts[i].id);
    if (!same) {
      this._host.replaceChildren(...states.starts.map((start) => button(
        start.title, () => this.choose(start.id), { "data-start": start.id },
      )));
    }
    // What a screen reader is at stays in the document.
    for (const one of this._host.children) {
      one.setAttribute("aria-pressed", String(one.dataset.start === tree.chosen));
    }
  }

  async choose(id) {
    const { states, tree, model, onModelGone } = this.parts;
    if (this._busy || this.notice.waiting) return;
    this.notice.clear();
    if (tree.chosen === id) {
      tree.choose(null);
      return;
    }
    this._busy = true;
    this._host.setAttribute("aria-busy", "true");
    try {
      await states.begin(states.starts.find((start) => start.id === id), model());
      await states.load();
      tree.choose(id);
    } catch (error) {
      if (error.param === "model") onModelGone();
      this.notice.show(error, () => this.choose(id));
    } finally {
      this._busy = false;
      this._host.removeAttribute("aria-busy");
    }
  }
}
