/** The tree of states: a chip for each below the one that it was made after, and a card of the one
 * that the page goes on from. */

import { button, byId, element, say } from "./dom.js";
import { bytes, until, whole } from "./format.js";
import { Notice } from "./notice.js";
import { title } from "./states.js";

const SURE_MS = 4000; // in which a second press deletes

/** Shows in `host` the text that stands before what is written, as far as the page knows it. */
export function showBefore(host, state) {
  host.hidden = state === null;
  host.textContent = state ? state.text ?? `After ${state.id}. This page does not know its text.` : "";
  host.classList.toggle("unknown", state !== null && state.text === null);
}

/** Shows `states`; `onChoose` is told of the state (or null, the beginning) that was chosen,
 * `onGoOn` when its text shall be gone on with. */
export class Tree {
  /** @param {import("./states.js").States} states */
  constructor(states, onChoose, onGoOn) {
    Object.assign(this, { states, onChoose, onGoOn });
    this.chosen = null; // an id
    this._host = byId("tree");
    this._card = byId("state-card");
    this.notice = new Notice(byId("states-error"));
    this._busy = false;
    states.listeners.push(() => this.render());
    byId("states-again").addEventListener("click", () => this.load());
    this.render();
  }

  load() {
    return this._do(() => this.states.load());
  }

  /** The state that the page goes on from; null is the beginning of a text. */
  get state() {
    return this.states.get(this.chosen) ?? null;
  }

  choose(id) {
    this.chosen = id;
    this.render();
    this.onChoose(this.state);
    say(id === null ? "At the beginning." : `After ${title(this.state)}.`);
  }

  render() {
    const focused = document.activeElement?.dataset?.state;
    if (this.chosen !== null && !this.state) {
      say("The chosen state no longer exists.");
      this.chosen = null;
      this.onChoose(null);
    }
    const root = element("li", {}, this._chip(null), ...this._branch(null));
    this._host.replaceChildren(element("ul", { class: "tree" }, root));
    if (this.states.more) {
      this._host.append(element("p", { class: "note" }, `Only the first ${whole(this.states.all.length)} states are shown.`));
    }
    if (focused !== undefined) this._find(focused)?.focus();
    this._renderCard();
  }

  _find(id) {
    return [...this._host.querySelectorAll("button")].find((chip) => chip.dataset.state === id);
  }

  _branch(parent) {
    const children = this.states.children(parent);
    if (!children.length) return [];
    return [element("ul", {}, ...children.map(
      (state) => element("li", {}, this._chip(state), ...this._branch(state.id)),
    ))];
  }

  _chip(state) {
    const id = state?.id ?? null;
    const chip = button("", () => this.choose(id), {
      class: "chip", "aria-pressed": String(id === this.chosen), "data-state": id ?? "",
    });
    const name = state ? title(state) : "Beginning";
    chip.append(element("span", { class: "chip-name" }, name));
    if (state) {
      const unit = element("span", { class: "hidden" }, " tokens");
      chip.append(" ", element("small", {}, whole(state.tokens), unit));
    }
    return chip;
  }

  _renderCard() {
    const { state } = this;
    this._card.hidden = state === null;
    if (state === null || this._card.dataset.state === state.id) {
      if (state === null) this._forget();
      else this._facts(state);
      return;
    }
    this._card.dataset.state = state.id;
    this._figures = element("dl");
    this._facts(state);
    const name = element("input", {
      id: "fork-name", type: "text", maxlength: 128, autocomplete: "off", spellcheck: "false",
      placeholder: "name (optional)",
    });
    const fork = () => this._do(async () => {
      const copy = await this.states.fork(state.id, name.value.trim());
      name.value = "";
      say(`Forked as ${title(copy)}.`);
    });
    name.addEventListener("keydown", (event) => { if (event.key === "Enter") fork(); });
    this._card.replaceChildren(
      this._figures,
      element(
        "div", { class: "row" },
        button("Continue from here", () => this.onGoOn(), { class: "main" }), this._deleteButton(state),
      ),
      element("label", { for: "fork-name" }, "A copy of this state"),
      element("div", { class: "row" }, name, button("Fork", fork)),
    );
  }

  _forget() {
    delete this._card.dataset.state;
    this._card.replaceChildren();
  }

  _facts(state) {
    const facts = [
      ["id", element("code", {}, state.id)],
      ["has read", `${whole(state.tokens)} token${state.tokens === 1 ? "" : "s"}`],
      ["size", bytes(state.bytes)],
      ["kept on", state.tier ?? "–"],
      ["expires", state.expires ? `${until(state.expires)}, unless used` : "–"],
    ];
    if (state.busy) facts.push(["busy", "a running request will replace it"]);
    this._figures.replaceChildren(...facts.map(
      ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ));
  }

  _deleteButton(state) {
    let sure = false;
    const made = button("Delete", () => {
      if (sure) {
        this._do(async () => {
          const { parent } = state;
          await this.states.remove(state.id);
          say(`Deleted ${title(state)}.`);
          this._find(parent ?? "")?.focus();
        });
        return;
      }
      sure = true;
      made.textContent = "Delete for good?";
      setTimeout(() => { sure = false; made.textContent = "Delete"; }, SURE_MS);
    }, { class: "quiet danger" });
    return made;
  }

  /** One change at a time; its error stands below the tree. */
  async _do(change) {
    if (this._busy) return;
    this._busy = true;
    this.notice.clear();
    try {
      await change();
    } catch (error) {
      // What has gone meanwhile is no longer shown.
      if (error.status === 404) await this.states.load().catch(() => {});
      this.notice.show(error, error.retryAfter === null ? null : () => this._do(change));
    } finally {
      this._busy = false;
    }
  }
}
