"""Text from files and stdin, in pieces that can be encoded one by one at constant memory, and the
tokenizers that encode them (imported where they are used, so that `--help` stays fast)."""

from __future__ import annotations

import codecs
import sys
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from service.tokenizer import Tokenizer

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
            cut = len(rest) if ended else last_cut(rest)
            if not ended and cut == 0 and len(rest) >= 2 * piece_bytes:
                cut = len(rest)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]


def last_cut(text: str) -> int:
    """The last index between a newline and a character that is no white space; 0 = none."""
    at = text.rfind("\n", 0, len(text) - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    return at + 1


def encode_file(path: Path, tokenizer: tokenizers.Tokenizer) -> array[int]:
    """The token ids of a whole text; special tokens that it spells out are read as such.

    Raises OSError, TextError, ConfigError where it is empty.
    """
    ids = array("i")
    for piece in text_pieces(path):
        ids.extend(tokenizer.encode(piece, add_special_tokens=False).ids)
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
    from service.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder, vocab_size)
    if tokenizer is None:
        raise ConfigError(f"{folder}: has no tokenizer.json, without which text cannot be read")
    return tokenizer
