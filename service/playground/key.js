/** The API key: asked for when the server wants one, kept as long as the tab. */

import { byId } from "./dom.js";

/** The dialog; `onKey` is called when the key has changed. */
export class KeyDialog {
  constructor(server, onKey) {
    this.server = server;
    this._dialog = byId("key-dialog");
    this._value = byId("key-value");
    byId("key").addEventListener("click", () => this.open(""));
    byId("key-cancel").addEventListener("click", () => this._dialog.close());
    byId("key-forget").addEventListener("click", () => this._use("", onKey));
    this._value.addEventListener("input", () => this._value.setCustomValidity(""));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = this._value.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        this._value.setCustomValidity("A key consists of letters, digits and symbols, without spaces.");
        this._value.reportValidity();
        return;
      }
      this._use(key, onKey);
    });
    this._offer();
  }

  /** Asks for a key; `message` says why. */
  open(message) {
    byId("key").hidden = false;
    const words = byId("key-message");
    words.textContent = message;
    words.hidden = message === "";
    byId("key-forget").hidden = !this.server.key;
    if (this._dialog.open) return;
    this._value.value = "";
    this._dialog.showModal();
    this._value.focus();
  }

  _use(key, onKey) {
    this.server.key = key;
    this._dialog.close();
    this._offer();
    onKey();
  }

  _offer() {
    if (this.server.key) byId("key").hidden = false;
  }
}
