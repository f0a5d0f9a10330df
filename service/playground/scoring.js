/** Scoring: how likely the model finds a text, token by token and as a whole. */

import { byId, say } from "./dom.js";
import { short, whole } from "./format.js";
import { Notice } from "./notice.js";
import { GrowingText, tokensOf } from "./text.js";
import { showBefore } from "./tree.js";

const ALTERNATIVES = 5;

/** The panel Score. */
export class Scoring {
  /** @param {{server: any, tree: any, model: () => string|undefined, onTokens: () => void,
   *   onModelGone: () => void}} parts */
  constructor(parts) {
    this.parts = parts;
    this.own = byId("own");
    this.text = new GrowingText(byId("scored"));
    this.notice = new Notice(byId("score-error"));
    this._request = null;
    byId("run-score").addEventListener("click", () => this.run());
  }

  get field() {
    return this.own;
  }

  /** The texts whose tokens may be looked at. */
  get texts() {
    return [this.text];
  }

  /** Another state was chosen, after which texts are read from now on. */
  moveTo(state) {
    this.stop();
    this.text.clear();
    byId("totals").hidden = true;
    showBefore(byId("score-before"), state);
  }

  stop() {
    this._request?.abort();
  }

  async run() {
    if (this._request || this.notice.waiting) return;
    const request = new AbortController();
    this._request = request;
    byId("run-score").setAttribute("aria-disabled", "true");
    this.notice.clear();
    const { server, tree, model, onTokens, onModelGone } = this.parts;
    const text = this.own.value;
    const state = tree.state ? { state: tree.state.id } : {};
    const ask = (path, body) => server.json(path, {
      method: "POST", body: { ...body, model: model(), ...state }, signal: request.signal,
    });
    try {
      // The sums are the score's; what else might have stood there, an echo tells.
      const { results } = await ask("v1/score", { texts: [text] });
      const echoed = await ask("v1/completions", {
        prompt: text, echo: true, max_tokens: 0, logprobs: ALTERNATIVES,
      });
      this._show(text, results[0], echoed.choices[0].logprobs);
      onTokens();
    } catch (error) {
      // What a state that is gone leaves behind is cleared away, and then the error is told.
      if (error.code === "state_not_found") await tree.load();
      if (error.param === "model") onModelGone();
      if (error.name !== "AbortError") this.notice.show(error, () => this.run());
    } finally {
      this._request = null;
      byId("run-score").removeAttribute("aria-disabled");
    }
  }

  _show(text, score, logprobs) {
    this.text.clear();
    // Offsets count characters as Unicode does; strings here count halves of some.
    const characters = Array.from(text);
    const offsets = [...logprobs.text_offset, characters.length];
    tokensOf(logprobs).forEach((token, i) => {
      this.text.add(characters.slice(offsets[i], offsets[i + 1]).join(""), [token]);
    });
    this.text.end();
    const totals = {
      tokens: whole(score.num_scored_tokens), logprob: `${short(score.total_logprob)} nats`,
      perplexity: short(score.perplexity), bits: short(score.bits_per_byte),
    };
    for (const [name, value] of Object.entries(totals)) byId(`total-${name}`).textContent = value;
    byId("totals").hidden = false;
    const note = byId("score-note");
    note.hidden = !this.text.overfull;
    note.textContent = `Only the first ${whole(this.text.units.length)} tokens are coloured.`;
    say(`Scored: perplexity ${totals.perplexity}, ${totals.bits} bits per byte.`);
  }
}
