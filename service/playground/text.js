/** Text that grows, plain or token by token with each token's probability under it.
 *
 * The document is changed once per frame. Long texts are cut into blocks at line breaks, of which
 * the browser lays out those in sight only; beyond MOST_MARKED tokens the text goes on unmarked. */

import { element, oncePerFrame } from "./dom.js";
import { visible } from "./format.js";

const MOST_MARKED = 5000;
const BLOCK = 4000; // characters, after which the next line break begins a new block
const SLACK = 24; // pixels that the end may lie out of sight and still be followed
const LONGEST = 20000; // characters of a block without line breaks

/** Lower bounds of the probabilities that look alike; what is below all of them is the last kind. */
export const BOUNDS = [0.9, 0.5, 0.1, 0.01];

/**
 * One token as the server reports it.
 * @typedef {{name: string, logprob: number|null, top: Object<string, number>|null}} Token
 */

/** Characters that came together, and the tokens that they came from: mostly one. */
export class Unit {
  /** @param {number} index its place among the units @param {string} text @param {Token[]} tokens */
  constructor(index, text, tokens) {
    Object.assign(this, { index, text, tokens });
  }

  /** Of all its tokens together; null where a text's first token has none. */
  get logprob() {
    const known = this.tokens.map((token) => token.logprob).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
  }

  /** The class of its looks. */
  get look() {
    if (this.logprob === null) return "first";
    const probability = Math.exp(this.logprob);
    const place = BOUNDS.findIndex((bound) => probability >= bound);
    return `p${place < 0 ? BOUNDS.length : place}`;
  }
}

/** What the answer's `logprobs` say of its tokens. @returns {Token[]} */
export function tokensOf(logprobs) {
  return logprobs.tokens.map((name, i) => ({
    name, logprob: logprobs.token_logprobs[i], top: logprobs.top_logprobs[i],
  }));
}

/** A growing text in `host`. */
export class GrowingText {
  constructor(host) {
    this.host = host;
    this._show = oncePerFrame(() => this.flush());
    this.clear();
  }

  clear() {
    this.text = "";
    this.units = [];
    this._waiting = []; // units and strings that are not in the document yet
    this._pending = []; // tokens whose text has not come yet
    this._block = null;
    this._length = 0; // of the block
    this._lineEnded = false;
    this.host.replaceChildren();
    this.host.classList.remove("marked");
    this.host.removeAttribute("tabindex");
  }

  /** Whether there is nothing in it, tokens without text included. */
  get empty() {
    return this.text === "" && this.units.length === 0;
  }

  /** Whether there were more tokens than are marked. */
  get overfull() {
    return this.units.length >= MOST_MARKED;
  }

  /** Adds text, with the tokens that it came from if these are known. Tokens without text are part
   * of a character, or are held back while they may belong to a stop string: they wait. */
  add(text, tokens = []) {
    this.text += text;
    if (!tokens.length && !this._pending.length) {
      if (text) this._waiting.push(text);
    } else {
      this._pending.push(...tokens);
      if (text) this._unite(text);
    }
    this._show();
  }

  /** The text is whole: tokens that still wait have none. */
  end() {
    if (this._pending.length) this._unite("");
    this.flush();
  }

  _unite(text) {
    if (this.overfull) {
      this._waiting.push(text);
    } else {
      const unit = new Unit(this.units.length, text, this._pending);
      this.units.push(unit);
      this._waiting.push(unit);
    }
    this._pending = [];
  }

  /** Puts what has come into the document, and keeps the end in sight where it was. */
  flush() {
    if (!this._waiting.length) return;
    // Whoever scrolls back to read is left alone.
    const follow = this._beyond() <= SLACK;
    for (const part of join(this._waiting)) this._append(part);
    this._waiting = [];
    if (this.units.length) {
      this.host.classList.add("marked");
      this.host.tabIndex = 0;
    }
    if (follow && this._beyond() > 0) this._block.scrollIntoView({ block: "end" });
  }

  /** The unit that `node` shows or lies in, if any. */
  unitOf(node) {
    const found = node.closest?.("[data-unit]");
    return found && this.host.contains(found) ? this.units[Number(found.dataset.unit)] : undefined;
  }

  /** The element of a unit. */
  elementOf(unit) {
    return this.host.querySelector(`[data-unit="${unit.index}"]`);
  }

  _append(part) {
    if (part instanceof Unit) {
      this._room().append(this._span(part));
      this._length += part.text.length;
      this._lineEnded = part.text.endsWith("\n");
      return;
    }
    // Plain text, cut where blocks may end.
    for (const piece of part.match(/[^\n]{1,20000}\n?|\n/gu) ?? []) {
      const last = this._room().lastChild;
      if (last instanceof Text) last.appendData(piece);
      else this._block.append(piece);
      this._length += piece.length;
      this._lineEnded = piece.endsWith("\n");
    }
  }

  /** The block that the next part belongs to. */
  _room() {
    const full = this._length >= LONGEST || (this._length >= BLOCK && this._lineEnded);
    if (!this._block || full) {
      this._block = element("div", { class: "block" });
      this._length = 0;
      this.host.append(this._block);
    }
    return this._block;
  }

  _span(unit) {
    const kinds = ["token", unit.look];
    if (unit.text.includes("\n")) kinds.push("breaks");
    if (unit.text === "") kinds.push("special");
    const text = unit.text || unit.tokens.map((token) => visible(token.name)).join("");
    return element("span", { class: kinds.join(" "), "data-unit": unit.index }, text);
  }

  /** Pixels that the end lies below what is to be seen, which the bar is no part of. */
  _beyond() {
    const covered = parseFloat(getComputedStyle(document.documentElement).scrollPaddingBottom);
    const { bottom } = (this._block ?? this.host).getBoundingClientRect();
    return bottom - (window.innerHeight - covered);
  }
}

/** Neighbouring strings as one. */
function* join(parts) {
  let text = "";
  for (const part of parts) {
    if (typeof part === "string") {
      text += part;
    } else {
      if (text) yield text;
      text = "";
      yield part;
    }
  }
  if (text) yield text;
}
