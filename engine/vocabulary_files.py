"""Converts a plain vocabulary, a list of words or characters, to the content of a tokenizer.json.

Language models of words or characters have no tokenizer, only a list that gives each its id. The
file is text with one word a line, in the order of the ids; or JSON: a list of tokens, an object
from token to id, or one from id to token.

If every token but names like `<unk>` or PAD is one character, a text is cut into characters; also
if there is a space or a line break, and more tokens are one character than are not. Else a text is
cut at white space, its tokens are words, and a space is put between them in what is generated. A
line break in a text is then the token of one; without it, it stands for an `<eos>` if there is one,
as in the corpora whose lines end with it. A token of UNKNOWN stands for whatever else a text has;
without one such a text is refused.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from engine.config import is_integer
from engine.errors import CheckpointError

UNKNOWN = ("<unk>", "<UNK>", "[UNK]", "<unknown>", "<oov>", "<OOV>", "UNK", "xxunk")
NAMES = ("unk", "pad", "eos", "bos", "sos")  # of special tokens, in capitals or behind "xx", too
LINE_BREAK, LINE_END = "\n", "<eos>"
SPACE = "\u2581"  # in names of words, a space is this character
MOST_ID = 2**24  # ids are below it, as a model's vocabulary is
_MOST_DIGITS = 20  # of an id, with zeros in front
_SHOWN = 40  # characters of a token in a message
_BRACKETED = re.compile(r"\[[^\s\[\]\"',]+\]")  # a name such as [UNK], not the beginning of JSON
PRIVATE_USE = range(0xE000, 0xF900)  # code points that texts do not have
_ALLOWED = "one word a line, or a JSON list of tokens, object of ids by token or of tokens by id"


def vocabulary_json(text: str, path: Path) -> dict[str, Any]:
    """Return what a tokenizer.json would contain for the text of a vocabulary file.

    Raises CheckpointError, with `path`, for a text that is no vocabulary.
    """
    content = _json(text, path)
    if content is None:
        ids = _ids(_lines(text, path), path)
    elif isinstance(content, list):
        ids = _ids(enumerate(content), path)
    elif content and all(map(is_integer, content.values())):
        ids = _ids(((id, token) for token, id in content.items()), path)
    elif all(isinstance(token, str) and id.isdecimal() for id, token in content.items()):
        for id, token in content.items():
            if len(id) > _MOST_DIGITS:
                raise CheckpointError(
                    f"{path}: {token[:_SHOWN]!r} has an id of {len(id)} digits; allowed: 0 to"
                    f" {MOST_ID - 1}"
                )
        ids = _ids(((int(id), token) for id, token in content.items()), path)
    else:
        raise CheckpointError(f"{path}: not a vocabulary; allowed: {_ALLOWED}")
    if not ids:
        raise CheckpointError(f"{path}: has no tokens; allowed: {_ALLOWED}")
    return _layout(ids, path)


def is_tokenizer_json(text: str, path: Path) -> bool:
    """Return whether a text is meant as a tokenizer.json, valid or not.

    Raises CheckpointError, with `path`, for a text that begins as JSON and is not.
    """
    content = _json(text, path)
    return isinstance(content, dict) and isinstance(content.get("model"), dict)


def _json(text: str, path: Path) -> list[Any] | dict[str, Any] | None:
    """Return the list or object that a text is in JSON; None if it is not meant as either."""
    begin = text.lstrip()
    if not begin.startswith(("[", "{")):
        return None
    try:
        content: list[Any] | dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _BRACKETED.fullmatch(begin.partition("\n")[0].rstrip()):
            return None  # a list of words
        if isinstance(error, json.JSONDecodeError):
            reason = str(error)
        elif isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        else:
            reason = "a number has too many digits"
        raise CheckpointError(
            f"{path}: begins with {begin[0]!r} as JSON does, but cannot be read: {reason}; allowed:"
            f" {_ALLOWED}"
        ) from error
    return content


def _lines(text: str, path: Path) -> Iterable[tuple[int, str]]:
    """Yield the words, one of each line, with their ids."""
    for number, line in enumerate(text.removesuffix("\n").split("\n")):
        word = line.removesuffix("\r")
        if not word or word.split() != [word]:
            raise CheckpointError(
                f"{path}: line {number + 1} is {word[:_SHOWN]!r}; allowed: {_ALLOWED} (tokens with"
                " spaces or line breaks in them are for JSON)"
            )
        yield number, word


def _ids(tokens: Iterable[tuple[int, Any]], path: Path) -> dict[str, int]:
    """Return the ids by token. Raises CheckpointError for ids or tokens that occur twice."""
    ids: dict[str, int] = {}
    taken: dict[int, str] = {}
    for id, token in tokens:
        if not isinstance(token, str) or not token:
            shown = repr(token)[:_SHOWN]
            raise CheckpointError(f"{path}: token {id} is {shown}; allowed: {_ALLOWED}")
        if not 0 <= id < MOST_ID:
            shown = f"{token[:_SHOWN]!r} has id {str(id)[:_SHOWN]}"
            raise CheckpointError(f"{path}: {shown}; allowed: 0 to {MOST_ID - 1}")
        if token in ids:
            raise CheckpointError(f"{path}: {token!r} has the ids {ids[token]} and {id}")
        if id in taken:
            raise CheckpointError(f"{path}: id {id} is that of {taken[id]!r} and of {token!r}")
        ids[token], taken[id] = id, token
    return ids


def _is_name(token: str) -> bool:
    """Return whether a token is called as special ones are, such as <pad>, [CLS], EOS or xxunk."""
    bracketed = len(token) > 2 and token[0] + token[-1] in ("<>", "[]")
    return bracketed or token.casefold().removeprefix("xx") in NAMES


def _of_characters(tokens: Collection[str]) -> bool:
    """Return whether a text is cut into characters, as the tokens of a vocabulary tell."""
    sizes = [len(token) for token in tokens if not _is_name(token)]
    single = sizes.count(1)
    spaced = not {" ", "\n"}.isdisjoint(tokens)  # no words, unless there are many others
    return single == len(sizes) or (spaced and single > len(sizes) - single)


def _layout(ids: dict[str, int], path: Path) -> dict[str, Any]:
    unknown = next((name for name in UNKNOWN if name in ids), UNKNOWN[0])
    normalizer: dict[str, Any] | None = None
    if _of_characters(ids):
        cut: dict[str, Any] = {
            "type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
            "invert": False,
        }  # fmt: skip
        decoder: dict[str, Any] = {"type": "Fuse"}
    else:
        for word in ids:
            if word != LINE_BREAK and word.split() != [word]:
                raise CheckpointError(
                    f"{path}: the word {word[:_SHOWN]!r} has white space in it, at which texts are"
                    " cut, so it can never occur; allowed: words without, and a line break alone"
                )
        metaspace = {
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False,
        }  # fmt: skip
        decoder, line_end = metaspace, LINE_END
        if LINE_BREAK in ids:  # a word in its place, as the cut removes it
            line_end = next(sign for sign in map(chr, PRIVATE_USE) if sign not in ids)
            ids = {line_end if word == LINE_BREAK else word: id for word, id in ids.items()}
            back = {"type": "Replace", "pattern": {"String": line_end}, "content": LINE_BREAK}
            decoder = {"type": "Sequence", "decoders": [metaspace, back]}
        if line_end in ids:
            normalizer = {
                "type": "Replace", "pattern": {"String": LINE_BREAK}, "content": f" {line_end} ",
            }  # fmt: skip
        # A word's name says that it has a space before it, so names in a row are the text.
        ids, unknown = {SPACE + word: id for word, id in ids.items()}, SPACE + unknown
        cut = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
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
