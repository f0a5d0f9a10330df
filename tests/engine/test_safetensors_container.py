"""The safetensors container: what the library reads, and headers that are not believed."""

from __future__ import annotations

import io
import struct

import pytest
from safetensors.numpy import load

from engine.errors import StateMalformed
from engine.safetensors_container import (
    MAX_HEADER_BYTES,
    Tensor,
    parse_header,
    read_through,
    serialize,
)

# An order that the library would not write: it sorts tensors by type.
CONTENT = serialize(
    {"owner": "ä"},
    [
        Tensor("text", "I32", [2], struct.pack("<2i", 7, 8)),
        Tensor("state", "F32", [1, 2], struct.pack("<2f", 1, 2)),
    ],
)


def test_the_library_reads_what_is_written_in_its_order() -> None:
    tensors = load(CONTENT)
    assert tensors["text"].tolist() == [7, 8] and tensors["state"].tolist() == [[1, 2]]
    header = parse_header(CONTENT)
    assert header.metadata == {"owner": "ä"} and header.data_start % 8 == 0
    assert [one["data_offsets"] for one in header.tensors.values()] == [[0, 8], [8, 16]]


def test_the_beginning_of_a_file_is_read_up_to_a_tensors_end() -> None:
    assert read_through(io.BytesIO(CONTENT), "text", 100) == CONTENT[:-8]
    assert read_through(io.BytesIO(CONTENT), "text", 4) == CONTENT[:-12]
    assert read_through(io.BytesIO(CONTENT[:5]), "text", 100) == CONTENT[:5]
    assert read_through(io.BytesIO(CONTENT), "none", 100) == CONTENT[:-16]


def headed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (headed(b" " * MAX_HEADER_BYTES + b"{}"), "length is given as"),
        (struct.pack("<Q", 2**63) + b"{}", "length is given as"),
        (headed(b'{"a": {}, "a": {}}'), "duplicate name"),
        (headed(b'{"__metadata__": {"a": 1}}'), "object of strings"),
        (headed(b'{"__metadata__": []}'), "object of strings"),
        (headed(b"[]"), "not a JSON object"),
        (headed(b"[" * 60000), "not valid JSON"),
    ],
)
def test_a_header_is_bounded_and_checked(content: bytes, words: str) -> None:
    with pytest.raises(StateMalformed, match=words):
        parse_header(content)
