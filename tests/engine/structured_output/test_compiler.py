"""Grammars: what compiles, what is refused and why, and which texts match."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

from engine.errors import InvalidRequest
from engine.protocol.sampling_params import Grammar, GrammarKind
from engine.structured_output.compiler import (
    TextTokens,
    check_grammar,
    compile_grammar,
    load_tokens,
)
from tests.engine.texts import CHARACTERS, save_bytes, save_characters, save_merges
from tests.tokenizer_types import TYPES


@pytest.fixture
def tokens(tmp_path: Path) -> TextTokens:
    return load_tokens(tmp_path, save_bytes(tmp_path))


def schema(value: Any) -> Grammar:
    return Grammar("json", json.dumps(value))


def accepts(tokens: TextTokens, grammar: Grammar, text: str) -> bool:
    """Whether the whole text matches."""
    matcher = compile_grammar(tokens, grammar).deep_copy()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("regex", r"[0-9]{2}|x+", "42", "4"),
        ("regex", r"^\d{4}-\d\d$", "2026-11", "2026-1"),
        ("regex", "gr[öü]n", "grün", "gran"),
        ("regex", r"a\\", "a\\", "a"),
        ("choice", '["yes", "no"]', "no", "n"),
        ("choice", '["a|b", "c"]', "a|b", "a"),
        (
            "choice",
            json.dumps(['"\\/\n\u0000\u2028[x]{2}😀^$.', "#"]),
            '"\\/\n\u0000\u2028[x]{2}😀^$.',
            ".",
        ),
        ("json", '{"type": "object"}', '{"a": [1, {}], "b": null}', '{"a": [1, {}]'),
        ("json", '{"enum": ["x", 1]}', "1", "2"),
        ("json", f'{{"const": {2**60}}}', str(2**60), str(2**60 + 1)),
        ("json", f'{{"type": "integer", "maximum": {2**63 - 1}}}', "1", str(2**63)),
        ("json", '{"items": {}, "x-guidance": {"whitespace_flexible": false}}', "[1,2]", "[1, 2]"),
        ("grammar", 'start: "a" b+\nb: /[xy]/', "axy", "a"),
        ("grammar", 'root ::= "a" b\nb ::= [0-9]+', "a12", "a"),
        ("grammar", 'start: "x" %json {"type": "integer"}', "x12", "12"),
    ],
)
def test_texts_that_match(
    kind: GrammarKind, text: str, right: str, wrong: str, tokens: TextTokens
) -> None:
    assert accepts(tokens, Grammar(kind, text), right)
    assert not accepts(tokens, Grammar(kind, text), wrong)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", r"\bword"), "look"),
        (Grammar("regex", ""), "empty"),
        (Grammar("regex", "a\\"), "ends in a backslash"),
        (Grammar("regex", "a\\\\\\"), "ends in a backslash"),
        (Grammar("regex", r"[^\s\S]"), "no text"),
        (Grammar("choice", '[""]'), "empty"),
        (Grammar("grammar", 'start: "a" missing'), "missing"),
        (Grammar("grammar", "start: a\na: a"), "no text"),
        (Grammar("grammar", "what is this"), "GBNF"),
        (Grammar("json", "{"), "column"),
        (Grammar("json", '{"const": 9007199254740993}'), "const: 9007199254740993 cannot"),
        (Grammar("json", '{"x-guidance": 5}'), "x-guidance"),
        (Grammar("json", "[1]"), "object"),
        (schema({"type": "strin"}), "strin"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"$ref": "file:///etc/hostname"}), "hostname"),
        (Grammar("json", '{"items":' * 1500 + "{}" + "}" * 1500), "recursion"),
        (
            schema(
                {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in "ab"]} for i in range(20)]}
            ),
            "too large",
        ),
    ],
)
def test_wrong_grammars_say_why(grammar: Grammar, reason: str, tokens: TextTokens) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compile_grammar(tokens, grammar)


def test_blanks_between_the_parts_of_json_are_bounded(tokens: TextTokens) -> None:
    some = schema({"type": "object"})
    assert accepts(tokens, some, '{\n    "a" : 1 ,\t"b":  2\r\n}')
    deep = {"a": [{"b": [{"c": [1, {}]}]}]}
    for indent in (None, 0, 2, 4, "\t"):
        assert accepts(tokens, some, json.dumps(deep, indent=indent))
    assert accepts(tokens, some, "{\n" + " " * 32 + "}")
    for wrong in ("{   }", "{\n" + " " * 33 + "}", "{\n\n}", "{ \n}", " {}", "{} "):
        assert not accepts(tokens, some, wrong)


def test_schemas_of_the_size_that_people_write_compile(tokens: TextTokens) -> None:
    names = [f"property_{i}" for i in range(300)]
    properties = {name: {"type": ["string", "null"], "maxLength": 500} for name in names}
    large = {"type": "object", "properties": properties, "required": names}
    text = json.dumps(dict.fromkeys(names, "x"))
    assert accepts(tokens, schema({**large, "additionalProperties": False}), text)
    values = [f"value {i}" for i in range(2000)]
    assert accepts(tokens, schema({"enum": values}), '"value 1999"')
    assert accepts(tokens, Grammar("choice", json.dumps(values)), "value 1999")


def _optional(count: int) -> Grammar:
    properties = {f"property_{i}": {"type": "integer"} for i in range(count)}
    return schema({"type": "object", "properties": properties, "additionalProperties": False})


def test_the_sizes_that_the_limits_are_said_to_allow(tokens: TextTokens) -> None:
    required = {f"property_{i}": {"type": "integer"} for i in range(1000)}
    large = schema({"type": "object", "properties": required, "required": [*required]})
    assert accepts(tokens, large, json.dumps(dict.fromkeys(required, 1)))
    assert accepts(tokens, schema({"enum": [f"value {i}" for i in range(5000)]}), '"value 4999"')
    assert accepts(tokens, _optional(500), '{"property_7": 1, "property_499": 2}')


def test_what_no_text_gets_through_is_refused_before_one_is_written(tokens: TextTokens) -> None:
    with pytest.raises(
        InvalidRequest, match="tried failed: Parser Error: Current row has 2399 items"
    ):
        check_grammar(tokens, _optional(600))
    nested = schema({"type": "array", "items": json.loads(_optional(600).text), "minItems": 1})
    with pytest.raises(InvalidRequest, match="tried failed"):
        check_grammar(tokens, nested)


def test_what_some_texts_get_through_is_taken(tokens: TextTokens) -> None:
    for grammar in (
        Grammar("grammar", 'start: "b" | "c" x\nx: "a" x'),
        Grammar("choice", json.dumps(["a" * 30_000, "b"])),
    ):
        check_grammar(tokens, grammar)
        assert accepts(tokens, grammar, "b")


def test_the_end_is_no_token_of_the_model(tmp_path: Path) -> None:
    size = save_bytes(tmp_path)
    for vocab_size in (size, size + 63):  # a model's vocabulary may be padded
        tokens = load_tokens(tmp_path, vocab_size)
        assert tokens.end == size and tokens.complete
        assert tokens.words * 32 >= vocab_size
        first = int.from_bytes(
            compile_grammar(tokens, Grammar("regex", "a*")).compute_bitmask(), "little"
        )
        assert first == 1 << ord("a") | 1 << size


def test_ids_with_gaps_keep_the_end_behind_them(tmp_path: Path) -> None:
    save_bytes(tmp_path)
    path = tmp_path / "tokenizer.json"
    layout = json.loads(path.read_text(encoding="utf-8"))
    layout["model"]["vocab"]["ab"] = 400
    path.write_text(json.dumps(layout), encoding="utf-8")
    tokens = load_tokens(tmp_path, 401)
    assert tokens.end == 401 and tokens.library.decode_bytes([400]) == b"ab"


def test_merged_tokens_have_the_bytes_of_their_parts(tmp_path: Path) -> None:
    size = save_merges(tmp_path)
    tokens = load_tokens(tmp_path, size)
    spelled = [tokens.library.decode_bytes([token]) for token in range(1, size)]
    parts = [text for text in spelled if not _is_utf8(text)]
    assert any(len(text) > 1 for text in parts) and any(len(text) > 4 for text in spelled)
    text = "größe 日本 😀"
    matcher = compile_grammar(tokens, Grammar("regex", "größe 日本 (😀|😎)"))
    assert matcher.try_consume_tokens(tokens.library.tokenize_str(text)) and matcher.is_accepting()


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


# Texts that spell names of tokens.


def _save_added(folder: Path) -> int:
    """Merges, a special token beyond the vocabulary, and tokens that are added but not special, one
    of which the vocabulary has."""
    size = save_merges(folder)
    path = folder / "tokenizer.json"
    layout = json.loads(path.read_text(encoding="utf-8"))
    layout["model"]["vocab"]["<tool>"] = size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for id, (name, special) in enumerate(
        [("<tool>", False), ("<call>", False), ("<|turn|>", True)], size
    ):
        layout["added_tokens"].append({"id": id, "content": name, "special": special, **flags})
    layout["model"]["unk_token"] = "<|eos|>"
    path.write_text(json.dumps(layout), encoding="utf-8")
    return size + 3


def _save_pieces(folder: Path) -> int:
    """Scored pieces, special ones among them."""
    byte_pieces = [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
    pieces = [["<unk>", 0.0], ["</s>", 0.0], *byte_pieces, *([one, -5.0] for one in "abcdefs</>|")]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": id, "content": name, "special": True, **flags}
        for id, name in ((0, "<unk>"), (1, "</s>"), (len(pieces), "<|turn|>"))
    ]
    save_bytes(folder)
    path = folder / "tokenizer.json"
    layout = json.loads(path.read_text(encoding="utf-8"))
    layout["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    layout |= {"added_tokens": special, "decoder": decoder, "pre_tokenizer": None}
    path.write_text(json.dumps(layout), encoding="utf-8")
    return len(pieces) + 1


def _spell(tokens: TextTokens, grammar: Grammar) -> bytes:
    """The one text that matches, as it is written under masks."""
    matcher, written = compile_grammar(tokens, grammar).deep_copy(), b""
    while not matcher.is_stopped():
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        token = (bits & -bits).bit_length() - 1
        assert token != tokens.end and not tokens.library.is_special_token(token)
        assert matcher.consume_token(token), matcher.get_error()
        written += tokens.library.decode_bytes([token])
    assert matcher.is_accepting()
    return written


@pytest.mark.parametrize("save", [save_bytes, save_merges, _save_added, _save_pieces])
@pytest.mark.parametrize(
    "name",
    [
        "<|endoftext|>",
        "<|eos|>",
        "<|turn|>",
        "<tool>",
        "<call>",
        "<unk>",
        "</s>",
        "<|no text 257|>",
    ],
)
def test_names_of_special_tokens_are_spelled_as_text(
    name: str, save: Callable[[Path], int], tmp_path: Path
) -> None:
    tokens = load_tokens(tmp_path, save(tmp_path))
    assert tokens.complete
    for grammar, text in [
        (schema({"const": name}), json.dumps(name)),
        (schema({"enum": [name]}), json.dumps(name)),
        (Grammar("choice", json.dumps([f"ÿ{name}"])), f"ÿ{name}"),
        (Grammar("choice", json.dumps([name])), name),
        (Grammar("regex", re.escape(name)), name),
        (Grammar("grammar", f'start: "{name}" "b"'), f"{name}b"),
        (Grammar("grammar", f'root ::= "{name}"'), name),
    ]:
        assert _spell(tokens, grammar) == text.encode()


def test_a_special_token_that_the_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    size = save_characters(tmp_path, "abc")
    path = tmp_path / "tokenizer.json"
    layout = json.loads(path.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout["added_tokens"] = [{"id": size, "content": "<s>", "special": True, **flags}]
    path.write_text(json.dumps(layout), encoding="utf-8")
    with pytest.raises(InvalidRequest, match="tokens can spell"):
        compile_grammar(load_tokens(tmp_path, size + 1), Grammar("choice", '["a<s>"]'))


def test_special_tokens_have_no_names_in_grammars(tokens: TextTokens) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_grammar(tokens, Grammar("grammar", 'start: "a" <|endoftext|>'))
    assert refused.value.message.endswith('unknown special token: "<|endoftext|>"')


# Vocabularies that lack characters.


@pytest.fixture
def letters(tmp_path: Path) -> TextTokens:
    return load_tokens(tmp_path, save_characters(tmp_path))


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "object"}),
        schema({"type": "string"}),
        schema({"enum": ["yes", 7]}),
        Grammar("regex", "[a-c]*X"),
        Grammar("regex", "abé"),
        Grammar("choice", '["Yes", "No"]'),
        Grammar("grammar", 'start: "a" start "B"'),
    ],
)
def test_what_the_vocabulary_cannot_spell_is_refused(grammar: Grammar, letters: TextTokens) -> None:
    assert not letters.complete
    with pytest.raises(InvalidRequest, match="tokens can spell"):
        compile_grammar(letters, grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": ["boolean", "null"]}),
        Grammar("regex", "[a-z]{300}"),
        Grammar("regex", "(é|[a-z] )+[.]"),
        Grammar("choice", '["Yes", "no"]'),
        Grammar("grammar", 'start: "a" start "b" | "X" | "c"'),
    ],
)
def test_what_it_can_spell_somehow_is_taken(grammar: Grammar, letters: TextTokens) -> None:
    compile_grammar(letters, grammar)


def test_json_of_few_characters(tmp_path: Path) -> None:
    tokens = load_tokens(tmp_path, save_characters(tmp_path, CHARACTERS + '{}[]":0123456789'))
    deep = {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "left": {"$ref": "#/$defs/tree"},
                    "right": {"$ref": "#/$defs/tree"},
                },
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/tree",
    }
    for fits in (
        deep,
        {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 9},
    ):
        compile_grammar(tokens, schema(fits))
    with pytest.raises(InvalidRequest, match="tokens can spell"):
        compile_grammar(tokens, schema({"type": "object", "required": ["Name"]}))


# Tokenizers.


def _without_file(folder: Path) -> None:
    pass


def _with_unknown_decoder(folder: Path) -> None:
    save_bytes(folder)
    path = folder / "tokenizer.json"
    layout = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**layout, "decoder": None}), encoding="utf-8")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_without_file, "no tokenizer.json or tokenizer.model"),
        (_with_unknown_decoder, "which bytes"),
    ],
)
def test_models_without_known_texts(
    prepare: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    with pytest.raises(InvalidRequest, match=reason):
        load_tokens(tmp_path, 257)


def test_sentencepiece_like_tokenizers(tmp_path: Path) -> None:
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "\u2581": 256,
        "a": 257,
        "\u2581a": 258,
    }
    for decoder in (
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    ):
        save_bytes(tmp_path)
        path = tmp_path / "tokenizer.json"
        layout = json.loads(path.read_text(encoding="utf-8"))
        model = {
            **layout["model"],
            "vocab": pieces,
            "merges": [["\u2581", "a"]],
            "byte_fallback": True,
        }
        layout |= {"model": model, "decoder": decoder, "added_tokens": [], "pre_tokenizer": None}
        path.write_text(json.dumps(layout), encoding="utf-8")
        tokens = load_tokens(tmp_path, 259)
        assert tokens.complete and tokens.library.decode_bytes([258, 0xC3, 0xB6]) == " aö".encode()


def test_a_line_break_of_a_list_of_words_is_one(tmp_path: Path) -> None:
    library = TYPES["words_and_lines"]()
    library.save(str(tmp_path / "tokenizer.json"))
    tokens = load_tokens(tmp_path, library.get_vocab_size())
    ids = [library.encode(text).ids[0] for text in ("The", "\n", "fox")]
    assert tokens.library.decode_bytes(ids) == b" The \n fox"
    assert list(tokens.library.tokenize_str(" The \n fox")) == ids


@pytest.mark.parametrize(
    ("name", "normalizer"),
    [
        ("byte_level", normalizers.NFC()),
        ("byte_level", normalizers.Lowercase()),
        ("unigram", None),
        ("unigram_words", None),
    ],
)
def test_texts_are_written_as_the_grammar_has_them(
    name: str, normalizer: normalizers.Normalizer | None, tmp_path: Path
) -> None:
    """Not as a tokenizer would normalise them, where nothing else may come."""
    library = TYPES[name]()
    if normalizer is not None:
        library.normalizer = normalizer
    library.save(str(tmp_path / "tokenizer.json"))
    tokens = load_tokens(tmp_path, library.get_vocab_size())
    texts = ["The  quick", "  the", "quick\nfox", "don't ", " "]
    if name == "byte_level":
        texts.append("re\u0301sume\u0301")
    for text in texts:
        matcher = compile_grammar(tokens, Grammar("choice", json.dumps([text])))
        written = b""
        while True:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            token = int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[0])
            if token == tokens.end:
                break
            written += tokens.library.decode_bytes([token])
            assert matcher.consume_token(token), (text, written)
        assert written.decode() == text
