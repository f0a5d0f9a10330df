"""Tokenizers, schemas and what matches them, for tests of grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.training.tokenizer import byte_level_tokenizer

# Texts whose characters have one to four bytes, so that merges end inside of characters.
WORDS = [
    "schön",
    "größe",
    "naïve",
    "日本語",
    "日曜日",
    "привет",
    "приём",
    "😀😃",
    "😀😎",
    "the",
    "then",
]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"
# Patterns of which all have to hold: nobody lives to see them compiled.
ENDLESS_SCHEMA = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(60)]}


def save_bytes(folder: Path) -> int:
    """The byte-level tokenizer; how large its vocabulary is."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return 257


def save_merges(folder: Path) -> int:
    """Byte pairs merged into tokens, many of which begin or end inside of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|eos|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f'{{"{word}": "{word}"}}' for word in WORDS] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def save_characters(folder: Path, characters: str = CHARACTERS) -> int:
    """One token per character, and no others."""
    vocabulary = {character: id for id, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(characters)


def text_of(folder: Path, tokens: list[int]) -> bytes:
    """The bytes of an answer."""
    layout = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = {id: name for name, id in layout["model"]["vocab"].items()}
    if layout["decoder"]["type"] == "Fuse":
        return "".join(names[token] for token in tokens).encode()
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    value = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    value |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return b"".join(bytes(value[letter] for letter in names[token]) for token in tokens)


# Schemas.

_NAMES = st.sampled_from(["a", "b2", "größe", "日本", 'quo"te', "back\\slash", "😀"])
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-999, 999), st.sampled_from(["x", "schön", 'a"b', ""])
)


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        pattern = draw(st.sampled_from(["^[a-c]{2,4}$", "^(ja|nein|größe)$", "^[0-9]+-[xyz]$"]))
        return {"type": "string", "pattern": pattern}
    least = draw(st.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 6))}


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    least = draw(st.integers(-50, 50))
    kind = draw(st.sampled_from(["integer", "number"]))
    return {"type": kind, "minimum": least, "maximum": least + draw(st.integers(1, 300))}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": most}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose texts come to an end."""
    leaves = st.one_of(
        _strings(),
        _numbers(),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=4)),
        st.builds(lambda value: {"const": value}, _VALUES),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _objects(inner),
            _arrays(inner),
            st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=6,
    )


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what such a schema asks for."""
    if "anyOf" in schema:
        return any(matches(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(_same(value, one) for one in schema["enum"])
    if "const" in schema:
        return _same(value, schema["const"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            if not isinstance(value, str):
                return False
            if "pattern" in schema:
                return re.search(schema["pattern"], value) is not None
            return bool(schema["minLength"] <= len(value) <= schema["maxLength"])
        case "integer" | "number" as kind:
            kinds = int if kind == "integer" else (int, float)
            right = isinstance(value, kinds) and not isinstance(value, bool)
            return right and bool(schema["minimum"] <= value <= schema["maximum"])
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(matches(item, schema["items"]) for item in value)
            )
        case "object":
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(matches(item, schema["properties"][name]) for name, item in value.items())
            )
    raise AssertionError(schema)


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right
