"""Finds and reads the tokenizer of a model folder, as the content of a tokenizer.json.

A folder without a tokenizer.json may have a SentencePiece tokenizer.model, which is converted each
time it is read; nothing is written. This module does not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from engine.errors import CheckpointError
from engine.model_files import has_file, unreadable
from engine.sentencepiece_model import tokenizer_json

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
    try:
        return TokenizerText(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
