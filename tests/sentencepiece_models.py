"""Writes SentencePiece tokenizer.model files, without the library, and encodes as it does.

The encoder is SentencePiece's greedy algorithm for BPE in its plainest form: of all neighbours
whose union is a piece, the union with the best score is made, the leftmost of several.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.tokenizer_types import TYPES

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
Piece = tuple[str, float, int]


def bpe_pieces() -> list[Piece]:
    """The pieces of a small BPE model, scored by when they were merged, with all bytes."""
    layout = json.loads(TYPES["sentencepiece"]().to_str())["model"]
    rank = {"".join(merge): -float(i) for i, merge in enumerate(layout["merges"])}
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    single = -float(len(rank))
    return [
        (name, rank.get(name, single), BYTE if name.startswith("<0x") else kinds.get(name, NORMAL))
        for name in sorted(layout["vocab"], key=layout["vocab"].__getitem__)
    ]


def unigram_pieces() -> list[Piece]:
    layout = json.loads(TYPES["unigram"]().to_str())["model"]
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    return [(piece, score, kinds.get(piece, NORMAL)) for piece, score in layout["vocab"]]


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _content(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def write_model(
    folder: Path,
    pieces: list[Piece],
    kind: int = BPE,
    *,
    prefix: bool = True,
    extra_spaces: bool = True,
    suffix: bool = False,
) -> None:
    """Write a tokenizer.model with an empty table of characters (the rule "identity")."""
    content = b""
    for piece, score, type in pieces:
        told = _content(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, type)
        content += _content(1, told)
    trainer = _number(3, kind) + _number(24, suffix) + _number(35, kind == BPE) + _number(40, 0)
    rules = _content(1, b"identity") + _number(3, prefix) + _number(4, not extra_spaces)
    (folder / "tokenizer.model").write_bytes(content + _content(2, trainer) + _content(3, rules))


def encoded(text: str, pieces: list[Piece], *, prefix: bool = True) -> list[int]:
    ids = {piece: id for id, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, type in pieces if type == NORMAL}
    parts = list((SPACE if prefix and text else "") + text.replace(" ", SPACE))
    while True:
        unions = [left + right for left, right in pairwise(parts)]
        known = [(-scores[union], at) for at, union in enumerate(unions) if union in scores]
        if not known:
            return [id for part in parts for id in _ids(part, ids)]
        _, at = min(known)
        parts[at : at + 2] = [unions[at]]


def _ids(part: str, ids: dict[str, int]) -> Iterator[int]:
    if part in ids:
        yield ids[part]
    else:
        yield from (ids[f"<0x{byte:02X}>"] for byte in part.encode())
