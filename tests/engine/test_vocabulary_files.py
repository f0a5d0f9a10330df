"""Plain vocabularies of words or characters as tokenizers."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.tokenizer_files import read_tokenizer_file

WORDS = ["the", "cat", "<unk>", "<eos>", "sat", "it's", "日本"]


def library_of(text: str, path: Path) -> Tokenizer:
    path.write_text(text, encoding="utf-8")
    return Tokenizer.from_str(read_tokenizer_file(path).text)


def ids(library: Tokenizer, text: str) -> Sequence[int]:
    found: Sequence[int] = library.encode(text).ids
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("words.txt", "\n".join(WORDS)),
        ("words.txt", "\n".join(WORDS) + "\n"),
        ("words", "\r\n".join(WORDS) + "\r\n"),
        ("words.json", json.dumps(WORDS)),
        ("word2idx.json", json.dumps({word: id for id, word in enumerate(WORDS)})),
        ("idx2word.json", json.dumps({id: word for id, word in enumerate(WORDS)})),
    ],
)
def test_words_have_the_ids_of_the_file(name: str, text: str, tmp_path: Path) -> None:
    library = library_of(text, tmp_path / name)
    assert library.get_vocab_size() == len(WORDS)
    assert ids(library, "the  cat\tsat 日本 <unk> it's") == [0, 1, 4, 6, 2, 5]
    assert ids(library, "a dog sat") == [2, 2, 4]
    assert library.decode([0, 1, 3, 4, 2]) == "the cat <eos> sat <unk>"


def test_a_line_break_is_the_token_of_a_line_s_end(tmp_path: Path) -> None:
    """As the corpora of such models have one at each line's end, also of an empty line."""
    library = library_of("\n".join(WORDS), tmp_path / "words.txt")
    assert ids(library, "the cat\n\nsat\n") == [0, 1, 3, 3, 4, 3]
    without = library_of("the\ncat\n<unk>\n", tmp_path / "other.txt")
    assert ids(without, "the\ncat") == [0, 1]


def test_a_list_of_characters_cuts_a_text_into_them(tmp_path: Path) -> None:
    every = list(string.printable)
    library = library_of(json.dumps([*every, "<unk>"]), tmp_path / "characters.json")
    text = "Hi there,\n\tyou <unk> \r\n"
    assert ids(library, text) == [every.index(character) for character in text]
    assert library.decode(ids(library, text)) == text
    assert ids(library, "é日🙂") == [100] * 3
    lines = library_of("a\nb\n<pad>\n[UNK]\n", tmp_path / "characters.txt")
    assert ids(lines, "ab c") == [0, 1, 3, 3]


def test_without_a_token_for_the_unknown_a_text_of_others_has_none(tmp_path: Path) -> None:
    library = library_of("the\ncat\n", tmp_path / "words.txt")
    with pytest.raises(Exception, match="Missing"):
        library.encode("the dog")


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    library = library_of(json.dumps({"the": 7, "cat": 3, "<unk>": 0}), tmp_path / "words.json")
    assert ids(library, "the cat sat") == [7, 3, 0]


def test_a_tokenizer_json_is_as_it_was(tmp_path: Path) -> None:
    library = library_of("the\ncat\n", tmp_path / "words.txt")
    library.save(str(tmp_path / "tokenizer.json"))
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    assert read_tokenizer_file(tmp_path / "tokenizer.json").text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the\n\ncat\n", "line 2 is ''; allowed: one word a line"),
        ("the 1234\ncat 99\n", "line 1 is 'the 1234'; allowed: one word a line"),
        ("the\ncat\nthe\n", "'the' has the ids 0 and 2"),
        ("", "line 1 is ''; allowed"),
        ("[]", "has no tokens; allowed"),
        ("{}", "has no tokens; allowed"),
        ('["a", 3]', "token 1 is 3; allowed"),
        ('["a", ""]', "token 1 is ''; allowed"),
        ('{"a": 0, "bb": 0}', "id 0 is that of 'a' and of 'bb'"),
        ('{"a": -1}', "'a' has id -1; allowed: 0 to"),
        ('{"a": 1000000000}', "'a' has id 1000000000; allowed: 0 to"),
        ('{"a": 0.5}', "not a vocabulary; allowed"),
        ('{"a": "b"}', "not a vocabulary; allowed"),
        ('{"0": "a", "00": "bb"}', "id 0 is that of"),
        ('{"a": [1]}', "not a vocabulary; allowed"),
    ],
)
def test_what_is_no_vocabulary_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(CheckpointError) as error:
        read_tokenizer_file(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such file"):
        read_tokenizer_file(tmp_path / "nowhere")
    (tmp_path / "vocab.pkl").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(CheckpointError, match=r"vocab\.pkl: not a tokenizer"):
        read_tokenizer_file(tmp_path / "vocab.pkl")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_tokenizer_file(tmp_path)
