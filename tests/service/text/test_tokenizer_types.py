"""What holds for the tokenizers of all types that published models have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from engine.errors import InvalidRequest
from service.text.detokenizer import LibraryDecoder
from service.text.tokenizer import Tokenizer
from service.text.utf8_chunks import Pieces
from tests.tokenizer_types import TEXT, TYPES

libraries = {name: make() for name, make in TYPES.items()}
tokenizers = {name: Tokenizer(library) for name, library in libraries.items()}
every_type = pytest.mark.parametrize("name", TYPES)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDS = st.lists(
    st.sampled_from(
        [
            *("The", "quick", "brown", "fox", "quickly", "ly", "y", "to", "be", ",", ".", "!"),
            *("\n", "\n\n", "don't", "naïve", "日本", "🙂", "{'", "<think>", " ", "  ", "x\ny"),
        ]
    ),
    max_size=30,
)


def text_of(words: list[str]) -> str:
    return " ".join(words)


def ids_of(data: st.DataObject, name: str) -> list[int]:
    """Any ids, and every other time runs of bytes where they have tokens of their own."""
    tokenizer = tokenizers[name]
    some = st.integers(0, tokenizer.vocab_size - 1)
    library = libraries[name]
    single = [id for byte in range(256) if (id := library.token_to_id(f"<0x{byte:02X}>"))]
    if single and data.draw(st.booleans()):
        some = st.one_of(some, st.sampled_from(single))
    return data.draw(st.lists(some, max_size=40))


@every_type
@given(text=st.one_of(UNICODE, WORDS.map(text_of)))
def test_a_whole_text_has_the_librarys_ids(name: str, text: str) -> None:
    tokenizer, library = tokenizers[name], libraries[name]
    assert list(tokenizer.encode(text, ends=True)) == library.encode(text).ids
    bare = library.encode(text, add_special_tokens=False).ids
    assert list(tokenizer.encode(text, marks=False)) == bare


@every_type
def test_marks_stand_where_a_text_begins_and_ends(name: str) -> None:
    tokenizer = tokenizers[name]
    bare = tokenizer.encode("The fox", marks=False)
    assert tokenizer.encode("The fox")[len(tokenizer.begin_ids) :] == bare
    assert tuple(tokenizer.encode("", ends=True)) == tokenizer.begin_ids + tokenizer.end_ids
    assert not set(tokenizer.encode("The fox", begins=False)) & set(tokenizer.begin_ids)
    expected = {
        "with_bos": ((0,), ()),
        "with_bos_and_end": ((0,), (1,)),
        "wordpiece": ((1,), (2,)),
        "byte_level_in_parts": ((0,), ()),
        "sentencepiece": ((1,), ()),
        "sentencepiece_as_it_is": ((1,), ()),
        "unigram_words": ((), (2,)),
    }
    assert (tokenizer.begin_ids, tokenizer.end_ids) == expected.get(name, ((), ()))


@every_type
def test_a_spelled_special_token_is_text_unless_it_is_said_to_be_more(name: str) -> None:
    tokenizer, library = tokenizers[name], libraries[name]
    for special, id in tokenizer.special_ids.items():
        text = f"The fox{special} quick"
        if special not in ("<unk>", "[UNK]"):
            assert id not in tokenizer.encode(text, marks=False), special
        told = tokenizer.encode(text, parse_special=True, ends=True)
        assert id in told and list(told) == library.encode(text).ids
        # A text that brings its beginning with it has it once.
        twice = tokenizer.encode(special + "The fox", parse_special=True)
        assert list(twice).count(id) == 1
        assert tokenizer.encode_template(text) == tokenizer.encode(
            text, parse_special=True, marks=False
        )
        # Cut by a mark it is text, and the text around it is what it is without the mark.
        cut = text.replace(special, special[0] + "\ufdd0" + special[1:])
        assert tokenizer.encode_template(cut, "\ufdd0") == tokenizer.encode(text, marks=False)


@every_type
@given(data=st.data())
def test_pieces_joined_are_the_whole_whatever_the_ids(name: str, data: st.DataObject) -> None:
    tokenizer, ids = tokenizers[name], ids_of(data, name)
    whole = tokenizer.decode(ids)
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == whole
    at_once, cut = tokenizer.decoder(), data.draw(st.integers(0, len(ids)))
    text = at_once.feed_all(ids[:cut]) + at_once.feed_all(ids[cut:])
    assert text + at_once.flush() == whole
    follows = tokenizer.decoder(after=ids[:cut])
    rest = "".join(map(follows.feed, ids[cut:])) + follows.flush()
    assert tokenizer.decode_open(ids[:cut]) + rest == whole


@every_type
@given(text=st.one_of(UNICODE, WORDS.map(text_of)))
def test_a_texts_ids_decode_as_the_library_does(name: str, text: str) -> None:
    ids = list(tokenizers[name].encode(text))
    assert tokenizers[name].decode(ids) == libraries[name].decode(ids)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xe5", "\ufffd"),
        (b"\xe2\x82", "\ufffd\ufffd"),
        (b"\xe2\x82\xac", "€"),
        (b"a\xe2\x82b", "a\ufffd\ufffdb"),
        (b"\xe2\x82\xac\xff\xe2\x82\xac", "€\ufffd€"),
        (b"\xf0\x9f\x99\x82\xf0\x9f\x99", "🙂\ufffd\ufffd\ufffd"),
        (b"\xef\xbf\xbd\x80", "\ufffd\ufffd"),
    ],
)
def test_bytes_that_are_no_character_are_replaced_one_by_one(data: bytes, text: str) -> None:
    """And those around them are what they are."""
    tokenizer, library = tokenizers["sentencepiece"], libraries["sentencepiece"]
    ids = [library.token_to_id(f"<0x{byte:02X}>") for byte in data]
    word = library.token_to_id("▁The")
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([word, *ids, word]) == f"The{text} The"


class Counting:
    """A library that counts the ids that it decodes."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        text: str = self._library.decode(ids)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


@pytest.mark.parametrize(
    "name", [name for name, one in tokenizers.items() if one.plain_texts is None]
)
def test_a_token_costs_the_same_whatever_came_before(name: str) -> None:
    tokenizer = Tokenizer(libraries[name])
    counting = Counting(tokenizer._library)
    object.__setattr__(tokenizer._vocabulary, "library", counting)
    single = libraries[name].token_to_id("<0x80>")
    for token in filter(None, (single, *range(0, tokenizer.vocab_size, 17))):
        decoder = tokenizer.decoder()
        assert isinstance(decoder, LibraryDecoder)
        counting.decoded = 0
        for _ in range(300):
            decoder.feed(token)
        decoder.flush()
        assert counting.decoded <= 300 * 16, token


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sentencepiece", "ly"),
        ("metaspace_first", "ly"),
        ("metaspace_always", "ly"),
        ("unigram", "ly"),
        ("unigram_words", "ly brown fox"),
        ("byte_level_prefix_space", "ly"),
    ],
)
def test_text_in_mid_sentence_has_no_space_before_it(name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.marks_beginnings
    before = tokenizer.encode("The quick")
    decoder = tokenizer.decoder(after=before)
    ids = tokenizer.encode(text, begins=False)
    assert decoder.feed_all(ids) + decoder.flush() == text
    spaced = tokenizer.encode(" " + text, begins=False)
    decoder = tokenizer.decoder(after=before)
    assert decoder.feed_all(spaced) == " " + text


@every_type
def test_a_text_is_cut_where_its_parts_have_the_ids_of_the_whole(name: str) -> None:
    tokenizer = tokenizers[name]
    for text in (
        "\n".join(TEXT),
        " ".join(TEXT).replace("\n", " "),
        "naïve 🙂 " * 300,
        "a  b\n\n  c\n" * 200,
        "日本語\n" * 400,
    ):
        pieces, ids = Pieces(600, tokenizer.last_cut), tokenizer.encode("")
        cut = 0
        for start in range(0, len(text), 100):
            piece = pieces.feed(text[start : start + 100].encode())
            ids += tokenizer.encode(piece, begins=cut == 0, marks=False)
            cut += len(piece)
        assert cut, text[:20]
        ids += tokenizer.encode(pieces.finish(), begins=False)
        assert ids == tokenizer.encode(text)


def test_no_cut_is_found_where_tokens_join() -> None:
    """A vocabulary whose tokens reach over ends of lines and words."""
    merges = [("b", "\n"), ("b\n", "a"), ("b", " "), ("b ", "a")]
    names = ["a", "b", "\n", " ", ".", *map("".join, merges)]
    library = Library(models.BPE({name: id for id, name in enumerate(names)}, merges))
    library.decoder = decoders.Fuse()
    tokenizer = Tokenizer(library)
    text = "ab\nab ab\n" * 200
    assert tokenizer.last_cut(text) == 0
    # But where one begins behind a full stop.
    cut = tokenizer.last_cut(f"{text}ab.\n{text[:450]}")
    assert cut == len(f"{text}ab.\n")
    pieces = Pieces(100, tokenizer.last_cut)
    given = [pieces.feed(text[at : at + 50].encode()) for at in range(0, len(text), 50)]
    # In the end between any characters, so that no more is kept.
    assert [len(piece) for piece in given if piece] == [1600]


@every_type
@pytest.mark.parametrize(
    "how",
    [
        {"normalized": False},
        {"normalized": True},
        {"normalized": False, "lstrip": True},
        {"normalized": False, "rstrip": True},
        {"normalized": False, "single_word": True},
    ],
    ids=str,
)
def test_added_tokens_in_a_text_that_is_cut(name: str, how: dict[str, bool]) -> None:
    """Behind one some tokenizers let a text begin anew, wherever the text is cut."""
    if how["normalized"] and name == "sentencepiece":
        return  # the library itself finds such a token behind a space alone
    library = TYPES[name]()
    library.add_tokens([AddedToken("<think>", **how)])
    tokenizer = Tokenizer(library)
    text = "The quick<think>brown fox <think> jumps\n<think>over the lazy dog\nTo be " * 40
    text += "x<think>y <think>z\n\n  <think>.\n" * 40
    pieces, ids, begins = Pieces(300, tokenizer.last_cut), tokenizer.encode(""), True
    for start in range(0, len(text), 100):
        piece = pieces.feed(text[start : start + 100].encode())
        ids += tokenizer.encode(piece, begins=begins, marks=False)
        begins = begins and not piece
    assert not begins
    ids += tokenizer.encode(pieces.finish(), begins=False)
    assert list(ids) == [*tokenizer.begin_ids, *library.encode(text, add_special_tokens=False).ids]


@every_type
@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
def test_text_in_mid_sentence_that_holds_an_added_token(name: str, flag: str) -> None:
    """Or its name inside of a word, which is none where it has to be a word itself."""
    library = TYPES[name]()
    library.add_tokens([AddedToken("<think>", normalized=False, **{flag: True})])
    tokenizer = Tokenizer(library)
    before = tokenizer.encode("The", marks=False)
    for text in (
        " fox<think>ly",
        " fox <think> quick",
        " fox  <think>",
        " <think>quick\n<think> a",
    ):
        ids = before + tokenizer.encode(text, begins=False)
        assert list(ids) == library.encode("The" + text, add_special_tokens=False).ids


def test_a_long_run_of_spaces_where_added_tokens_take_spaces() -> None:
    """Their number of ways, the square of a million, is not tried."""
    library = TYPES["metaspace_first"]()
    library.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    library.add_tokens([AddedToken("<think>", lstrip=True)])
    tokenizer, spaces = Tokenizer(library), " " * 1_000_000
    ids = tokenizer.encode(f"a{spaces}x", begins=False)
    assert library.decode(list(ids)) == f"a{spaces}x"
    ids = tokenizer.encode(f"a{spaces}<think>x", begins=False)
    assert list(ids) == [*tokenizer.encode("a", begins=False), *library.encode("<think>x").ids]


def test_marks_around_texts_without_an_a() -> None:
    """They are seen around any text that has tokens."""
    library = Library(models.BPE({"[CLS]": 0, "[SEP]": 1, "G": 2, "T": 3}, []))
    library.add_special_tokens(["[CLS]", "[SEP]"])
    library.decoder = decoders.Fuse()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = Tokenizer(library)
    assert (tokenizer.begin_ids, tokenizer.end_ids) == ((0,), (1,))
    assert list(tokenizer.encode("GT")) == [0, 2, 3]


def test_a_text_that_has_no_tokens() -> None:
    library = Library(models.WordLevel({"a": 0, "b": 1}))  # none for the unknown
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(library)
    assert list(tokenizer.encode("a b")) == [0, 1]
    for how in ({}, {"begins": False}, {"parse_special": True}):
        with pytest.raises(InvalidRequest, match="has no tokens for the text"):
            tokenizer.encode("a c", **how)
    with pytest.raises(InvalidRequest, match="has no tokens for the text"):
        tokenizer.encode_template("a c")
    without_a = Library(models.WordLevel({"b": 0}))
    assert list(Tokenizer(without_a).encode("b")) == [0]
