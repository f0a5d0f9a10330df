/** Writing: a prompt goes out, its answer streams in below it, and may be stopped, gone on with and
 * kept as a state. */

import { byId, oncePerFrame, say } from "./dom.js";
import { seconds, short, whole } from "./format.js";
import { Notice } from "./notice.js";
import { GrowingText, tokensOf } from "./text.js";
import { showBefore } from "./tree.js";

const BEGINNING = "Write the beginning of a text, for example “ROMEO:”.";
const ENDS = {
  stop: "end of text or stop string", length: "max tokens", timeout: "the server's time limit",
};

/** The panel Write. */
export class Writing {
  /** @param {{server: any, states: any, tree: any, sampling: any, model: () => string|undefined,
   *   onTokens: () => void, onModelGone: () => void}} parts */
  constructor(parts) {
    this.parts = parts;
    this.prompt = byId("prompt");
    this.answer = new GrowingText(byId("answer"));
    this.notice = new Notice(byId("write-error"));
    this.prompt.placeholder = BEGINNING;
    this._request = null; // of the answer that is under way
    this._pace = null; // of the answer that is shown
    this._showPaceSoon = oncePerFrame(() => this._showPace());
    this._saving = false;
    const actions = {
      generate: () => this.generate(), stop: () => this.stop(), continue: () => this.goOn(),
      save: () => this.save(), copy: () => this.copy(), clear: () => this.clear(),
    };
    for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
    this._show();
  }

  get running() {
    return this._request !== null;
  }

  /** Another state was chosen. What is written stays, unless that state stands after it. */
  moveTo(state) {
    this.stop();
    this._request = null; // what comes of it is no longer shown
    this.notice.clear();
    const written = this.prompt.value + this.answer.text;
    if (state?.text?.endsWith(written)) this.prompt.value = "";
    this._empty();
    showBefore(byId("write-before"), state);
    this.prompt.placeholder = state === null ? BEGINNING : "Write more, or let the model continue.";
  }

  async generate() {
    if (this.running || this.notice.waiting) return;
    const request = new AbortController();
    this._request = request;
    this._empty();
    this.notice.clear();
    this.parts.sampling.mark(null);
    const { server, tree, sampling, model } = this.parts;
    const body = { prompts: [this.prompt.value], model: model(), ...sampling.read() };
    if (tree.state) body.state = tree.state.id;
    const pace = { start: performance.now(), first: null, last: null, tokens: 0, end: null };
    this._pace = pace;
    this._show();
    say("Generating.");
    try {
      for await (const frame of server.stream("v1/generate", body, request.signal)) {
        if (this._request !== request) return;
        this._take(frame, pace);
      }
    } catch (error) {
      if (this._request !== request) return;
      if (error.name === "AbortError") {
        pace.end = "you";
      } else {
        pace.end = "an error";
        this._refused(error);
      }
    } finally {
      if (this._request === request) this._end(pace);
    }
  }

  /** Ends what is under way; what has come stays. Whether there was anything. */
  stop() {
    if (!this.running) return false;
    this._request.abort();
    return true;
  }

  /** The answer becomes part of the prompt, and the text goes on. */
  goOn() {
    if (this.running) return;
    this.prompt.value += this.answer.text;
    this.prompt.scrollTop = this.prompt.scrollHeight;
    this.generate();
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
    const text = this.prompt.value + this.answer.text;
    try {
      await navigator.clipboard.writeText(text);
      this._remark("Copied, with the prompt.");
      say("Copied.");
    } catch {
      this._remark("The browser does not allow copying here: it requires HTTPS.");
    }
  }

  clear() {
    if (this.running) return;
    this.prompt.value = "";
    this._empty();
    this.notice.clear();
    this.prompt.focus();
  }

  _take(frame, pace) {
    const count = frame.token_ids.length;
    if (count) {
      pace.last = performance.now();
      if (pace.first === null) {
        pace.first = pace.last;
        pace.counted = count;
      }
      pace.tokens += count;
    }
    this.answer.add(frame.text ?? "", frame.logprobs ? tokensOf(frame.logprobs) : []);
    if (frame.finish_reason) pace.end = ENDS[frame.finish_reason] ?? frame.finish_reason;
    this._showPaceSoon();
  }

  _end(pace) {
    this._request = null;
    this.answer.end();
    this._showPace();
    this._show();
    if (this.answer.units.length) this.parts.onTokens();
    if (this.answer.overfull) {
      this._remark(`Only the first ${whole(this.answer.units.length)} tokens are coloured.`);
    }
    const stopped = pace.end === "you" ? "Stopped" : "Ended";
    if (pace.end !== "an error") say(`${stopped} after ${whole(pace.tokens)} tokens.`);
    // The button that had the focus may have gone with the answer's end.
    if (document.activeElement === document.body) byId("generate").focus({ preventScroll: true });
  }

  async _refused(error, again = () => this.generate()) {
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
    this.answer.clear();
    this._remark("");
    this.prompt.removeAttribute("aria-invalid");
    this._pace = null;
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
    const host = this.answer.host;
    host.classList.toggle("growing", running);
    host.setAttribute("aria-busy", String(running));
  }

  _showPace() {
    if (!this._pace) return;
    const { start, first, last, tokens, end, counted } = this._pace;
    // Of an answer that was refused there is nothing to tell.
    byId("pace").hidden = tokens === 0 && end === "an error";
    byId("pace-tokens").textContent = whole(tokens);
    byId("pace-first").textContent = first === null ? "–" : seconds((first - start) / 1000);
    const rate = (tokens - counted) / ((last - first) / 1000);
    byId("pace-rate").textContent = tokens > counted && last > first ? short(rate) : "–";
    byId("pace-end").textContent = end ?? "–";
  }
}
