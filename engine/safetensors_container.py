"""The safetensors container: named tensors and string metadata in one run of bytes.

Layout: 8 bytes with the header's length (little endian), a JSON header padded to 8 bytes, then the
tensors' bytes in the header's order. Source: https://huggingface.co/docs/safetensors

This module knows only the container. The formats that use it (`engine.cache.storage.snapshot`,
`engine.cache.storage.prefix_file`) check what the tensors mean. engine/NOTES.md explains why the
safetensors library neither writes nor reads these files; tests do read them with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from engine.errors import StateMalformed

MAX_HEADER_BYTES = 2**16

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size


class Tensor(NamedTuple):
    """A tensor to be written: little-endian `data`; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: Sequence[int]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; entries of `tensors` are not validated and may be anything."""

    metadata: dict[str, str]
    tensors: dict[str, Any]  # by name
    data_start: int  # offset of the first tensor's bytes in the file


def serialize(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> bytes:
    """Return a container with the tensors in the given order."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + len(tensor.data)
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((_LENGTH.pack(len(text)), text, *(tensor.data for tensor in tensors)))


def parse_header(content: bytes, what: str = "the file") -> Header:
    """Parse the header of a container.

    Args:
        content: the file, or its beginning.
        what: what error messages call the file.

    Raises StateMalformed, also for a duplicate name and for metadata that are not all strings. The
    header's length is checked before parsing: at most MAX_HEADER_BYTES, and within `content`.
    """
    if len(content) < LENGTH_BYTES:
        raise StateMalformed(f"{what} has {len(content)} bytes, too few for a safetensors file")
    (length,) = _LENGTH.unpack_from(content)
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(content) - LENGTH_BYTES):
        raise StateMalformed(
            f"the header's length is given as {length} bytes; allowed: 2 to {MAX_HEADER_BYTES}, "
            "within the file"
        )
    start = LENGTH_BYTES + length
    try:
        header = json.loads(content[LENGTH_BYTES:start].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise StateMalformed(f"the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise StateMalformed("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise StateMalformed("__metadata__ must be an object of strings")
    return Header(metadata, header, start)


def read_through(file: BinaryIO, name: str, most: int) -> bytes:
    """Read a file from its beginning to the end of one tensor.

    Args:
        file: the open file, at its beginning.
        name: the tensor's name; tensors after it are not read.
        most: the most bytes of tensors to read.

    Returns:
        The header and the tensors up to this one. Less if the file is damaged, which `parse_header`
        or the caller notices.
    """
    start = file.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        return start
    (length,) = _LENGTH.unpack(start)
    header = file.read(min(length, MAX_HEADER_BYTES))
    try:
        end = json.loads(header)[name]["data_offsets"][1]
        return start + header + file.read(min(max(int(end), 0), most))
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return start + header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has a duplicate name")
    return values
