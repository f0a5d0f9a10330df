"""A tokenizer.model: encoded as SentencePiece does, with the special tokens of the files beside."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, InvalidRequest
from engine.protocol.sampling_params import Grammar
from engine.structured_output.compiler import compile_grammar, load_tokens
from engine.tokenizer_files import read_tokenizer
from service.text.tokenizer import Tokenizer
from tests.sentencepiece_models import (
    BPE,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    bpe_pieces,
    encoded,
    unigram_pieces,
    write_model,
)
from tests.tokenizer_types import TEXT

TEXTS = [
    *TEXT[:4], "", " ", "  two  spaces  ", "a", " a", "x\ny\n\nz", "</s> is <s>", "ñandú 日 🙂\t!",
    "<0x41>", "The quick brown fox" * 20,
]  # fmt: skip


def loaded(folder: Path, size: int = 1000) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, size)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("prefix", [True, False])
def test_bpe_gives_the_ids_of_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    pieces = bpe_pieces()
    write_model(tmp_path, pieces, prefix=prefix)
    tokenizer = loaded(tmp_path)
    assert tokenizer.vocab_size == len(pieces)
    for text in TEXTS:
        ids = encoded(text, pieces, prefix=prefix)
        assert list(tokenizer.encode(text, marks=False)) == ids, text
        assert tokenizer.decode(ids) == text
    assert list(tokenizer.encode("a b", begins=False)) == encoded("a b", pieces, prefix=False)


def test_unigram_reads_what_it_wrote(tmp_path: Path) -> None:
    write_model(tmp_path, unigram_pieces(), UNIGRAM, extra_spaces=False)
    tokenizer = loaded(tmp_path)
    text = "The quick brown fox quickly jumps over"
    assert tokenizer.decode(tokenizer.encode(f"  {text} ".replace(" ", "  "))) == text
    assert len(tokenizer.encode(text, marks=False)) < len(text) * 0.7


@pytest.mark.parametrize(
    ("settings", "begin", "end"),
    [
        (None, (1,), ()),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, (1,), ()),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, (), ()),
        ({"tokenizer_class": "XTokenizer", "bos_token": "<s>"}, (), ()),
        ({"add_eos_token": True, "eos_token": {"content": "</s>", "lstrip": False}}, (1,), (2,)),
        ({"bos_token": None}, (), ()),
    ],
)
def test_tokens_around_a_text(
    settings: object, begin: tuple[int, ...], end: tuple[int, ...], tmp_path: Path
) -> None:
    write_model(tmp_path, bpe_pieces())
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = loaded(tmp_path)
    assert (tokenizer.begin_ids, tokenizer.end_ids) == (begin, end)


def test_special_tokens_of_the_files_beside(tmp_path: Path) -> None:
    pieces = bpe_pieces()
    write_model(tmp_path, pieces)
    next_id = len(pieces)
    settings = {
        "added_tokens_decoder": {
            "0": {"content": "<unk>", "special": True},
            str(next_id): {"content": "<|im_start|>", "special": True, "rstrip": True},
        },
        "pad_token": "[PAD]",
        "additional_special_tokens": ["<|im_end|>", "<|im_start|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|tool|>": next_id + 1}))
    tokenizer = loaded(tmp_path)
    names = ["<|im_start|>", "<|tool|>", "[PAD]", "<|im_end|>"]
    assert [tokenizer.id_of(name) for name in names] == [next_id + i for i in range(4)]
    assert set(tokenizer.special_ids) == {"<unk>", "<s>", "</s>", *names} - {"<|tool|>"}
    assert list(tokenizer.encode_template("<s><|im_start|>"))[:2] == [1, next_id]
    assert 1 not in tokenizer.encode("<s>", marks=False)  # text that spells a token is text


def test_grammars_know_its_bytes(tmp_path: Path) -> None:
    write_model(tmp_path, bpe_pieces())
    tokens = load_tokens(tmp_path, 1000)
    assert tokens.complete
    matcher = compile_grammar(tokens, Grammar(kind="choice", text='["The quick", "ñ🙂"]'))
    tokenizer = loaded(tmp_path)
    assert matcher.consume_tokens(list(tokenizer.encode("The quick", begins=False)))


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    write_model(tmp_path, bpe_pieces())
    read = read_tokenizer(tmp_path)
    assert read is not None and read.path.name == "tokenizer.model"
    (tmp_path / "tokenizer.json").write_text(read.text)
    (tmp_path / "tokenizer.model").write_bytes(b"?")
    assert list(loaded(tmp_path).encode("a", marks=False)) == encoded("a", bpe_pieces())


def test_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    pieces = bpe_pieces()
    write_model(tmp_path, pieces)
    last = len(pieces) - 1
    message = rf"tokenizer\.model: has token id {last}, but .* ends at {last - 1}"
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path, len(pieces) - 1)
    loaded(tmp_path, len(pieces))


def test_without_the_extra_its_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, bpe_pieces())
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    message = r"tokenizer\.model: .*pip install 'minserve\[sentencepiece\]'"
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path, 1000)


def test_a_tokenizer_json_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer: .*utf-8"):
        Tokenizer.load(tmp_path, 1000)
    with pytest.raises(InvalidRequest, match=r"grammars .*tokenizer\.json: not a tokenizer"):
        load_tokens(tmp_path, 1000)


ODD: dict[str, tuple[str, object, str]] = {
    "id-text": ("added_tokens.json", {"<x>": "y"}, "the id of token '<x>' is 'y'"),
    "id-list": ("added_tokens.json", {"<x>": [1]}, r"the id of token '<x>' is \[1\]"),
    "id-infinite": ("added_tokens.json", {"<x>": math.inf}, "the id of token '<x>' is inf"),
    "id-huge": ("added_tokens.json", {"<x>": 10**400}, "the id of token '<x>' is 1000"),
    "declared-text": (
        "tokenizer_config.json", {"added_tokens_decoder": {"0": "<unk>"}}, "each with an object",
    ),
    "declared-digits": (
        "tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {}}}, "no object of token",
    ),
    "declared-list": (
        "tokenizer_config.json", {"added_tokens_decoder": [1]}, "no object of token ids",
    ),
    "declared-no-name": (
        "tokenizer_config.json", {"added_tokens_decoder": {"0": {}}}, "special token is None",
    ),
    "more-text": (
        "tokenizer_config.json", {"additional_special_tokens": "<x>"}, "is '<x>'; allowed: a list",
    ),
    "more-object": (
        "special_tokens_map.json", {"additional_special_tokens": {"a": 1}}, "allowed: a list",
    ),
    "more-number": (
        "special_tokens_map.json", {"additional_special_tokens": [1]}, "special token is 1;",
    ),
    "role-list": ("special_tokens_map.json", {"bos_token": ["a"]}, r"special token is \['a'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), ODD.values(), ids=ODD)
def test_odd_files_beside_it_are_refused_by_name(
    name: str, content: object, message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, bpe_pieces())
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.load(tmp_path, 1000)
    assert error.value.message.startswith(f"{tmp_path / name}: ")
    assert "\n" not in error.value.message


def test_a_file_beside_it_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, bpe_pieces())
    (tmp_path / "added_tokens.json").write_text("{}")
    read_text = Path.read_text

    def failing(path: Path, **options: Any) -> str:
        if path.name == "added_tokens.json":
            raise OSError(5, "Input/output error")
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(CheckpointError, match=r"/added_tokens\.json: cannot be read: Input/output"):
        Tokenizer.load(tmp_path, 1000)


def test_pieces_that_no_model_has(tmp_path: Path) -> None:
    pieces = bpe_pieces()
    write_model(tmp_path, [*pieces, ("a" * 10**6, 0.0, NORMAL)])
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: piece \d+ has 1000000 char"):
        Tokenizer.load(tmp_path, 1000)
    path = tmp_path / "tokenizer.model"
    write_model(tmp_path, [*pieces, ("zqzq", 0.0, NORMAL)])
    path.write_bytes(path.read_bytes().replace(b"zqzq", b"zq\xff\xff"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: damaged.*UTF-8"):
        Tokenizer.load(tmp_path, 1000)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    pieces = bpe_pieces()
    path = tmp_path / "tokenizer.model"
    for content, message in (
        (b"\xff" * 40, "damaged, or not a SentencePiece model"),
        (b"", "it has no pieces"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(tmp_path, 1000)
    for model, kind, suffix, message in (
        (pieces, 3, False, "model_type is 3"),
        (pieces, BPE, True, "treat_whitespace_as_suffix"),
        ([*pieces, ("<unk>", 0.0, UNKNOWN)], BPE, False, "two pieces are the same"),
    ):
        write_model(tmp_path, model, kind, suffix=suffix)
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(tmp_path, 1000)
    write_model(tmp_path, pieces)
    for added, message in (
        ({"<x>": len(pieces) + 1}, "without gaps"),
        ({"<x>": 0}, "gives token '<x>' the id 0"),
        ({"<s>": 7}, "gives token '<s>' the id 7"),
    ):
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(tmp_path, 1000)
