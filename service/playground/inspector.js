/** The card that tells of one token: what it was, how likely, and what else might have stood there.
 *
 * It follows the pointer, a tap, or the arrow keys while the text has the focus. */

import { element, say } from "./dom.js";
import { percent, short, visible } from "./format.js";

const EDGE = 8; // pixels that stay free at the window's sides

/** Shows cards for the units of any number of texts, in `card`. */
export class Inspector {
  constructor(card) {
    this.card = card;
    this._text = null;
    this._unit = null;
    addEventListener("scroll", () => this._place(), { passive: true });
    addEventListener("resize", () => this._place());
    document.addEventListener("pointerdown", (event) => {
      if (!this._text?.host.contains(event.target)) this.hide();
    });
  }

  /** @param {import("./text.js").GrowingText} text */
  attach(text) {
    const { host } = text;
    host.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this._point(text, event.target);
    });
    host.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== host) this.hide();
    });
    host.addEventListener("click", (event) => this._point(text, event.target));
    host.addEventListener("blur", () => this.hide());
    host.addEventListener("keydown", (event) => this._key(text, event));
  }

  /** Whether a card was there to be hidden. */
  hide() {
    const shown = this._unit !== null;
    this._current()?.classList.remove("current");
    this._unit = null;
    this.card.hidden = true;
    return shown;
  }

  _point(text, target) {
    const unit = text.unitOf(target);
    if (unit && unit !== this._unit) this._show(text, unit);
  }

  _key(text, event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !text.units.length) return;
    const at = this._text === text && this._unit ? this._unit.index : -1;
    const last = text.units.length - 1;
    const to = {
      ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this._show(text, text.units[to]);
    this._current()?.scrollIntoView({ block: "nearest" });
    this._place();
    say(spoken(this._unit));
  }

  _show(text, unit) {
    this.hide();
    this._text = text;
    this._unit = unit;
    this._current()?.classList.add("current");
    this.card.replaceChildren(...unit.tokens.map(describe));
    this.card.hidden = false;
    this._place();
  }

  _current() {
    return this._unit && this._text.elementOf(this._unit);
  }

  /** Below the token, above it where there is no room, and within the window in any case. */
  _place() {
    const at = this._current()?.getClientRects()[0];
    if (!at) return;
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const right = document.documentElement.clientWidth - width - EDGE;
    const below = at.bottom + EDGE;
    const fits = below + height + EDGE <= window.innerHeight;
    this.card.style.left = `${Math.max(EDGE, Math.min(at.left, right))}px`;
    this.card.style.top = `${fits ? below : Math.max(EDGE, at.top - height - EDGE)}px`;
  }
}

/** The tokens that the server named at a place, the most likely first. */
function ranked(token) {
  return Object.entries(token.top ?? {}).sort((one, other) => other[1] - one[1]);
}

function describe(token) {
  const head = element("p", { class: "token-name" }, element("code", {}, visible(token.name)));
  if (token.logprob === null) {
    head.append(element("span", {}, "the first token: nothing before it"));
    return element("div", {}, head);
  }
  head.append(element("span", {}, `${percent(token.logprob)} · ${short(token.logprob)} nats`));
  const rows = ranked(token).map(([name, logprob]) => {
    const bar = element("span", { class: "share", "aria-hidden": "true" });
    bar.style.setProperty("--share", Math.exp(logprob).toFixed(4));
    return element(
      "li", { class: name === token.name ? "own" : null },
      element("code", {}, visible(name)), bar, element("span", {}, percent(logprob)),
    );
  });
  return element("div", {}, head, element("ul", {}, ...rows));
}

function spoken(unit) {
  return unit.tokens.map((token) => {
    const name = visible(token.name);
    if (token.logprob === null) return `${name}: the first token`;
    const others = ranked(token).filter(([other]) => other !== token.name).slice(0, 3);
    const rest = others.map(([other, logprob]) => `${visible(other)} ${percent(logprob)}`);
    return `${name}: ${percent(token.logprob)}${rest.length ? `; also ${rest.join(", ")}` : ""}`;
  }).join(". ");
}
