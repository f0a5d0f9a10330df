"""Converts a plain vocabulary, a list of words or characters, to the content of a tokenizer.json.

Language models of words or characters have no tokenizer, only a list that gives each its id. The
file is text with one word a line, in the order of the ids; or JSON: a list of tokens, an object
from token to id, or one from id to token.

If every token but names like `<unk>` is one character, a text is cut into characters. Else it is
cut at white space, its tokens are words, and a space is put between them in what is generated.
Then, if there is an `<eos>` and no line break, a line break stands for it, as in the corpora whose
lines end with it. A token of UNKNOWN stands for whatever else a text has; without one such a text
is refused.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.config import is_integer
from engine.errors import CheckpointError

UNKNOWN = ("<unk>", "<UNK>", "[UNK]", "<unknown>", "<oov>", "<OOV>", "UNK", "xxunk")
LINE_END = "<eos>"
SPACE = "\u2581"  # in names of words, a space is this character
MOST_ID = 2**24  # ids are below it, as a model's vocabulary is
_ALLOWED = "one word a line, or a JSON list of tokens, object of ids by token or of tokens by id"


def vocabulary_json(text: str, path: Path) -> dict[str, Any]:
    """Return what a tokenizer.json would contain for the text of a vocabulary file.

    Raises CheckpointError, with `path`, for a text that is no vocabulary.
    """
    content = _json(text)
    if content is None:
        ids = _ids(_lines(text, path), path)
    elif isinstance(content, list):
        ids = _ids(enumerate(content), path)
    elif content and all(map(is_integer, content.values())):
        ids = _ids(((id, token) for token, id in content.items()), path)
    elif all(isinstance(token, str) and id.isdecimal() for id, token in content.items()):
        ids = _ids(((int(id), token) for id, token in content.items()), path)
    else:
        raise CheckpointError(f"{path}: not a vocabulary; allowed: {_ALLOWED}")
    if not ids:
        raise CheckpointError(f"{path}: has no tokens; allowed: {_ALLOWED}")
    return _layout(ids)


def is_tokenizer_json(text: str) -> bool:
    """Return whether a text is meant as a tokenizer.json, valid or not."""
    content = _json(text)
    return isinstance(content, dict) and isinstance(content.get("model"), dict)


def _json(text: str) -> list[Any] | dict[str, Any] | None:
    """Return the list or object that a text is in JSON; None if it is neither."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, list | dict) else None


def _lines(text: str, path: Path) -> Iterable[tuple[int, str]]:
    """Yield the words, one of each line, with their ids."""
    for number, line in enumerate(text.removesuffix("\n").split("\n")):
        word = line.removesuffix("\r")
        if not word or word.split() != [word]:
            raise CheckpointError(
                f"{path}: line {number + 1} is {word[:40]!r}; allowed: {_ALLOWED} (tokens with"
                " spaces or line breaks in them are for JSON)"
            )
        yield number, word


def _ids(tokens: Iterable[tuple[int, Any]], path: Path) -> dict[str, int]:
    """Return the ids by token. Raises CheckpointError for ids or tokens that occur twice."""
    ids: dict[str, int] = {}
    taken: dict[int, str] = {}
    for id, token in tokens:
        if not isinstance(token, str) or not token:
            raise CheckpointError(f"{path}: token {id} is {token!r}; allowed: {_ALLOWED}")
        if not 0 <= id < MOST_ID:
            raise CheckpointError(f"{path}: {token!r} has id {id}; allowed: 0 to {MOST_ID - 1}")
        if token in ids:
            raise CheckpointError(f"{path}: {token!r} has the ids {ids[token]} and {id}")
        if id in taken:
            raise CheckpointError(f"{path}: id {id} is that of {taken[id]!r} and of {token!r}")
        ids[token], taken[id] = id, token
    return ids


def _layout(ids: dict[str, int]) -> dict[str, Any]:
    names = [token for token in ids if len(token) > 2 and token[0] + token[-1] in ("<>", "[]")]
    unknown = next((name for name in UNKNOWN if name in ids), UNKNOWN[0])
    normalizer: dict[str, Any] | None = None
    if all(len(token) == 1 for token in ids.keys() - names):
        cut: dict[str, Any] = {
            "type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
            "invert": False,
        }  # fmt: skip
        decoder: dict[str, Any] = {"type": "Fuse"}
    else:
        if LINE_END in ids and "\n" not in ids:
            normalizer = {
                "type": "Replace", "pattern": {"String": "\n"}, "content": f" {LINE_END} ",
            }  # fmt: skip
        # A word's name says that it has a space before it, so names in a row are the text.
        ids, unknown = {SPACE + word: id for word, id in ids.items()}, SPACE + unknown
        decoder = {
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False,
        }  # fmt: skip
        cut = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, decoder]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": unknown},
    }
