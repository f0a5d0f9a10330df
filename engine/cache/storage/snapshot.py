"""Snapshot: a named state as one safetensors file; its content is never unpickled or trusted.

Tensors: those of the model's state, by their names, shapes and types (engine/state_spec.py); then
`tail` I32 [n], the last 1 to MOST_TAIL tokens of the text. The state is the one before the tail,
which is read when the text is continued. What follows then gets exactly the logits that it would
have had, and the snapshot needs none.

Metadata, all strings: `format`; `fingerprint` of the model; `tokens`, the length of the text
including the tail; `drawn`, 1 if the tail was generated; `recent`, the last tokens of the text, in
case it ends within a character; `turns`, how many requests have made the text, if any is known;
`digest`, a hash of everything in the file: the other metadata, the
tensors' names, types and shapes, and their bytes.

The digest reveals damage, not forgery, so everything else is validated too. Every length is checked
against the model before anything of that length is allocated. Files of formats 1 (without a digest)
and 2 can be read: they are of models whose states are `cell` and `conv`, as format 3 has them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from engine.config import SCAN_CHUNK
from engine.errors import StateMalformed, StateMismatch
from engine.protocol.token_ids import ID_BYTES, unpack_ids
from engine.safetensors_container import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Tensor,
    parse_header,
    serialize,
)
from engine.state_spec import StateSpec, bytes_of, hidden_bytes_of, offsets_of

FORMAT = "minserve.state.3"
FORMER = ("minserve.state.2", "minserve.state.1")
WITHOUT_DIGEST = "minserve.state.1"
MOST_TAIL = SCAN_CHUNK  # tokens
MOST_RECENT = 4  # tokens; a UTF-8 character has up to four bytes
MOST_TOKENS = 2**62  # the most tokens that a text may claim to have
MOST_EXTRA = 4096  # characters in one extra metadata entry

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StateLayout:
    """The shapes of a model's states."""

    fingerprint: str
    vocab_size: int
    specs: tuple[StateSpec, ...]
    d_model: int = 0  # width of the hidden state that is stored with some states

    @cached_property
    def bytes(self) -> int:
        """Bytes of one state."""
        return bytes_of(self.specs)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden state that is stored with some states."""
        return hidden_bytes_of(self.d_model)

    def is_finite(self, state: memoryview) -> bool:
        """Return whether all values of a packed state are finite."""
        for spec, start, end in offsets_of(self.specs):
            part = state[start:end]
            if spec.dtype == "F32":
                finite = np.isfinite(np.frombuffer(part, "<f4")).all()
            else:  # BF16: an exponent of ones is an infinity or a NaN
                finite = ((np.frombuffer(part, "<u2") & 0x7F80) != 0x7F80).all()
            if not finite:
                return False
        return True

    @property
    def most_bytes(self) -> int:
        """The most bytes of a snapshot file."""
        return LENGTH_BYTES + MAX_HEADER_BYTES + self.bytes + MOST_TAIL * ID_BYTES


@dataclass(frozen=True)
class Snapshot:
    """The content of a snapshot file."""

    state: bytes  # the tensors of the model's specs, one after the other
    tail: bytes  # packed token ids
    tokens: int
    drawn: bool = False
    recent: tuple[int, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)  # further metadata
    turns: int = 0  # how many requests have made the text; 0: unknown

    @cached_property
    def digest(self) -> bytes:
        """Hash of the state's bytes, which identifies the state."""
        return digest_of(self.state)


def digest_of(state: bytes) -> bytes:
    """Return the hash of a state's bytes."""
    return hashlib.blake2b(state, digest_size=16).digest()


def write(snapshot: Snapshot, shape: StateLayout) -> bytes:
    """Return the file's content. It takes time if the state is large, as `read` does."""
    metadata = {
        **snapshot.extra,
        "format": FORMAT,
        "fingerprint": shape.fingerprint,
        "tokens": str(snapshot.tokens),
        "drawn": str(int(snapshot.drawn)),
        "recent": ",".join(map(str, snapshot.recent)),
    }
    if snapshot.turns:
        metadata["turns"] = str(snapshot.turns)
    state = memoryview(snapshot.state)
    tensors = [
        Tensor(spec.name, spec.dtype, spec.full_shape, state[start:end])
        for spec, start, end in offsets_of(shape.specs)
    ]
    count = len(snapshot.tail) // ID_BYTES
    tensors.append(Tensor("tail", "I32", [count], snapshot.tail))
    named = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in tensors]
    metadata["digest"] = _sum(metadata, named, snapshot.digest, snapshot.tail)
    return serialize(metadata, tensors)


def read(content: bytes, shape: StateLayout) -> Snapshot:
    """Parse a snapshot file and check that it is a valid state of this model.

    Raises StateMalformed, which says what is wrong, or StateMismatch for another model's.
    """
    if len(content) > shape.most_bytes:
        raise StateMalformed(
            f"the snapshot has {len(content)} bytes; allowed for this model: at most "
            f"{shape.most_bytes}"
        )
    found = parse_header(content, "the snapshot")
    header, metadata, start = found.tensors, found.metadata, found.data_start
    if any(len(value) > MOST_EXTRA for value in metadata.values()):
        raise StateMalformed(
            f"__metadata__ must be an object of strings of up to {MOST_EXTRA} characters"
        )
    told, digest = dict(metadata), metadata.pop("digest", None)
    kind, fingerprint = metadata.pop("format", None), metadata.pop("fingerprint", "")
    if kind not in (FORMAT, *FORMER):
        allowed = " or ".join(map(repr, (FORMAT, *FORMER)))
        raise StateMalformed(f"the snapshot's format is {_short(kind)}; allowed: {allowed}")
    if (digest is None) != (kind == WITHOUT_DIGEST):
        allowed, had = ("a", "none") if digest is None else ("no", "one")
        raise StateMalformed(
            f"a snapshot of format {kind!r} must have {allowed} digest, but this one has {had}"
        )
    if fingerprint != shape.fingerprint:
        raise StateMismatch(
            f"the snapshot is of another model: its fingerprint is {_short(fingerprint)}, but this "
            f"model's is {shape.fingerprint!r}"
        )
    names_of_state = [spec.name for spec in shape.specs]
    wrong = sorted(set(header) ^ {*names_of_state, "tail"})
    if wrong:
        names = ", ".join((*names_of_state, "tail"))
        raise StateMalformed(f"tensor {_short(wrong[0])} is missing or unknown; required: {names}")
    at = 0
    for spec in shape.specs:
        at = _check_tensor(
            spec.name, header[spec.name], spec.dtype, list(spec.full_shape), at, spec.bytes
        )
    count = _tail_length(header["tail"])
    at = _check_tensor("tail", header["tail"], "I32", [count], at, 4 * count)
    if len(content) - start != at:
        raise StateMalformed(
            f"the snapshot has {len(content) - start} bytes of tensors; its header says {at}"
        )
    if not shape.is_finite(memoryview(content)[start : start + shape.bytes]):
        raise StateMalformed("the state has values that are not finite")
    tail = content[start + shape.bytes :]
    _check_ids("tail", unpack_ids(tail).tolist(), shape)
    tokens = _integer("tokens", metadata.pop("tokens", None), MOST_TOKENS)
    if tokens < count:
        raise StateMalformed(f"tokens is {tokens}, but the tail alone has {count}")
    drawn = _integer("drawn", metadata.pop("drawn", None), 1)
    if drawn and count != 1:
        raise StateMalformed(f"the tail has {count} tokens; a generated (drawn) tail must have 1")
    recent = _recent(metadata.pop("recent", ""), shape)
    turns = _integer("turns", metadata.pop("turns", "0"), MOST_TOKENS)
    state = content[start : start + shape.bytes]
    snapshot = Snapshot(state, tail, tokens, bool(drawn), recent, metadata, turns)
    named = [(name, tensor["dtype"], tensor["shape"]) for name, tensor in header.items()]
    if digest is not None and digest != _sum(told, named, snapshot.digest, tail):
        raise StateMalformed("the snapshot is damaged: its digest does not match its content")
    return snapshot


def _sum(
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, str, list[int]]],
    state: bytes,
    tail: bytes,
) -> str:
    """Return the digest of a file with these metadata and tensors (name, dtype, shape).

    `state` is the digest of the state. The part that determines the lengths of the rest comes
    first, after its own length, so no two files are hashed alike.
    """
    entries = sorted((name, value) for name, value in metadata.items() if name != "digest")
    text = json.dumps([entries, sorted(tensors)]).encode()
    digest = hashlib.blake2b(_LENGTH.pack(len(text)), digest_size=16)
    for part in (text, state, tail):
        digest.update(part)
    return digest.hexdigest()


def _check_tensor(
    name: str, given: Any, dtype: str, shape: list[int], start: int, size: int
) -> int:
    """Check a tensor's header entry against what is expected: `size` bytes at offset `start`.

    Returns the end of the tensor. Raises StateMalformed.
    """
    end = start + size
    expected = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    if not isinstance(given, dict) or given != expected or not _all_int(given):
        raise StateMalformed(f"{name} is {_short(given)}; this model's is {expected}")
    return end


def _all_int(given: dict[str, Any]) -> bool:
    """Return whether all numbers are integers, because 1.0 and True compare equal to 1."""
    return all(type(number) is int for number in (*given["shape"], *given["data_offsets"]))


def _tail_length(given: Any) -> int:
    shape = given.get("shape") if isinstance(given, dict) else None
    if isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int:
        count: int = shape[0]
        if 1 <= count <= MOST_TAIL:
            return count
    raise StateMalformed(
        f"tail is {_short(given)}; its shape must be [n], with n from 1 to {MOST_TAIL}"
    )


def _integer(name: str, text: str | None, most: int) -> int:
    if text is not None and text.isascii() and text.isdigit() and len(text) <= 20:
        value = int(text)
        if value <= most:
            return value
    raise StateMalformed(f"{name} is {_short(text)}; allowed: an integer from 0 to {most}")


def _recent(text: str, shape: StateLayout) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if len(parts) > MOST_RECENT:
        raise StateMalformed(f"recent has {len(parts)} tokens; allowed: up to {MOST_RECENT}")
    return tuple(
        _check_ids("recent", [_integer("recent", part, 2**31 - 1) for part in parts], shape)
    )


def _check_ids(name: str, ids: list[int], shape: StateLayout) -> list[int]:
    for token in ids:
        if not 0 <= token < shape.vocab_size:
            raise StateMalformed(
                f"{name} has token id {token}; allowed: 0 to {shape.vocab_size - 1}"
            )
    return ids


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
