/** Server-sent events out of a stream of bytes, wherever the chunks were cut. */

/**
 * The data of each event. A character or an event may be spread over any number of chunks, lines
 * may end as they like; an event that was not ended does not count.
 * @param {ReadableStream<Uint8Array>} stream @returns {AsyncGenerator<string>}
 */
export async function* events(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      // A carriage return at the very end may be half of a line break.
      const held = rest.endsWith("\r") ? 1 : 0;
      const lines = rest.slice(0, rest.length - held).split(/\r\n|\n|\r/);
      rest = lines.pop() + rest.slice(rest.length - held);
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    // Whoever stops listening ends the request.
    await reader.cancel().catch(() => {});
  }
}
