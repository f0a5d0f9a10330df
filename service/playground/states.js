/** Kept states: the server's list of them, and which came from which.
 *
 * The server knows every state, but not its ancestors. What this page has made it remembers itself,
 * with the text before each state, until the tab is closed. */

import { keep, recall } from "./memory.js";

const LINEAGE = "minserve.lineage";
const MOST_TEXT = 4000; // characters that are remembered of the text before a state
const MOST_LISTED = 200;
const MOST_TITLE = 24; // characters

/**
 * A state as the server tells it, and what the page knows of it.
 * @typedef {{id: string, tokens: number, bytes: number, tier: string, expires: number,
 *   busy: boolean, parent: string|null, text: string|null}} State
 */

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
    const there = new Set(listed.data.map((state) => state.id));
    const known = (id) => this._lineage.get(id);
    this.all = listed.data.map((state) => {
      let parent = known(state.id)?.parent ?? null;
      // What has gone leaves its place to what it came from.
      while (parent !== null && !there.has(parent)) parent = known(parent)?.parent ?? null;
      return { ...state, parent, text: known(state.id)?.text ?? null };
    });
    this.all.sort((one, other) => one.created - other.created);
    for (const listener of this.listeners) listener();
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
