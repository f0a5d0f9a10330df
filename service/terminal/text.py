"""Text from files and stdin, in pieces that can be encoded one by one at constant memory, and the
tokenizers that encode them (imported where they are used, so that `--help` stays fast)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import ConfigError
from service.text.utf8_chunks import NotUtf8, Pieces

if TYPE_CHECKING:
    import tokenizers

    from service.text.tokenizer import Tokenizer

PIECE_BYTES = 1 << 18


class TextError(ValueError):
    """A file that is no UTF-8 text."""


def text_pieces(
    path: Path, last_cut: Callable[[str], int] = len, piece_bytes: int | None = None
) -> Iterator[str]:
    """The text of a file, "-" for stdin, as Pieces of about `piece_bytes` (PIECE_BYTES), which are
    cut where `last_cut` says. Raises OSError, and TextError where the text is not UTF-8."""
    file: BinaryIO
    piece_bytes = piece_bytes or PIECE_BYTES
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        pieces = Pieces(piece_bytes, last_cut)
        try:
            while data := file.read(piece_bytes):
                if piece := pieces.feed(data):
                    yield piece
            if piece := pieces.finish():
                yield piece
        except NotUtf8 as error:
            raise TextError(f"{path}: not UTF-8 text: {error}") from error


def encode_file(path: Path, library: tokenizers.Tokenizer) -> array[int]:
    """The token ids of a whole text; special tokens that it spells out are read as such, and none
    are put around it.

    Raises OSError, TextError, ConfigError where it is empty.
    """
    from service.text.tokenizer import Tokenizer

    tokenizer, ids = Tokenizer(library), array("i")
    begins = True
    for piece in text_pieces(path, partial(tokenizer.last_cut, parse_special=True)):
        ids.extend(tokenizer.encode(piece, begins=begins, marks=False, parse_special=True))
        begins = False
    if not ids:
        raise ConfigError(f"{path}: the text is empty", param="data")
    return ids


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json. Raises OSError, ConfigError."""
    import tokenizers

    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer.json: {error}") from error


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """A checkpoint's tokenizer. Raises CheckpointError; ConfigError where it has none."""
    from service.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder, vocab_size)
    if tokenizer is None:
        raise ConfigError(f"{folder}: has no tokenizer.json, without which text cannot be read")
    return tokenizer
