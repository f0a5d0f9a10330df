"""The texts of `minserve train`: which tokens each part has."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from engine.errors import ConfigError
from engine.training import token_cache
from engine.training.data import Part
from engine.training.tokenizer import byte_level_tokenizer, train_byte_bpe
from service.terminal import corpus as texts
from service.terminal.corpus import Corpus, prepare, stretches
from service.text.documents import Document, TextError
from service.text.tokenizer import Tokenizer

END = "<|endoftext|>"
END_ID = 256
WORDS = ["the", "a", "of", "sea", "ship", "whale", "Emma", "said,", "was.", "not", "you;", "long"]


def encoded(tmp_path: Path, *paths: Path, **options: Any) -> dict[str, Part]:
    corpus = Corpus(paths=paths, **{"end_of_text": END, **options})
    return prepare(corpus, tmp_path / "tokens")


def text_of(part: Part) -> str:
    """The text of byte tokens, with end-of-text tokens spelled out."""
    return "".join(END if id == END_ID else chr(id) for id in part.ids.tolist())


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def book(title: str, paragraphs: int = 3) -> str:
    source = random.Random(title)
    body = [" ".join(source.choices(WORDS, k=12)) for _ in range(paragraphs)]
    return f"Title: {title}\nAuthor: {title[::-1]}\n\n" + "\n\n".join(body) + "\n"


def library(path: Path, *titles: str) -> Path:
    return write(path, f"{END}\n".join(map(book, titles)))


def test_one_file_is_its_bytes(tmp_path: Path) -> None:
    data = write(tmp_path / "text.txt", "Grüße\n\nand more ")
    parts = encoded(tmp_path, data)
    assert list(parts) == ["train"]
    assert bytes(parts["train"].ids.tolist()) == data.read_bytes()
    assert parts["train"].bytes == data.stat().st_size
    assert parts["train"].starts.tolist() == [0]
    assert parts["train"].what == "1 document"


def test_files_and_folders_are_documents_in_order(tmp_path: Path) -> None:
    write(tmp_path / "data" / "b.txt", "bb")
    write(tmp_path / "data" / "a" / "z.txt", "zzz")
    write(tmp_path / "data" / ".hidden", "no")
    first = write(tmp_path / "first.txt", "f")
    parts = encoded(tmp_path, first, tmp_path / "data")
    assert text_of(parts["train"]) == f"f{END}zzz{END}bb{END}"
    assert parts["train"].starts.tolist() == [0, 2, 6]
    assert parts["train"].bytes == 6
    assert parts["train"].what == "3 documents"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"one\n{END}\ntwo\n", f"one\n{END}two\n{END}"),
        (f"one\n{END}\n", "one\n"),  # one document alone ends with the text
        (f"{END}\none\n{END}\n \n{END}\ntwo", f"one\n{END}two{END}"),
        (f"a {END} in a line", f"a {END} in a line"),
    ],
)
def test_lines_of_end_of_text_end_documents(tmp_path: Path, text: str, found: str) -> None:
    parts = encoded(tmp_path, write(tmp_path / "text.txt", text))
    assert text_of(parts["train"]) == found


def test_a_tokenizer_without_the_end_of_text_token_has_none_behind_documents(
    tmp_path: Path,
) -> None:
    data = write(tmp_path / "text.txt", "one\n---\ntwo\n")
    parts = encoded(tmp_path, data, end_of_text="---")
    assert text_of(parts["train"]) == "one\ntwo\n"


def test_byte_ranges_are_held_out(tmp_path: Path) -> None:
    text = "".join(random.Random(1).choices("abcdefgh \n", k=1000))
    data = [write(tmp_path / "1.txt", text[:700]), write(tmp_path / "2.txt", text[700:])]
    parts = encoded(tmp_path, *data, valid="600:800", test="950:")
    found = {name: text_of(part).replace(END, "") for name, part in parts.items()}
    assert found == {
        "train": text[:600] + text[800:950],
        "valid": text[600:800],
        "test": text[950:],
    }
    assert parts["valid"].what == "bytes 600 to 800"
    assert parts["test"].what == "bytes 950 to the end"


def test_a_range_of_one_document_has_no_end_of_text(tmp_path: Path) -> None:
    parts = encoded(tmp_path, write(tmp_path / "t", "x" * 90 + "y" * 10), valid="90:", test="0:5")
    assert {name: text_of(part) for name, part in parts.items()} == {
        "train": "x" * 85,
        "valid": "y" * 10,
        "test": "x" * 5,
    }


def test_a_range_must_not_cut_a_character(tmp_path: Path) -> None:
    data = write(tmp_path / "text.txt", "aü" * 10)
    with pytest.raises(TextError, match="not UTF-8"):
        encoded(tmp_path, data, valid="2:")


def test_listed_documents_are_held_out(tmp_path: Path) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Moby Dick", "Dracula", "Ulysses")
    valid = write(tmp_path / "valid.txt", "# chosen by hand\nTitle: Dracula\n\n")
    test = write(tmp_path / "test.txt", "Title: Emma\n")
    parts = encoded(tmp_path, data, valid=f"@{valid}", test=f"@{test}")
    assert {name: text_of(part) for name, part in parts.items()} == {
        "train": book("Moby Dick") + END + book("Ulysses") + END,
        "valid": book("Dracula") + END,
        "test": book("Emma") + END,
    }
    assert [part.what for part in parts.values()] == ["2 documents", "1 document", "1 document"]


def test_a_listed_document_that_is_not_there_is_named(tmp_path: Path) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Dracula")
    valid = write(tmp_path / "valid.txt", "Title: Emma\nTitle: Walden\n")
    with pytest.raises(ConfigError, match="no document of the data begins with 'Title: Walden'"):
        encoded(tmp_path, data, valid=f"@{valid}")
    assert not (tmp_path / "tokens").exists()


def test_a_document_is_not_held_out_twice(tmp_path: Path) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Dracula")
    one = write(tmp_path / "one.txt", "Title: Emma\n")
    with pytest.raises(ConfigError, match="--valid and --test both have 'Title: Emma'"):
        encoded(tmp_path, data, valid=f"@{one}", test=f"@{one}")


@pytest.mark.parametrize("content", [b"\xff", b"# nothing\n"])
def test_a_list_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Dracula")
    bad = write(tmp_path / "list.txt", content)
    with pytest.raises((ConfigError, TextError), match=r"list\.txt"):
        encoded(tmp_path, data, valid=f"@{bad}")


def test_other_files_are_held_out(tmp_path: Path) -> None:
    data, valid = write(tmp_path / "train.txt", "train"), write(tmp_path / "valid.txt", "valid")
    write(tmp_path / "more" / "1.txt", "one")
    write(tmp_path / "more" / "2.txt", "two")
    parts = encoded(tmp_path, data, valid=str(valid), test=str(tmp_path / "more"))
    assert {name: text_of(part) for name, part in parts.items()} == {
        "train": f"train{END}",
        "valid": f"valid{END}",
        "test": f"one{END}two{END}",
    }
    assert parts["test"].what == "2 documents of more"


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_nothing_held_out_is_trained_on_and_nothing_is_lost(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Every document, and every byte, is in exactly one part, also with repeated headers."""
    titles = [f"Book {number}" for number in range(data.draw(st.integers(3, 7)))]
    cut = data.draw(st.integers(0, len(titles)))
    paths = [
        library(tmp_path / f"{number}.txt", *group)
        for number, group in enumerate((titles[:cut], titles[cut:]))
        if group
    ]
    held = data.draw(st.sets(st.sampled_from(titles), min_size=1, max_size=len(titles) - 1))
    listed = write(tmp_path / "list.txt", "".join(f"Title: {title}\n" for title in held))
    every = data.draw(st.sampled_from([0, 40]))
    parts = encoded(tmp_path, *paths, valid=f"@{listed}", header_every=every)
    found = {name: set(re.findall("Title: (.*)", text_of(part))) for name, part in parts.items()}
    assert found == {"train": set(titles) - held, "valid": held}
    assert text_of(parts["valid"]) == "".join(book(t) + END for t in titles if t in held)
    bodies = "".join(Document.of(book(t)).body for t in titles if t not in held)
    train = re.sub(r"Title: .*\nAuthor: .*\n\n", "", text_of(parts["train"]))
    assert train.replace(END, "") == bodies

    size = sum(path.stat().st_size for path in paths)
    begin, end = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    if begin == end:
        return
    ranges = encoded(tmp_path, *paths, valid=f"{begin}:{end}", end_of_text="no such line")
    whole = "".join(path.read_text() for path in paths)
    assert text_of(ranges["valid"]) == whole[begin:end]
    # white space that a range leaves alone is no document
    rest = whole[:begin] + whole[end:]
    assert "".join(text_of(ranges["train"]).split()) == "".join(rest.split())


def test_every_stretch_begins_with_the_header(tmp_path: Path) -> None:
    data = write(tmp_path / "book.txt", book("Emma", paragraphs=200))
    header, body = (lambda found: (found.header, found.body))(Document.of(book("Emma", 200)))
    parts = encoded(tmp_path, data, valid="0:100", header_every=400)
    train = parts["train"]
    text = text_of(train)
    assert text.count("Title: ") == 0  # the header itself was held out
    train = encoded(tmp_path, data, header_every=400)["train"]
    text = text_of(train)
    begins = [found.start() for found in re.finditer("Title: ", text)]
    assert train.starts.tolist() == begins
    assert 10 < len(begins) < 60  # of about 13,000 bytes
    pieces = [text[a:b] for a, b in zip(begins, [*begins[1:], len(text)], strict=True)]
    assert all(piece.startswith(header) for piece in pieces)
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert "".join(piece.removeprefix(header) for piece in pieces) == body
    assert len({len(piece) for piece in pieces}) > 5


def test_stretches_have_the_mean_length_that_is_asked_for() -> None:
    body = "a few words.\n\n" * 100_000
    found = list(stretches(Document("Title: x\n\n", body), 1000, random.Random(1)))
    assert len(body) / len(found) == pytest.approx(1000, rel=0.1)
    assert min(map(len, found[:-1])) >= 250


@pytest.mark.parametrize("document", [Document("", "a\n\n" * 99), Document("T: x\n\n", "a" * 999)])
def test_without_a_header_or_a_paragraphs_end_there_is_one_stretch(document: Document) -> None:
    assert list(stretches(document, 10, random.Random(1))) == [document.text]


def test_a_cache_is_used_again_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Dracula")
    valid = write(tmp_path / "valid.txt", "valid")
    encode, calls = texts._encode, []
    monkeypatch.setattr(texts, "_encode", lambda *given: (calls.append(1), encode(*given)))

    def fresh(**options: Any) -> bool:
        calls.clear()
        encoded(tmp_path, data, **options)
        return bool(calls)

    assert fresh()
    assert not fresh()
    assert fresh(header_every=50)
    assert fresh(header_every=50, valid="0:50")
    assert fresh(header_every=50, valid="0:51")
    assert fresh(valid=str(valid))
    assert not fresh(valid=str(valid))
    valid.write_text("other")
    assert fresh(valid=str(valid))
    assert fresh(vocab_size=260)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert fresh(tokenizer=tmp_path / "tokenizer.json")
    assert fresh()
    data.write_text(data.read_text() + "more")
    assert fresh()
    moved = data.rename(tmp_path / "moved.txt")
    data = moved
    assert not fresh()  # the same bytes under another name


@pytest.mark.parametrize(
    "spoil", ["tokens.json", "train.bin", "train.starts.npy", "tokenizer.json"]
)
def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, spoil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Dracula")
    before = text_of(encoded(tmp_path, data)["train"])
    (tmp_path / "tokens" / spoil).write_bytes(b"")
    (tmp_path / "tokens" / spoil).unlink() if spoil == "tokenizer.json" else None
    assert text_of(encoded(tmp_path, data)["train"]) == before
    assert "the data is encoded again" in capsys.readouterr().err


def test_an_interrupted_encoding_is_not_taken_for_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = library(tmp_path / "books.txt", "Emma", "Dracula", "Walden")
    monkeypatch.setattr(token_cache.PartWriter, "finish", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        encoded(tmp_path, data)
    monkeypatch.undo()
    assert token_cache.source_of(tmp_path / "tokens") is None
    assert text_of(encoded(tmp_path, data)["train"]).count(END) == 3


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Byte-level BPE


@pytest.fixture(scope="module")
def bpe() -> Library:
    return train_byte_bpe((book(str(number), 50) for number in range(9)), 300, END)


CHARACTERS = st.characters(exclude_categories=["Cs"])
ODD = st.text(st.sampled_from("ab 's9.,\n\r\t -") | CHARACTERS)


@given(text=ODD)
def test_bpe_round_trips_every_text(bpe: Library, text: str) -> None:
    assert bpe.decode(bpe.encode(text).ids) == text
    tokenizer = Tokenizer(bpe)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(before=ODD, after=ODD)
def test_a_cut_behind_an_empty_line_does_not_change_tokens(
    bpe: Library, before: str, after: str
) -> None:
    """A stretch of a document between two headers has the tokens that it has elsewhere."""
    before, after = before + "\n\n", "x" + after
    whole = bpe.encode(before + after).ids
    assert bpe.encode(before).ids + bpe.encode(after).ids == whole


def test_bpe_has_as_many_tokens_as_asked_for_and_its_last_one_ends_a_text(
    tmp_path: Path,
) -> None:
    data = library(tmp_path / "books.txt", *map(str, range(9)))
    parts = encoded(tmp_path, data, vocab_size=300)
    library_file = Library.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    assert library_file.get_vocab_size() == 300
    assert library_file.token_to_id(END) == 299
    train = parts["train"]
    assert (train.ids == 299).sum() == 9
    assert len(train) < 0.8 * train.bytes
    assert Tokenizer(library_file).decode(train.ids.tolist()) == "".join(
        book(str(number)) for number in range(9)
    )


def test_bpe_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    data = write(tmp_path / "text.txt", "one two " * 50 + "zzzzzzzz" * 50)
    encoded(tmp_path, data, valid="400:", vocab_size=262)
    vocabulary = Library.from_file(str(tmp_path / "tokens" / "tokenizer.json")).get_vocab()
    assert ("zz" not in vocabulary and "tw" in vocabulary) or "wo" in vocabulary


def test_more_tokens_than_the_text_has_are_refused(tmp_path: Path) -> None:
    data = library(tmp_path / "books.txt", "Emma")
    with pytest.raises(ConfigError, match="vocab_size is 5000; allowed for this text: at most"):
        encoded(tmp_path, data, vocab_size=5000)
    assert token_cache.source_of(tmp_path / "tokens") is None


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_long_documents_are_encoded_as_the_tokenizer_does(
    tmp_path: Path, kind: str, bpe: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, and bytes without the library."""
    tokenizer = byte_level_tokenizer() if kind == "bytes" else bpe
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(texts, "PIECE_BYTES", 1000)
    text = book("Emma", 200) + "Grüße 日本 😀 " * 200
    data = write(tmp_path / "text.txt", text)
    found = encoded(tmp_path, data, tokenizer=tmp_path / "tokenizer.json")["train"]
    assert np.array_equal(found.ids, tokenizer.encode(text, add_special_tokens=False).ids)
    assert found.bytes == len(text.encode())
