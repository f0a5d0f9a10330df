"""A named state as one safetensors file; nothing in it is ever unpickled or trusted.

Tensors: `cell` F32 [layers, inner]; `conv` F32 [layers, taps - 1, d_model] where the model has
convolutions; `tail` I32 [n], the last tokens of the text, 1 to MOST_TAIL of them. The state is the
one before the tail, which is read when somebody goes on from it: so what follows has the logits
that it would have had, and a snapshot needs none. Metadata, all strings: `format`; `fingerprint` of
the model; `tokens`, how many the text has, the tail included; `drawn`, 1 where the tail was
generated; `recent`, the last tokens of the text, which tell of an unfinished character; `digest` of
all that the file says: the other metadata, names, types and shapes of the tensors, and their bytes.

The digest tells of a file that was damaged, not of one that was forged, so all else is checked too.
Every length is checked against the model before anything of that length is made. Files of format 1,
which has no digest, are read.
"""

from __future__ import annotations

import hashlib
import json
import math
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

FORMAT = "minserve.state.2"
FORMER = "minserve.state.1"  # without a digest
MOST_TAIL = SCAN_CHUNK  # tokens
MOST_RECENT = 4  # tokens; a character of UTF-8 has up to four bytes
MOST_TOKENS = 2**62  # that a text may be said to have
MOST_EXTRA = 4096  # characters of one further entry of the metadata

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StateLayout:
    """What the states of a model look like."""

    fingerprint: str
    vocab_size: int
    cell: tuple[int, int]
    conv: tuple[int, int, int] | None

    @property
    def bytes(self) -> int:
        """Of one state."""
        return 4 * (math.prod(self.cell) + (math.prod(self.conv) if self.conv else 0))

    @property
    def most_bytes(self) -> int:
        """Of a snapshot's file."""
        return LENGTH_BYTES + MAX_HEADER_BYTES + self.bytes + MOST_TAIL * ID_BYTES


@dataclass(frozen=True)
class Snapshot:
    """What a file holds."""

    state: bytes  # cell, then conv
    tail: bytes  # packed ids
    tokens: int
    drawn: bool = False
    recent: tuple[int, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)  # further metadata

    @cached_property
    def digest(self) -> bytes:
        """Of the state: what tells it from any other."""
        return digest_of(self.state)


def digest_of(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()


def write(snapshot: Snapshot, shape: StateLayout) -> bytes:
    """The file. It takes a while where the state is large, as `read` does."""
    metadata = {
        **snapshot.extra,
        "format": FORMAT,
        "fingerprint": shape.fingerprint,
        "tokens": str(snapshot.tokens),
        "drawn": str(int(snapshot.drawn)),
        "recent": ",".join(map(str, snapshot.recent)),
    }
    state, end = memoryview(snapshot.state), 4 * math.prod(shape.cell)
    tensors = [Tensor("cell", "F32", shape.cell, state[:end])]
    if shape.conv is not None:
        tensors.append(Tensor("conv", "F32", shape.conv, state[end:]))
    count = len(snapshot.tail) // ID_BYTES
    tensors.append(Tensor("tail", "I32", [count], snapshot.tail))
    named = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in tensors]
    metadata["digest"] = _sum(metadata, named, snapshot.digest, snapshot.tail)
    return serialize(metadata, tensors)


def read(content: bytes, shape: StateLayout) -> Snapshot:
    """What the file holds, once all of it is known to be a state of this model.

    Raises StateMalformed, which says what is wrong, or StateMismatch for another model's.
    """
    if len(content) > shape.most_bytes:
        raise StateMalformed(
            f"the snapshot has {len(content)} bytes; those of this model have at most "
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
    if kind not in (FORMAT, FORMER):
        allowed = f"{FORMAT!r}, or {FORMER!r}"
        raise StateMalformed(f"the snapshot's format is {_short(kind)}; allowed: {allowed}")
    if (digest is None) == (kind == FORMAT):
        has = "has none" if digest is None else "has one"
        raise StateMalformed(
            f"a snapshot of the format {FORMAT!r} has a digest, one of {FORMER!r} none; this one, "
            f"of {kind!r}, {has}"
        )
    if fingerprint != shape.fingerprint:
        raise StateMismatch(
            f"the snapshot is of another model: its fingerprint is {_short(fingerprint)}, and the "
            f"model here has {shape.fingerprint!r}"
        )
    parts = {"cell": shape.cell} | ({} if shape.conv is None else {"conv": shape.conv})
    wrong = sorted(set(header) ^ {*parts, "tail"})
    if wrong:
        names = ", ".join((*parts, "tail"))
        raise StateMalformed(f"the tensor {_short(wrong[0])} is missing or unknown; it has {names}")
    at = 0
    for name, expected in parts.items():
        at = _check_tensor(name, header[name], "F32", list(expected), at)
    count = _tail_length(header["tail"])
    at = _check_tensor("tail", header["tail"], "I32", [count], at)
    if len(content) - start != at:
        raise StateMalformed(
            f"the snapshot has {len(content) - start} bytes of tensors; its header says {at}"
        )
    values = np.frombuffer(content, "<f4", shape.bytes // 4, start)
    if not np.isfinite(values).all():
        raise StateMalformed("the state has values that are not finite")
    tail = content[start + shape.bytes :]
    _check_ids("tail", unpack_ids(tail).tolist(), shape)
    tokens = _integer("tokens", metadata.pop("tokens", None), MOST_TOKENS)
    if tokens < count:
        raise StateMalformed(f"tokens is {tokens}, but the tail alone has {count}")
    drawn = _integer("drawn", metadata.pop("drawn", None), 1)
    if drawn and count != 1:
        raise StateMalformed(f"the tail has {count} tokens; of a drawn one it has 1")
    recent = _recent(metadata.pop("recent", ""), shape)
    state = content[start : start + shape.bytes]
    snapshot = Snapshot(state, tail, tokens, bool(drawn), recent, metadata)
    named = [(name, tensor["dtype"], tensor["shape"]) for name, tensor in header.items()]
    if digest is not None and digest != _sum(told, named, snapshot.digest, tail):
        raise StateMalformed(
            "the snapshot is damaged: its digest is another one than when it was written"
        )
    return snapshot


def _sum(
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, str, list[int]]],
    state: bytes,
    tail: bytes,
) -> str:
    """The digest of a file with these metadata and tensors (name, dtype, shape), whose state has
    the digest `state`. What says how long the rest is comes first, after its own length, so no two
    files are one text here."""
    entries = sorted((name, value) for name, value in metadata.items() if name != "digest")
    text = json.dumps([entries, sorted(tensors)]).encode()
    digest = hashlib.blake2b(_LENGTH.pack(len(text)), digest_size=16)
    for part in (text, state, tail):
        digest.update(part)
    return digest.hexdigest()


def _check_tensor(name: str, given: Any, dtype: str, shape: list[int], start: int) -> int:
    """Raises StateMalformed unless it is this one and lies at `start`; where it ends."""
    end = start + 4 * math.prod(shape)
    expected = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    if not isinstance(given, dict) or given != expected or not _all_int(given):
        raise StateMalformed(f"{name} is {_short(given)}; this model's is {expected}")
    return end


def _all_int(given: dict[str, Any]) -> bool:
    """1.0 and True equal 1 too."""
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
