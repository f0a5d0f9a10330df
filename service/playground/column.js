/** A column of a fork: a state that is chosen, and how it goes on with the sentence. */

import { Answer } from "./answer.js";
import { button, copied, element, NO_COPY, say } from "./dom.js";
import { short, whole } from "./format.js";
import { Notice } from "./notice.js";
import { title } from "./states.js";

export const BEGINNING = "";
export const NONE = "/none"; // no id has a slash

/** One column, made into `host`. */
export class Column {
  /**
   * @param {HTMLElement} host
   * @param {string} label of the choice
   * @param {{server: any, states: any, sampling: any, model: () => string|undefined,
   *   onTokens: () => void, onModelGone: () => void}} parts
   * @param {() => void} onChange is told when an answer begins or ends, or the choice changes
   */
  constructor(host, label, parts, onChange) {
    Object.assign(this, { parts, onChange });
    this.choice = element("select", { "aria-label": `${label}: what goes before` });
    this.choice.addEventListener("change", () => { this.touched = true; onChange(); });
    this.touched = false; // the choice is its user's
    this._said = element("p", { class: "said" });
    const text = element("div", { class: "text", role: "group", "aria-label": `${label}: answer` });
    this.answer = new Answer(text, () => this._showPace());
    const failed = element("div", { class: "notice", hidden: true });
    this.notice = new Notice(failed);
    this._note = element("p", { class: "note" });
    this._acts = [
      button("Continue", () => this.goOn()), button("Save", () => this.save()),
      button("Copy", () => this.copy(), { class: "quiet" }),
    ];
    this._halt = button("Stop", () => this.stop());
    this._head = element("h2");
    this._result = element(
      "div", { class: "result", hidden: true }, this._head, this._said, text, failed, this._note,
      element("div", { class: "row" }, this._halt, ...this._acts),
    );
    this._from = null; // the id of the state that the answer follows; null is the beginning
    this._start = null; // the start whose state that is, if it is one
    this._sentence = "";
    this._asking = false;
    this._stopped = false;
    this._saving = false;
    host.append(this.choice, this._result);
  }

  get running() {
    return this._asking;
  }

  /** Whether a state, or the beginning, is chosen for this column. */
  get used() {
    return this.choice.value !== NONE;
  }

  /** What there is to choose; `preset` is chosen as long as nobody has chosen. */
  offer(preset) {
    const { states } = this.parts;
    const { value } = this.choice;
    const starts = new Set(states.starts.map(({ id }) => id));
    const others = states.all.filter(({ id }) => !starts.has(id));
    const group = (label, all, name) => (all.length ? [element(
      "optgroup", { label }, ...all.map((one) => element("option", { value: one.id }, name(one))),
    )] : []);
    this.choice.replaceChildren(
      element("option", { value: NONE }, "–"), element("option", { value: BEGINNING }, "Beginning"),
      ...group("Offered by the model", states.starts, (start) => start.title),
      ...group("States", others, title),
    );
    this.choice.value = this.touched ? value : preset;
    // The state that was chosen has gone.
    if (this.choice.selectedIndex < 0) this.choice.value = NONE;
  }

  /** Begins to go on with `sentence`. */
  run(sentence) {
    const { value } = this.choice;
    this.touched = true;
    this.answer.drop();
    this._from = value === BEGINNING ? null : value;
    this._start = this.parts.states.starts.find(({ id }) => id === value) ?? null;
    this._sentence = sentence;
    this._head.textContent = this.choice.selectedOptions[0].textContent;
    this._said.textContent = sentence;
    this._result.hidden = false;
    return this._ask();
  }

  /** Ends what is under way; what has come stays. */
  stop() {
    this._stopped = true;
    this.answer.stop();
  }

  /** Takes the result away. */
  clear() {
    this.answer.drop();
    this.notice.clear();
    this._result.hidden = true;
  }

  /** The answer goes on where it ended. */
  goOn() {
    if (!this.running && !this.notice.waiting) this._ask();
  }

  async save() {
    if (this.running || this._saving || this.notice.waiting) return;
    const { states, model } = this.parts;
    this._saving = true;
    this.notice.clear();
    try {
      await this._begin();
      await states.save(this._sentence + this.answer.text, this._from, model());
      this._note.textContent = "Saved as a state.";
      say("Saved as a state.");
    } catch (error) {
      this._refused(error, () => this.save());
    } finally {
      this._saving = false;
    }
  }

  async copy() {
    const done = await copied(this._sentence + this.answer.text);
    this._note.textContent = done ? "Copied, with the sentence." : NO_COPY;
  }

  async _ask() {
    const { server, sampling, model, onTokens } = this.parts;
    this.notice.clear();
    this._asking = true;
    this._stopped = false;
    this._note.textContent = "";
    this._show();
    try {
      await this._begin();
      const body = { prompts: [this._sentence + this.answer.text], model: model(), ...sampling.read() };
      if (this._from !== null) body.state = this._from;
      if (!this._stopped) await this.answer.ask(server, body);
    } catch (error) {
      this._refused(error, () => this.goOn());
    }
    this._asking = false;
    this._showPace();
    this._show();
    if (this.answer.grown.units.length) onTokens();
  }

  /** A start's state is made where there is none. */
  async _begin() {
    if (this._start) await this.parts.states.begin(this._start, this.parts.model());
  }

  async _refused(error, again) {
    const { states, sampling, onModelGone } = this.parts;
    // What a state that is gone leaves behind is cleared away, and then the error is told.
    if (error.code === "state_not_found") await states.load().catch(() => {});
    if (error.param === "model") onModelGone();
    sampling.mark(error.param);
    this.notice.show(error, again);
  }

  _show() {
    const { running } = this;
    const { host } = this.answer.grown;
    // Focus goes with the button that takes the other's place.
    const held = running ? this._acts.includes(document.activeElement) : document.activeElement === this._halt;
    this._halt.hidden = !running;
    for (const act of this._acts) act.hidden = running;
    if (held) (running ? this._halt : this._acts[0]).focus({ preventScroll: true });
    host.classList.toggle("growing", running);
    host.setAttribute("aria-busy", String(running));
    this.onChange();
  }

  _showPace() {
    const { pace, rate } = this.answer;
    if (!pace?.tokens) return;
    const parts = [`${whole(pace.tokens)} tokens`, `${short(rate)} tokens/s`];
    if (pace.end) parts.push(`ended by ${pace.end}`);
    this._note.textContent = parts.join(" · ");
  }
}
