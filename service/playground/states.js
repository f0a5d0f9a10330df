/** Kept states: the server's list of them, and which came from which.
 *
 * The server knows every state, but not its ancestors. What this page has made it remembers itself,
 * with the text before each state, until the tab is closed.
 *
 * A start is a text that the model's folder offers to begin from. Its state has an id of its own, is
 * made when it is first used, and made anew where it has expired or belonged to other weights. */

import { keep, recall } from "./memory.js";

const LINEAGE = "minserve.lineage";
const MOST_TEXT = 4000; // characters that are remembered of the text before a state
const MOST_LISTED = 200;
const MOST_TITLE = 24; // characters
const BETWEEN_SECONDS = 600; // that a state lives between two pieces of a text, should the page go
const BUSY_TRIES = 5;
const BUSY_MS = 500; // between them

/**
 * A state as the server tells it, and what the page knows of it.
 * @typedef {{id: string, tokens: number, bytes: number, tier: string, expires: number,
 *   busy: boolean, parent: string|null, text: string|null, title: string|null}} State
 */

/** @typedef {{id: string, title: string, text: string}} Start `id`: of the state after it */

/** The states of this key. Every change ends with a new list. */
export class States {
  /** @param {import("./server.js").Server} server */
  constructor(server) {
    this.server = server;
    this._lineage = remembered();
    /** @type {State[]} */
    this.all = [];
    this.more = false; // there are more than are listed
    this.listeners = [];
    /** @type {Start[]} */
    this.starts = [];
    this._making = new Map(); // promises of starts' states, by their ids
    this._shown = new Set(); // ids that are listed however many states there are
    this._partial = new Set(); // ids of states of half-read texts, which are not listed
  }

  /** What the model's folder offers to begin from, as /v1/models tells it. */
  offer(starts) {
    this.starts = starts.map(({ name, title, text }) => ({ id: `start:${name}`, title, text }));
    for (const listener of this.listeners) listener();
  }

  /** @param {string|null} id @returns {State|undefined} */
  get(id) {
    return this.all.find((state) => state.id === id);
  }

  /** Those that were made after the state `parent`, or after none that is there. */
  children(parent) {
    return this.all.filter((state) => state.parent === parent);
  }

  async load() {
    const listed = await this.server.json(`v1/states?limit=${MOST_LISTED}`);
    this.more = listed.has_more;
    const data = listed.data.filter((state) => !this._partial.has(state.id));
    const there = new Set(data.map((state) => state.id));
    if (this.more) {
      const missing = [...this._shown].filter((id) => !there.has(id));
      for (const state of await Promise.all(missing.map((id) => this.look(id)))) {
        if (state) { data.push(state); there.add(state.id); }
      }
    }
    const known = (id) => this._lineage.get(id);
    const starts = new Map(this.starts.map((start) => [start.id, start]));
    this.all = data.map((state) => {
      let parent = known(state.id)?.parent ?? null;
      // What has gone leaves its place to what it came from.
      while (parent !== null && !there.has(parent)) parent = known(parent)?.parent ?? null;
      const start = starts.get(state.id);
      const text = known(state.id)?.text ?? start?.text ?? null;
      return { ...state, parent, text, title: start?.title ?? null };
    });
    this.all.sort((one, other) => one.created - other.created);
    for (const listener of this.listeners) listener();
  }

  /** A state as the server tells it, or null where there is none of this id. */
  async look(id) {
    try {
      return await this.server.json(`v1/states/${encodeURIComponent(id)}`);
    } catch (error) {
      if (error.code === "state_not_found") return null;
      throw error;
    }
  }

  /** Sees to it that the state after a start is kept, without a new list.
   * @param {Start} start */
  begin(start, model) {
    let making = this._making.get(start.id);
    if (!making) {
      making = this._begin(start, model).finally(() => this._making.delete(start.id));
      this._making.set(start.id, making);
    }
    return making;
  }

  async _begin({ id, text }, model) {
    this._shown.add(id);
    if (await this.look(id)) return;
    await this.server.json("v1/states", { method: "POST", body: { prompt: text, id, model } });
  }

  /** Reads a piece of a text after the state `before`, or at the beginning. `partial` is the state
   * that the piece before has left, which this one replaces. */
  async readPiece(text, { partial, before, signal }) {
    const query = new URLSearchParams({ ttl: String(BETWEEN_SECONDS) });
    if (partial !== null) query.set("id", partial);
    if (partial ?? before) query.set("state", partial ?? before);
    const made = await this.server.json(`v1/states/text?${query}`, { method: "POST", text, signal });
    this._partial.add(made.id);
    return made;
  }

  /** Keeps the state of a text that has been read, under a name if it is given one. `end` is the
   * text's end, `before` the state that it was read after. */
  async keepRead(partial, { name, before, end }) {
    const path = `v1/states/${encodeURIComponent(partial)}/fork`;
    const made = await this.server.json(path, { method: "POST", body: name ? { id: name } : {} });
    this._shown.add(made.id);
    this._remember(made.id, before, end);
    await this.discard(partial);
    await this.load();
    return made;
  }

  /** Deletes the state of a half-read text; one that cannot be deleted expires soon. */
  async discard(partial) {
    for (let tries = 0; tries < BUSY_TRIES; tries += 1) {
      try {
        await this.server.json(`v1/states/${encodeURIComponent(partial)}`, { method: "DELETE" });
        return;
      } catch (error) {
        // A piece that was given up is busy until the engine's next step.
        if (error.code !== "state_busy") return;
      }
      await new Promise((resolve) => { setTimeout(resolve, BUSY_MS); });
    }
  }

  /** Keeps the state after `text`, which was written after the state `parent`. */
  async save(text, parent, model) {
    const body = { prompt: text, model };
    if (parent !== null) body.state = parent;
    const made = await this.server.json("v1/states", { method: "POST", body });
    this._remember(made.id, parent, (this._lineage.get(parent)?.text ?? "") + text);
    await this.load();
    return this.get(made.id);
  }

  /** The same state once more; without a name the server makes one up. */
  async fork(id, name) {
    const path = `v1/states/${encodeURIComponent(id)}/fork`;
    const made = await this.server.json(path, { method: "POST", body: name ? { id: name } : {} });
    if (made.id !== id) this._remember(made.id, id, this._lineage.get(id)?.text ?? null);
    await this.load();
    return this.get(made.id);
  }

  async remove(id) {
    await this.server.json(`v1/states/${encodeURIComponent(id)}`, { method: "DELETE" });
    await this.load();
  }

  _remember(id, parent, text) {
    this._lineage.set(id, { parent, text: text === null ? null : text.slice(-MOST_TEXT) });
    keep(LINEAGE, JSON.stringify([...this._lineage]));
  }
}

function remembered() {
  try {
    return new Map(JSON.parse(recall(LINEAGE) || "[]"));
  } catch {
    return new Map();
  }
}

/** What a state is called in the tree: the end of its text, unless somebody gave it a name. */
export function title(state) {
  if (state.title) return state.title;
  const generated = /^st_[0-9a-f]{32}$/.test(state.id);
  if (!generated) return state.id;
  const text = (state.text ?? "").replace(/\s+/g, " ").trim();
  if (!text) return `${state.id.slice(0, 11)}…`;
  const characters = Array.from(text);
  if (characters.length <= MOST_TITLE) return text;
  // From the beginning of a word, if there is one.
  const end = characters.slice(-MOST_TITLE).join("");
  return `…${end.replace(/^\S* (?=\S)/, "").trim()}`;
}
