"""Reads texts from files and stdin in pieces, at constant memory, and loads tokenizers.

The tokenizers' libraries are imported in the functions, so that `--help` stays fast.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import ConfigError
from engine.tokenizer_files import read_tokenizer_file
from service.text.documents import TextError as TextError
from service.text.utf8_chunks import NotUtf8, Pieces

if TYPE_CHECKING:
    import tokenizers

    from service.text.tokenizer import Tokenizer

PIECE_BYTES = 1 << 18


def text_pieces(
    path: Path, last_cut: Callable[[str], int] = len, piece_bytes: int | None = None
) -> Iterator[str]:
    """Yield the text of a file in pieces.

    Args:
        path: The file; "-" is stdin.
        last_cut: Returns the last place where a text can be cut (see `Pieces`).
        piece_bytes: About how many bytes a piece has; default: PIECE_BYTES.

    Raises OSError, and TextError if the text is not UTF-8.
    """
    file: BinaryIO
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        try:
            yield from pieces_of(file, last_cut, piece_bytes)
        except NotUtf8 as error:
            raise TextError(f"{path}: not UTF-8 text: {error}") from error


def pieces_of(
    file: BinaryIO, last_cut: Callable[[str], int] = len, piece_bytes: int | None = None
) -> Iterator[str]:
    """Yield the text of an open file in pieces, as `text_pieces` does. Raises OSError, NotUtf8."""
    piece_bytes = piece_bytes or PIECE_BYTES
    pieces = Pieces(piece_bytes, last_cut)
    while data := file.read(piece_bytes):
        if piece := pieces.feed(data):
            yield piece
    if piece := pieces.finish():
        yield piece


def encode_file(path: Path, library: tokenizers.Tokenizer) -> array[int]:
    """Return the token ids of a file's text, without tokens around it.

    Special tokens that the text spells out become tokens. Raises OSError, TextError, and
    ConfigError if the text is empty.
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
    """Read a tokenizer.json. Raises OSError, and ConfigError if it is not a tokenizer."""
    import tokenizers

    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer.json: {error}") from error


def check_tokenizer(path: Path) -> None:
    """Check that a file is a tokenizer.json, or becomes one. Raises CheckpointError if not."""
    from service.text.tokenizer import Tokenizer

    Tokenizer.of(read_tokenizer_file(path), sys.maxsize)  # the model's vocabulary comes later


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Load a checkpoint's tokenizer. Raises CheckpointError, and ConfigError if it has none."""
    from service.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder, vocab_size)
    if tokenizer is None:
        raise ConfigError(
            f"{folder} has no tokenizer.json or tokenizer.model, so it cannot read text"
        )
    return tokenizer
