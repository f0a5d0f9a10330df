"""Changes to a tokenizer.json before it is used.

Hides the names of special tokens, and makes a variant for text that does not begin a document.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

Layout = dict[str, Any]


def hide_special_names(layout: Layout) -> dict[str, str]:
    """Rename the special tokens of a tokenizer.json, in place, so that no text can spell them.

    Text that spells a special token is then encoded as plain text with every kind of model. Some
    models would otherwise find it in their vocabulary: Unigram encodes "</s>" as the token,
    whatever `encode_special_tokens` says. Code that means the token uses the hidden name.

    Returns the hidden name of each special token, by its original name.
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
        # Text never becomes a special token, so no merge may form one.
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, hidden)]
    return hidden


def _touches(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def mid_sentence(layout: Layout) -> Layout | None:
    """Return the tokenizer.json for text that follows other text.

    It adds nothing in front of the text and strips nothing from its beginning. None if the
    tokenizer treats the beginning of a text like any other place.
    """
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
    """Return Metaspace's marker if it precedes every word, as in T5's tokenizer; else None.

    In such tokenizers WhitespaceSplit removes all spaces, and Metaspace then marks every word,
    including the first. In the middle of a text a word must have the marker only if a space
    precedes it.
    """
    parts = (splitter or {}).get("pretokenizers") or []
    kinds = [part["type"] for part in parts]
    if "WhitespaceSplit" not in kinds or "Metaspace" not in kinds[kinds.index("WhitespaceSplit") :]:
        return None
    metaspace = parts[kinds.index("Metaspace")]
    former = "always" if metaspace.get("add_prefix_space", True) else "never"
    sign: str = metaspace["replacement"]
    return sign if metaspace.get("prepend_scheme", former) == "always" else None


def _one_space_between_words(sign: str) -> Iterator[Layout]:
    """Yield normalizers that reduce white space as WhitespaceSplit and Metaspace would."""
    for pattern, content in ((rf"\s+(?={re.escape(sign)}|\z)", ""), (r"\s+", " ")):
        yield {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _keep_spaces(splitter: Layout) -> Layout:
    """Replace WhitespaceSplit by a splitter that keeps each space with the word after it."""
    split = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False,
    }  # fmt: skip
    parts = splitter["pretokenizers"]
    kept = [split if part["type"] == "WhitespaceSplit" else part for part in parts]
    return {**splitter, "pretokenizers": kept}


def _go_on(part: Layout | None) -> Layout | None:
    """Return a normalizer or pre-tokenizer without its rules for the beginning of a text.

    None if it has no other rules.
    """
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
