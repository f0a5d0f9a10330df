"""Finds and reads the tokenizer of a model folder, or of a file, as a tokenizer.json's content.

A folder without a tokenizer.json may have a SentencePiece tokenizer.model, which is converted each
time it is read; nothing is written. This module does not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import CheckpointError
from engine.model_files import has_file, unreadable
from engine.sentencepiece_model import tokenizer_json
from engine.vocabulary_files import is_tokenizer_json, vocabulary_json

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"


class TokenizerText(NamedTuple):
    """A tokenizer: the file that it is read from, and its tokenizer.json."""

    path: Path
    text: str


def read_tokenizer(folder: Path) -> TokenizerText | None:
    """Return the folder's tokenizer; None if there is none.

    Raises CheckpointError if it cannot be read, or needs an extra that is not installed.
    """
    paths = (folder / name for name in (TOKENIZER, SENTENCEPIECE))
    path = next((path for path in paths if has_file(path)), None)
    if path is None:
        return None
    if path.name == SENTENCEPIECE:
        return TokenizerText(path, json.dumps(tokenizer_json(path)))
    return TokenizerText(path, _read(path))


def read_tokenizer_file(path: Path) -> TokenizerText:
    """Return the tokenizer of a file: a tokenizer.json, a SentencePiece model or a vocabulary.

    A SentencePiece model is told by the ending `.model`; a vocabulary (engine/vocabulary_files.py)
    is every other file that is no tokenizer.json. Raises CheckpointError as `read_tokenizer` does,
    and if there is no file.
    """
    if not has_file(path):
        raise CheckpointError(f"{path}: no such file")
    if path.suffix == ".model":
        return TokenizerText(path, json.dumps(tokenizer_json(path)))
    text = _read(path)
    if is_tokenizer_json(text, path):
        return TokenizerText(path, text)
    return TokenizerText(path, json.dumps(vocabulary_json(text, path)))


def load_library(read: TokenizerText, vocab_size: int) -> tokenizers.Tokenizer:
    """Return a tokenizer as the `tokenizers` library reads it.

    Raises CheckpointError if it is broken, or has token ids beyond the model's `vocab_size`.
    """
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(read.text)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{read.path}: not a tokenizer: {error}") from error
    largest = max(library.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{read.path}: has token id {largest}, but the model's vocabulary ends at"
            f" {vocab_size - 1}"
        )
    return library


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
