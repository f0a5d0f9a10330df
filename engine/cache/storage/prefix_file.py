"""The file of a cached prefix: the text that was read and the state after it, as safetensors.

Tensors: `text` I32 [n], first in the file so that only it is read at a start; `state` U8, the
model's state as in a pool row, followed by the hidden state after it (fp32) if stored. Metadata:
`format`; `variant` of the model, within which states are bitwise equal; `owner` and `salt` to which
the text belongs; a checksum of the text with the metadata, and one of the rest.

Files of format 1 may have logits in place of the hidden state. They are read as states without one.

These files are made by the engine only, never by a client. They are validated nevertheless, since a
disk may return something else than was written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

from engine.cache.storage.snapshot import StateLayout
from engine.errors import StateMalformed
from engine.protocol.token_ids import ID_BYTES, unpack_ids
from engine.safetensors_container import Tensor, parse_header, read_through, serialize

FORMAT = "minserve.prefix.2"
FORMER = "minserve.prefix.1"


@dataclass(frozen=True)
class Head:
    """The content of a file, except for the state."""

    owner: str
    salt: str
    text: bytes  # packed token ids
    with_hidden: bool
    bytes: int  # size of the whole file


class _Contents(NamedTuple):
    """What the beginning of a file says about it."""

    head: Head
    state_sum: str
    start: int  # first byte of the state


def state_bytes(with_hidden: bool, shape: StateLayout) -> int:
    """Return the bytes of a state, with or without a hidden state."""
    return shape.bytes + (shape.hidden_bytes if with_hidden else 0)


def most_state_bytes(shape: StateLayout) -> int:
    """Return the most bytes that a file of any format has after its text."""
    return shape.bytes + max(shape.hidden_bytes, _logits_bytes(shape))


def write(head: Head, state: bytes, variant: str) -> bytes:
    """Return the file's content.

    `state` includes the hidden state if `head` says so; `head.bytes` is ignored.
    """
    metadata = {
        "format": FORMAT,
        "variant": variant,
        "owner": head.owner,
        "salt": head.salt,
        "with_hidden": str(int(head.with_hidden)),
        "text_sum": _text_sum(variant, head, head.with_hidden),
        "state_sum": _sum(state),
    }
    text = Tensor("text", "I32", [len(head.text) // ID_BYTES], head.text)
    return serialize(metadata, [text, Tensor("state", "U8", [len(state)], state)])


def read_head(file: BinaryIO, most: int) -> bytes:
    """Read a file up to the state, with at most `most` bytes of text."""
    return read_through(file, "text", most)


def parse_head(content: bytes, variant: str, shape: StateLayout) -> Head:
    """Parse and validate the beginning of a file. Raises StateMalformed."""
    return _parse(content, variant, shape).head


def parse(content: bytes, variant: str, shape: StateLayout) -> bytes:
    """Parse and validate a whole file; return the state, and its hidden state if stored.

    Raises StateMalformed.
    """
    head, state_sum, start = _parse(content, variant, shape)
    if len(content) != head.bytes:
        raise StateMalformed(f"the file has {len(content)} bytes; its header says {head.bytes}")
    if _sum(content[start:]) != state_sum:
        raise StateMalformed("the state's checksum is wrong: the file is damaged")
    state = content[start : start + state_bytes(head.with_hidden, shape)]
    hidden = np.frombuffer(state, "<f4", offset=shape.bytes)
    if not shape.is_finite(memoryview(state)[: shape.bytes]) or not np.isfinite(hidden).all():
        raise StateMalformed("the state has values that are not finite")
    return state


def _parse(content: bytes, variant: str, shape: StateLayout) -> _Contents:
    try:
        header = parse_header(content)
        told, start = header.metadata, header.data_start
        begin, end = header.tensors["text"]["data_offsets"]
        former = told["format"] == FORMER
        if not (former or told["format"] == FORMAT) or told["variant"] != variant:
            raise StateMalformed("the file has another format, or is of another model")
        if begin != 0 or type(end) is not int or not 0 < end <= len(content) - start:
            raise StateMalformed("the file ends within its text")
        extended = told["with_logits" if former else "with_hidden"] == "1"
        size = start + end + state_bytes(extended and not former, shape)
        size += _logits_bytes(shape) if extended and former else 0
        text = content[start : start + end]
        head = Head(told["owner"], told["salt"], text, extended and not former, size)
        if told["text_sum"] != _text_sum(variant, head, extended):
            raise StateMalformed("the text's checksum is wrong: the file is damaged")
        ids = unpack_ids(text)
        if not 0 <= min(ids) <= max(ids) < shape.vocab_size:
            raise StateMalformed("the text has a token id outside the model's vocabulary")
        return _Contents(head, told["state_sum"], start + end)
    except (ValueError, TypeError, LookupError) as error:
        raise StateMalformed(f"not the file of a cached state: {error!r}") from None


def _logits_bytes(shape: StateLayout) -> int:
    return 4 * shape.vocab_size


def _sum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _text_sum(variant: str, head: Head, extended: bool) -> str:
    """Return the checksum of a file's text and metadata; `extended`: more follows its state."""
    digest = hashlib.blake2b(head.text, digest_size=16)
    digest.update(json.dumps([variant, head.owner, head.salt, extended]).encode())
    return digest.hexdigest()
