"""The page's scripts, asked directly: streams cut anywhere, metrics, how numbers are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

EVENTS = """async (chunks) => {
  const { events } = await import('./playground/events.js');
  const bytes = chunks.map((chunk) => Uint8Array.from(chunk));
  const stream = new ReadableStream({
    pull(controller) { bytes.length ? controller.enqueue(bytes.shift()) : controller.close(); },
  });
  const found = [];
  for await (const data of events(stream)) found.push(data);
  return found;
}"""

NOTHING = "\N{EN DASH}"
STREAM = (
    'data: {"text": "é😀"}\n\n: a comment\r\n\r\n'
    "data:two\ndata: lines\r\n\r\nevent: x\n\ndata: end\r\r"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_wherever_a_stream_is_cut(page: Any, size: int) -> None:
    raw = (STREAM + "data: unfinished\n").encode()
    chunks = [list(raw[i : i + size]) for i in range(0, len(raw), size)]
    found = page.evaluate(EVENTS, chunks)
    assert json.loads(found[0]) == {"text": "é😀"}
    assert found[1:] == ["two\nlines", "end"]


def test_whoever_stops_listening_ends_the_stream(page: Any) -> None:
    cancelled = page.evaluate("""async () => {
      const { events } = await import('./playground/events.js');
      let cancelled = false;
      const stream = new ReadableStream({
        pull(controller) { controller.enqueue(new TextEncoder().encode('data: x\\n\\n')); },
        cancel() { cancelled = true; },
      });
      for await (const data of events(stream)) break;
      return cancelled;
    }""")
    assert cancelled is True


def test_metrics_are_summed_over_labels(page: Any) -> None:
    text = "\n".join(
        [
            "# HELP a_total words {x} 1",
            'a_total{path="/v1/{id}",said="a \\"quote\\" }"} 2.0',
            "a_total{} 3 1700000000000",
            "b 1e-05",
            'c_bucket{le="+Inf"} +Inf',
            "nothing NaN",
            "broken",
        ]
    )
    found = page.evaluate(
        "async (text) => [...(await import('./playground/exposition.js')).sums(text)]", text
    )
    assert dict(found[:2]) == {"a_total": 5, "b": 1e-05}
    assert [name for name, _ in found] == ["a_total", "b", "c_bucket"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("seconds(0.0123)", "12.3 ms"),
        ("seconds(2)", "2 s"),
        ("seconds(NaN)", NOTHING),
        ("bytes(23040)", "22.5 KiB"),
        ("bytes(900)", "900 bytes"),
        ("short(12345.6)", "12,346"),
        ("short(Infinity)", NOTHING),
        ("percent(Math.log(0.5))", "50.0 %"),
        ("percent(-1000)", "< 0.001 %"),
        ("percent(0)", "100 %"),
        ("until(7300, 0)", "in 2 hours"),
        ("until(90, 0)", "in 90 seconds"),
        ("until(5, 6)", "now"),
        ("duration(59.6)", "1 min 0 s"),
        ("duration(4000)", "1 h 6 min"),
        ("duration(7)", "7 s"),
        ("visible(' a\\n')", "␣a↵"),
    ],
)
def test_how_numbers_are_written(page: Any, call: str, text: str) -> None:
    found = page.evaluate(f"import('./playground/format.js').then((format) => format.{call})")
    assert found == text


PIECES = """async ([text, size]) => {
  const { pieceAt } = await import('./playground/pieces.js');
  const blob = new Blob([text]);
  const found = [];
  for (let at = 0; at < blob.size;) {
    const { text: piece, end } = await pieceAt(blob, at, size);
    found.push(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(piece));
    at = end;
  }
  return found;
}"""


@pytest.mark.parametrize("size", [7, 20, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "The quick  brown fox\n\njumps over\nthe lazy dog.\n",
        "\N{GRINNING FACE}" * 30,  # no white space, four bytes each
        "caf\u00e9 " * 20 + "\n" * 20,
        " " * 50,
    ],
)
def test_pieces_are_the_whole_text(page: Any, text: str, size: int) -> None:
    found = page.evaluate(PIECES, [text, size])
    assert "".join(found) == text
    assert all(len(piece.encode()) <= 1.5 * size for piece in found)


def test_pieces_end_before_white_space(page: Any) -> None:
    text = "The quick  brown fox\n\njumps over\nthe lazy dog.\n"
    expected = ["The quick  brown", " fox\n\njumps over", "\nthe lazy dog.\n"]
    assert page.evaluate(PIECES, [text, 20]) == expected


def test_line_ends_and_the_byte_order_mark_of_a_text(page: Any) -> None:
    text = "\ufeffone\r\ntwo\rthree\n\ufefffour\r\n"
    assert page.evaluate(PIECES, [text, 1000]) == ["one\ntwo\nthree\n\ufefffour\n"]
