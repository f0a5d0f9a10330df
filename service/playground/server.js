/** The server: requests with the key, and errors in the server's own words. */

import { events } from "./events.js";
import { keep, recall } from "./memory.js";

const KEY = "minserve.key";

/** What went wrong. `status` is 0 where no answer came; `retryAfter` is in seconds, or null. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

/** Asks the server that the page came from. */
export class Server {
  /** @param {(error: ServerError) => void} onRefused is told of every 401 */
  constructor(onRefused) {
    this.onRefused = onRefused;
    this._key = recall(KEY);
  }

  get key() {
    return this._key;
  }

  set key(value) {
    this._key = value;
    keep(KEY, value);
  }

  /** The response to a request, if it is a good one. Throws ServerError, or AbortError.
   * @param {string} path without a slash before it, so that it may lie below any other
   * @param {{method?: string, body?: any, text?: Uint8Array, signal?: AbortSignal,
   *   quiet?: boolean}} options `body` is sent as JSON, `text` as it is */
  async ask(path, { method = "GET", body, text, signal, quiet = false } = {}) {
    const headers = {};
    if (body !== undefined) headers["content-type"] = "application/json";
    if (text !== undefined) headers["content-type"] = "text/plain; charset=utf-8";
    if (this.key) headers["x-api-key"] = this.key;
    let response;
    try {
      response = await fetch(path, {
        method, headers, signal, body: body === undefined ? text : JSON.stringify(body),
        cache: "no-store", credentials: "same-origin", redirect: "error",
      });
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new ServerError("The server cannot be reached.");
    }
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status === 401 && !quiet) this.onRefused(error);
    throw error;
  }

  /** The JSON of an answer. */
  async json(path, options) {
    const response = await this.ask(path, options);
    try {
      return await response.json();
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new ServerError("The answer did not arrive whole.", { status: response.status });
    }
  }

  /** The events of a streamed answer. Throws ServerError for one that ends in an error or in the
   * middle. */
  async *stream(path, body, signal) {
    const response = await this.ask(path, { method: "POST", body: { ...body, stream: true }, signal });
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") return;
        const frame = JSON.parse(data);
        if (frame.error) throw told(frame.error, response.status);
        yield frame;
      }
    } catch (problem) {
      if (problem instanceof ServerError || problem.name === "AbortError") throw problem;
    }
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    throw new ServerError("The connection ended before the answer did.");
  }
}

function told(error, status, retryAfter = null) {
  const { message, code, param } = error;
  return new ServerError(String(message), { status, code, param, retryAfter });
}

async function refusal(response) {
  const given = Number(response.headers.get("retry-after") ?? NaN);
  const retryAfter = Number.isFinite(given) ? given : null;
  try {
    const { error } = await response.json();
    return told(error, response.status, retryAfter);
  } catch {
    const message = `The server answered ${response.status} ${response.statusText}`.trim();
    return new ServerError(`${message}.`, { status: response.status, retryAfter });
  }
}
