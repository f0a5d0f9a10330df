/** An error where it happened, in the server's words, with the wait that the server asks for. */

import { element } from "./dom.js";

/** A place for one error at a time. */
export class Notice {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    this._until = 0;
    this._timer = 0;
  }

  /** Whether the server has asked for patience that is not over. */
  get waiting() {
    return Date.now() < this._until;
  }

  clear() {
    clearInterval(this._timer);
    this._until = 0;
    this.host.hidden = true;
    this.host.replaceChildren();
  }

  /** Shows an error; `again`, if given, is offered once the server will have it. */
  show(error, again = null) {
    this.clear();
    const words = element("p", { role: "alert" });
    this.host.append(words);
    this.host.hidden = false;
    // Filled when it is there, or it is not announced.
    words.textContent = error.message;
    if (error.retryAfter !== null && error.retryAfter !== undefined) this._wait(error.retryAfter, again);
  }

  _wait(wait, again) {
    this._until = Date.now() + wait * 1000;
    const act = element("button", { type: "button" });
    act.addEventListener("click", () => { if (!this.waiting) { this.clear(); again?.(); } });
    const tick = () => {
      const left = Math.ceil((this._until - Date.now()) / 1000);
      act.setAttribute("aria-disabled", String(left > 0));
      act.textContent = left > 0 ? `Again in ${left} s` : "Try again";
      if (left <= 0) clearInterval(this._timer);
    };
    tick();
    this._timer = setInterval(tick, 250);
    if (again) this.host.append(act);
  }
}
