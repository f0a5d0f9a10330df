/** Reading: a long text, pasted or in a file, is read piece by piece into a state, from which the
 * page goes on as often as its user likes. */

import { byId, say } from "./dom.js";
import { bytes, duration, short, whole } from "./format.js";
import { Notice } from "./notice.js";
import { pieceAt } from "./pieces.js";
import { showBefore } from "./tree.js";

const SMALLEST = 2 ** 12; // bytes of a piece; the first one has so many
const LARGEST = 2 ** 20;
const PIECE_SECONDS = 0.5; // that a piece is to take
const LONG_PASTE = 20_000; // characters, above which a pasted text is not put into the field
const MOST_END = 2 ** 14; // bytes or characters of a text's end, more than are remembered of it

/** The panel Read. */
export class Reading {
  /** @param {{server: any, states: any, tree: any, onModelGone: () => void,
   *   onAskOn: (id: string) => void}} parts `onAskOn` goes on after a state */
  constructor(parts) {
    this.parts = parts;
    this.field = byId("book");
    this.texts = []; // no tokens are shown here
    this.notice = new Notice(byId("read-error"));
    this._name = byId("read-name");
    this._file = byId("read-file");
    this._source = null; // {blob, name}: a file, or what was pasted and is too long for the field
    this._job = null; // what is being read, or could be gone on with
    this._request = null; // of the piece that is being read
    this._made = null; // the id of the state of the last text that was read whole
    this._file.addEventListener("change", () => {
      const [file] = this._file.files;
      if (file) this._take(file, file.name);
    });
    this.field.addEventListener("paste", (event) => this._paste(event));
    byId("read-other").addEventListener("click", () => { this._drop(); this.field.focus(); });
    byId("run-read").addEventListener("click", () => this.run());
    byId("stop-read").addEventListener("click", () => this.stop());
    byId("ask-on").addEventListener("click", () => this.parts.onAskOn(this._made));
    this._show();
  }

  get running() {
    return this._request !== null;
  }

  /** Another state was chosen, after which the next text is read. */
  moveTo(state) {
    showBefore(byId("read-before"), state);
  }

  async run() {
    if (this.running || this.notice.waiting) return;
    const { tree } = this.parts;
    const blob = this._source?.blob ?? new Blob([this.field.value]);
    this._forget();
    await this._go({
      blob, name: this._name.value.trim(), before: tree.state?.id ?? null, at: 0, partial: null,
      tokens: 0, seconds: 0, size: SMALLEST, end: tree.state?.text ?? "",
    });
  }

  /** Ends what is under way; of what was read nothing is kept. */
  stop() {
    this._request?.abort();
  }

  /** Reads on where `job` stands. */
  async _go(job) {
    const request = new AbortController();
    this._request = request;
    this._job = job;
    this._made = null;
    this._remark("");
    this.notice.clear();
    this._showPace();
    this._show();
    say("Reading.");
    try {
      if (job.at === 0) await this._check(job);
      while (job.at < job.blob.size) await this._piece(job, request.signal);
      const made = await this.parts.states.keepRead(job.partial, job);
      job.partial = null;
      this._made = made.id;
      this._remark(`Read. The state ${made.id} stands after ${whole(made.tokens)} tokens, in ${bytes(made.bytes)}.`);
      say("The text has been read.");
    } catch (error) {
      await this._failed(error, job);
    }
    this._request = null;
    if (this._made !== null) this._job = null;
    this._show();
  }

  /** What would be refused at the end is refused at the beginning; and a state of the name that was
   * given is not to be lost. */
  async _check({ blob, name }) {
    if (blob.size === 0) throw new Error("There is nothing to read. Paste a text, or choose a file.");
    if (name && !/^[A-Za-z0-9._:-]+$/.test(name)) {
      throw new Error("A name consists of letters, digits and . _ : - without spaces.");
    }
    if (name && await this.parts.states.look(name)) {
      throw new Error(`There is a state named ${name} already. Choose another name, or delete it first.`);
    }
  }

  async _piece(job, signal) {
    const begun = performance.now();
    const { text, end } = await pieceAt(job.blob, job.at, job.size);
    const { partial, before } = job;
    const made = await this.parts.states.readPiece(text, { partial, before, signal });
    const seconds = (performance.now() - begun) / 1000;
    Object.assign(job, {
      partial: made.id, at: end,
      end: (job.end + new TextDecoder().decode(text.slice(-MOST_END))).slice(-MOST_END),
      tokens: job.tokens + made.usage.prompt_tokens, seconds: job.seconds + seconds,
    });
    const fitting = job.size * Math.min(4, PIECE_SECONDS / seconds);
    job.size = Math.round(Math.min(LARGEST, Math.max(SMALLEST, fitting)));
    this._showPace();
  }

  async _failed(error, job) {
    if (error.name === "AbortError") {
      this._remark("Stopped. Nothing was kept.");
      say("Stopped.");
    } else {
      if (error.param === "model") this.parts.onModelGone();
      this.notice.show(error, () => this._go(job));
    }
    // A server that asks for patience is given the rest later.
    if (this.notice.waiting) return;
    this._forget();
    if (error.code === "state_not_found") await this.parts.states.load().catch(() => {});
  }

  /** The job that was stopped is not gone on with. */
  _forget() {
    const partial = this._job?.partial ?? null;
    this._job = null;
    if (partial !== null) this.parts.states.discard(partial).catch(() => {});
  }

  /** Text that is not in the field is the source. */
  _take(blob, name) {
    this._source = { blob };
    byId("read-source").textContent = `${name}, ${bytes(blob.size)}`;
    if (!this._name.value && blob instanceof File) this._name.value = named(name);
    this._show();
  }

  _drop() {
    this._source = null;
    this._file.value = "";
    this._show();
  }

  /** What is long would make the page slow if it stood in the field. */
  _paste(event) {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length < LONG_PASTE) return;
    event.preventDefault();
    this._take(new Blob([this.field.value, text]), "What was pasted");
    this.field.value = "";
  }

  _remark(text) {
    const note = byId("read-note");
    note.textContent = text;
    note.hidden = text === "";
  }

  _show() {
    const { running } = this;
    const run = byId("run-read");
    const stop = byId("stop-read");
    const ask = byId("ask-on");
    const held = document.activeElement === (running ? run : stop);
    run.hidden = running;
    stop.hidden = !running;
    ask.hidden = running || this._made === null;
    if (held) (running ? stop : ask.hidden ? run : ask).focus({ preventScroll: true });
    byId("read-chosen").hidden = this._source === null;
    this.field.hidden = this._source !== null;
    this.field.readOnly = running;
    this._name.readOnly = running;
    for (const id of ["read-file", "read-other"]) byId(id).disabled = running;
    stop.parentElement.classList.toggle("running", running);
  }

  _showPace() {
    const { blob, at, tokens, seconds } = this._job;
    byId("read-pace").hidden = false;
    const bar = byId("read-progress");
    bar.max = blob.size || 1;
    bar.value = at;
    byId("read-done").textContent = `${bytes(at)} of ${bytes(blob.size)}`;
    byId("read-tokens").textContent = whole(tokens);
    byId("read-rate").textContent = short(tokens / seconds);
    byId("read-left").textContent = at ? duration((seconds / at) * (blob.size - at)) : "–";
  }
}

/** A state's name out of a file's: what ids may not have becomes a hyphen. */
function named(file) {
  const stem = file.replace(/\.[^.]*$/, "").normalize("NFKD").replace(/[\u0300-\u036f]/g, "");
  return stem.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 128);
}
