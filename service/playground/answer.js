/** One answer: streamed into a text, timed, stopped and gone on with. */

import { oncePerFrame } from "./dom.js";
import { GrowingText, tokensOf } from "./text.js";

const ENDS = {
  stop: "end of text or stop string", length: "max tokens", timeout: "the server's time limit",
};

/** An answer in `host`; `onNews` is called at most once per frame while it grows. */
export class Answer {
  constructor(host, onNews) {
    this.grown = new GrowingText(host);
    this.pace = null; // of what was asked for last
    this._request = null;
    this._tell = oncePerFrame(onNews);
  }

  get running() {
    return this._request !== null;
  }

  get text() {
    return this.grown.text;
  }

  get empty() {
    return this.grown.empty;
  }

  /** Tokens per second after the first of them; NaN where there was no second one. */
  get rate() {
    const { first, last, tokens, counted } = this.pace;
    return tokens > counted && last > first ? (tokens - counted) / ((last - first) / 1000) : NaN;
  }

  /** Adds what `body` asks for to the text. Resolves when that has ended, with false if it was
   * dropped meanwhile. Throws ServerError. */
  async ask(server, body) {
    const request = new AbortController();
    const pace = { start: performance.now(), first: null, last: null, tokens: 0, end: null };
    this._request = request;
    this.pace = pace;
    try {
      for await (const frame of server.stream("v1/generate", body, request.signal)) {
        if (this._request !== request) return false;
        this._take(frame, pace);
      }
    } catch (error) {
      if (this._request !== request) return false;
      pace.end = error.name === "AbortError" ? "you" : "an error";
      if (pace.end === "an error") throw error;
    } finally {
      if (this._request === request) {
        this._request = null;
        this.grown.end();
      }
    }
    return true;
  }

  /** Ends what is under way; what has come stays. */
  stop() {
    this._request?.abort();
  }

  /** Ends what is under way, of which nothing more is shown, and empties the text. */
  drop() {
    this.stop();
    this._request = null;
    this.pace = null;
    this.grown.clear();
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
    this.grown.add(frame.text ?? "", frame.logprobs ? tokensOf(frame.logprobs) : []);
    if (frame.finish_reason) pace.end = ENDS[frame.finish_reason] ?? frame.finish_reason;
    this._tell();
  }
}
