"""What is changed in a tokenizer.json before it is used: the names of its special tokens, and the
rules that hold for the beginning of a text alone.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

Layout = dict[str, Any]


def hide_special_names(layout: Layout) -> dict[str, str]:
    """Gives the special tokens of a tokenizer.json, in place, names that nobody can write.

    A text that spells a special token out is then text, for every kind of model: some find it in
    their vocabulary although it is told to be special (Unigram takes "</s>" for the token, whatever
    `encode_special_tokens` says). Whoever means the token writes the hidden name.

    Returns the hidden name of each special token, by its own.
    """
    model, secret = layout["model"], secrets.token_hex(16)
    special = [token for token in layout["added_tokens"] if token["special"]]
    hidden = {token["content"]: f"<|{token['id']} {secret}|>" for token in special}
    if not hidden:
        return {}
    for token in special:
        token["content"] = hidden[token["content"]]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {hidden.get(name, name): id for name, id in vocabulary.items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if "merges" in model:
        # A text never becomes a special token, so neither do two pieces of it.
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, hidden)]
    return hidden


def _touches(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def mid_sentence(layout: Layout) -> Layout | None:
    """The tokenizer.json that encodes a text which other text stands before: without what is put
    before, or cut off, the beginning of a text. None where nothing of the kind is done."""
    changed = copy.copy(layout)
    normalizer, splitter = layout.get("normalizer"), layout.get("pre_tokenizer")
    changed["normalizer"] = _go_on(normalizer)
    changed["pre_tokenizer"] = _go_on(splitter)
    sign = _word_sign(splitter)
    if sign is not None:
        parts = [changed["normalizer"], *_one_space_between_words(sign)]
        changed["normalizer"] = {"type": "Sequence", "normalizers": list(filter(None, parts))}
        changed["pre_tokenizer"] = _keep_spaces(changed["pre_tokenizer"])
    return None if changed == layout else changed


def _word_sign(splitter: Layout | None) -> str | None:
    """What Metaspace puts before each word, the first one too, where WhitespaceSplit has taken all
    spaces away (T5's way); else None. In mid-sentence a word has it where a space stands before."""
    parts = (splitter or {}).get("pretokenizers") or []
    kinds = [part["type"] for part in parts]
    if "WhitespaceSplit" not in kinds or "Metaspace" not in kinds[kinds.index("WhitespaceSplit") :]:
        return None
    metaspace = parts[kinds.index("Metaspace")]
    former = "always" if metaspace.get("add_prefix_space", True) else "never"
    sign: str = metaspace["replacement"]
    return sign if metaspace.get("prepend_scheme", former) == "always" else None


def _one_space_between_words(sign: str) -> Iterator[Layout]:
    """The normalizers that make white space what WhitespaceSplit and Metaspace make of it."""
    for pattern, content in ((rf"\s+(?={re.escape(sign)}|\z)", ""), (r"\s+", " ")):
        yield {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _keep_spaces(splitter: Layout) -> Layout:
    """Splits before spaces, where WhitespaceSplit leaves them out."""
    split = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False,
    }  # fmt: skip
    parts = splitter["pretokenizers"]
    kept = [split if part["type"] == "WhitespaceSplit" else part for part in parts]
    return {**splitter, "pretokenizers": kept}


def _go_on(part: Layout | None) -> Layout | None:
    """A normalizer or pre-tokenizer without its rules for the beginning of a text; None for one
    that has no other rules."""
    if part is None:
        return None
    match part:
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            kept = [one for one in map(_go_on, part[name]) if one is not None]
            return {**part, name: kept}
        case {"type": "Prepend"}:
            return None
        case {"type": "Replace", "pattern": {"Regex": pattern}} if _is_anchored(pattern):
            return None
        case {"type": "Strip"}:
            return {**part, "strip_left": False}
        case {"type": "Metaspace"}:
            former = {"add_prefix_space": False} if "add_prefix_space" in part else {}
            return {**part, **former, "prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return {**part, "add_prefix_space": False}
    return part


def _is_anchored(pattern: str) -> bool:
    return pattern.startswith(("^", r"\A"))
