/** A long text in pieces, as bytes: however long it is, one piece of it is held in memory.
 *
 * A piece ends before white space, so that the next one begins with a word as it stands in the whole
 * text. Line ends become \n, as models know them, and a mark of the byte order is dropped. */

const LINE_FEED = 10;
const RETURN = 13;
const SPACE = 32;
const NEAR = 4096; // bytes before a piece's end in which a place to cut is looked for

/**
 * The piece of `blob` that begins at the byte `at` and has about `size` bytes; the last one has up
 * to half as many again.
 * @param {Blob} blob @returns {Promise<{text: Uint8Array, end: number}>} `end` is where the next one
 *   begins
 */
export async function pieceAt(blob, at, size) {
  const rest = blob.size - at;
  const last = rest <= size * 1.5;
  const raw = new Uint8Array(await blob.slice(at, at + (last ? rest : size)).arrayBuffer());
  const length = last ? raw.length : cut(raw);
  return { text: normal(raw.subarray(0, length), at === 0), end: at + length };
}

/** Where the last white space of `raw` begins; else where a character does. */
function cut(raw) {
  const least = Math.max(1, raw.length - NEAR);
  for (let i = raw.length - 1; i >= least; i -= 1) {
    if (blank(raw[i]) && !blank(raw[i - 1])) return i;
  }
  let i = raw.length - 1;
  while (i > 1 && (raw[i] & 0xc0) === 0x80) i -= 1;
  return i;
}

const blank = (byte) => byte === SPACE || byte === LINE_FEED || byte === RETURN;

function normal(raw, first) {
  const marked = first && raw[0] === 0xef && raw[1] === 0xbb && raw[2] === 0xbf;
  const from = marked ? raw.subarray(3) : raw;
  if (!from.includes(RETURN)) return from;
  const kept = new Uint8Array(from.length);
  let length = 0;
  for (let i = 0; i < from.length; i += 1) {
    if (from[i] === RETURN) {
      if (from[i + 1] === LINE_FEED) continue;
      kept[length] = LINE_FEED;
    } else {
      kept[length] = from[i];
    }
    length += 1;
  }
  return kept.subarray(0, length);
}
