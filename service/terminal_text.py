"""Text from files and stdin, in pieces that can be encoded one by one at constant memory."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 1 << 18


class TextError(ValueError):
    """A file that is no UTF-8 text."""


def text_pieces(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
    """The text of a file, "-" for stdin, in pieces of about `piece_bytes`.

    Pieces end between a line's end and a character that is no space, where byte-level tokenizers
    never join tokens; a text that has no such place for a whole piece is cut between characters.
    Raises OSError, and TextError where the text is not UTF-8.
    """
    file: BinaryIO
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        decoder = codecs.getincrementaldecoder("utf-8")()
        rest, offset, ended = "", 0, False
        while not ended:
            data = file.read(piece_bytes)
            ended = not data
            pending = len(decoder.getstate()[0])
            try:
                rest += decoder.decode(data, final=ended)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                raise TextError(f"{path}: not UTF-8 text: {error.reason} at byte {at:,}") from error
            offset += len(data)
            cut = len(rest) if ended else _last_cut(rest)
            if not ended and cut == 0 and len(rest) >= 2 * piece_bytes:
                cut = len(rest)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]


def _last_cut(text: str) -> int:
    """The last index between a newline and a character that is no white space; 0 = none."""
    at = text.rfind("\n", 0, len(text) - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    return at + 1
