"""Plain vocabularies of words or characters as tokenizers."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.tokenizer_files import read_tokenizer, read_tokenizer_file

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


@pytest.mark.parametrize(
    "names",
    [["UNK", "PAD", "BOS", "EOS", "SOS"], ["xxunk", "xxpad", "xxbos"], ["[UNK]", "pad", "sos"]],
)
def test_plain_names_of_special_tokens_are_no_words(names: list[str], tmp_path: Path) -> None:
    library = library_of("\n".join([*names, *"abc"]), tmp_path / "characters.txt")
    size = len(names)
    assert ids(library, "cab z") == [size + 2, size, size + 1, 0, 0]
    assert library.decode([size, size + 1]) == "ab"


@pytest.mark.parametrize("blank", [" ", "\n"])
def test_a_space_or_line_break_shows_characters(blank: str, tmp_path: Path) -> None:
    library = library_of(json.dumps(["a", blank, "b", "START", "END"]), tmp_path / "file")
    assert ids(library, f"a{blank}b") == [0, 1, 2]


def test_a_line_break_among_words(tmp_path: Path) -> None:
    """Its token is that of a line break in a text, whatever it is that a line's end is else."""
    tokens = ["the", "cat", "\n", "<eos>", "<unk>"]
    library = library_of(json.dumps(tokens), tmp_path / "words.json")
    assert ids(library, "the cat\n\ncat the\r\n") == [0, 1, 2, 2, 1, 0, 2]
    assert library.decode([0, 2, 1, 3]) == "the \n cat <eos>"
    assert ids(library, library.decode([0, 2, 2, 1])) == [0, 2, 2, 1]


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path: Path) -> None:
    for text in ("the\ncat\n", '["the", "cat"]'):
        assert ids(library_of("\ufeff" + text, tmp_path / "file"), "the cat") == [0, 1]
    layout = (read_tokenizer_file(tmp_path / "file")).text
    (tmp_path / "tokenizer.json").write_text("\ufeff" + layout, encoding="utf-8")
    assert read_tokenizer_file(tmp_path / "tokenizer.json").text == layout
    read = read_tokenizer(tmp_path)
    assert read is not None and read.text == layout


def test_a_bracketed_name_begins_a_list_of_words(tmp_path: Path) -> None:
    library = library_of("[UNK]\n[PAD]\nthe\ncat\n", tmp_path / "words.txt")
    assert ids(library, "the dog") == [2, 0]


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
        ('{"version": "1.0", "model": {"type": "BP', "begins with '{' as JSON does, but cannot be"),
        ('{"the": 0, "cat": 1,}', "cannot be read: "),
        ("{\nthe\n", "begins with '{' as JSON does"),
        ('["the", "cat"', "begins with '[' as JSON does, but cannot be read: Expecting ','"),
        ('[\n  "the",\n  "cat"\n', "begins with '[' as JSON does"),
        ("[the\ncat\n", "begins with '[' as JSON does"),
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read: a number has too many digits"),
        ('{"a": ' + "9" * 4000 + "}", f"'a' has id {'9' * 40}; allowed: 0 to"),
        ('{"' + "9" * 5000 + '": "a"}', "'a' has an id of 5000 digits; allowed: 0 to"),
        ('{"' + "9" * 20 + '": "a"}', f"'a' has id {'9' * 20}; allowed: 0 to"),
        ('["the", "a cat", "dog"]', "the word 'a cat' has white space in it, at which"),
        ('["the", "cat", "dog", " "]', "the word ' ' has white space in it"),
        ('["the", "cat", "\\n\\n", "\\n"]', r"the word '\n\n' has white space in it"),
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
