/** Writing: a prompt goes out, its answer streams in below it, and may be stopped, gone on with and
 * kept as a state. */

import { Answer } from "./answer.js";
import { byId, copied, NO_COPY, say } from "./dom.js";
import { seconds, short, whole } from "./format.js";
import { Notice } from "./notice.js";
import { showBefore } from "./tree.js";

const BEGINNING = "Write the beginning of a text.";

/** The panel Write. */
export class Writing {
  /** @param {{server: any, states: any, tree: any, sampling: any, model: () => string|undefined,
   *   onTokens: () => void, onModelGone: () => void}} parts */
  constructor(parts) {
    this.parts = parts;
    this.prompt = byId("prompt");
    this.answer = new Answer(byId("answer"), () => this._showPace());
    this.notice = new Notice(byId("write-error"));
    this.prompt.placeholder = BEGINNING;
    this._saving = false;
    const actions = {
      generate: () => this.run(), stop: () => this.stop(), continue: () => this.goOn(),
      save: () => this.save(), copy: () => this.copy(), clear: () => this.clear(),
    };
    for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
    this._show();
  }

  get field() {
    return this.prompt;
  }

  /** The texts whose tokens may be looked at. */
  get texts() {
    return [this.answer.grown];
  }

  get running() {
    return this.answer.running;
  }

  /** Another state was chosen. What is written stays, unless that state stands after it. */
  moveTo(state) {
    this.notice.clear();
    const written = this.prompt.value + this.answer.text;
    if (state?.text?.endsWith(written)) this.prompt.value = "";
    this._empty();
    showBefore(byId("write-before"), state);
    this.prompt.placeholder = state === null ? BEGINNING : "Write more, or let the model continue.";
  }

  async run() {
    if (this.running || this.notice.waiting) return;
    this._empty();
    this.notice.clear();
    this.parts.sampling.mark(null);
    const { server, tree, sampling, model } = this.parts;
    const body = { prompts: [this.prompt.value], model: model(), ...sampling.read() };
    if (tree.state) body.state = tree.state.id;
    const asked = this.answer.ask(server, body);
    this._show();
    say("Generating.");
    try {
      if (!(await asked)) return;
    } catch (error) {
      this._refused(error);
    }
    this._end();
  }

  /** Ends what is under way; what has come stays. */
  stop() {
    this.answer.stop();
  }

  /** The answer becomes part of the prompt, and the text goes on. */
  goOn() {
    if (this.running) return;
    this.prompt.value += this.answer.text;
    this.prompt.scrollTop = this.prompt.scrollHeight;
    this.run();
  }

  /** Keeps the state after all that is to be seen: the prompt and the answer. */
  async save() {
    if (this.running || this._saving) return;
    const { states, tree, model } = this.parts;
    this._saving = true;
    this.notice.clear();
    try {
      const text = this.prompt.value + this.answer.text;
      await states.save(text, tree.state?.id ?? null, model());
      say("Saved as a state.");
      this._remark("Saved. Choose the state in the tree to continue from here, as often as you like.");
    } catch (error) {
      this._refused(error, () => this.save());
    } finally {
      this._saving = false;
    }
  }

  async copy() {
    const done = await copied(this.prompt.value + this.answer.text);
    this._remark(done ? "Copied, with the prompt." : NO_COPY);
  }

  clear() {
    if (this.running) return;
    this.prompt.value = "";
    this._empty();
    this.notice.clear();
    this.prompt.focus();
  }

  _end() {
    const { grown, pace } = this.answer;
    this._showPace();
    this._show();
    if (grown.units.length) this.parts.onTokens();
    if (grown.overfull) this._remark(`Only the first ${whole(grown.units.length)} tokens are coloured.`);
    const stopped = pace.end === "you" ? "Stopped" : "Ended";
    if (pace.end !== "an error") say(`${stopped} after ${whole(pace.tokens)} tokens.`);
    // The button that had the focus may have gone with the answer's end.
    if (document.activeElement === document.body) byId("generate").focus({ preventScroll: true });
  }

  async _refused(error, again = () => this.run()) {
    // What a state that is gone leaves behind is cleared away, and then the error is told.
    if (error.code === "state_not_found") await this.parts.tree.load();
    if (error.param === "model") this.parts.onModelGone();
    this.notice.show(error, again);
    this.parts.sampling.mark(error.param);
    this.prompt.toggleAttribute("aria-invalid", /^prompts?\b/.test(error.param ?? ""));
  }

  _remark(text) {
    const note = byId("write-note");
    note.textContent = text;
    note.hidden = text === "";
  }

  _empty() {
    this.answer.drop();
    this._remark("");
    this.prompt.removeAttribute("aria-invalid");
    byId("pace").hidden = true;
    this._show();
  }

  _show() {
    const { running } = this;
    const written = !this.answer.empty;
    const generate = byId("generate");
    const stop = byId("stop");
    // Focus goes with the button that takes the other's place.
    const held = document.activeElement === (running ? generate : stop);
    generate.hidden = running;
    stop.hidden = !running;
    if (held) (running ? stop : generate).focus({ preventScroll: true });
    byId("save").hidden = running;
    for (const id of ["continue", "copy", "clear"]) byId(id).hidden = running || !written;
    stop.parentElement.classList.toggle("running", running);
    const { host } = this.answer.grown;
    host.classList.toggle("growing", running);
    host.setAttribute("aria-busy", String(running));
  }

  _showPace() {
    const { pace } = this.answer;
    if (!pace) return;
    const { start, first, tokens, end } = pace;
    // Of an answer that was refused there is nothing to tell.
    byId("pace").hidden = tokens === 0 && end === "an error";
    byId("pace-tokens").textContent = whole(tokens);
    byId("pace-first").textContent = first === null ? "–" : seconds((first - start) / 1000);
    byId("pace-rate").textContent = short(this.answer.rate);
    byId("pace-end").textContent = end ?? "–";
  }
}
