from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.training.tokenizer import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    VOCAB_SIZE,
    byte_characters,
    byte_level_tokenizer,
)

TOKENIZER = byte_level_tokenizer()


@given(st.text())
def test_every_text_encodes_to_the_values_of_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


def test_every_byte_has_a_character_of_its_own() -> None:
    assert len(set(byte_characters())) == 256


def test_end_of_text_comes_after_the_bytes() -> None:
    assert TOKENIZER.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == VOCAB_SIZE - 1
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    ids = TOKENIZER.encode(f"a{END_OF_TEXT}b", add_special_tokens=False).ids
    assert ids == [ord("a"), END_OF_TEXT_ID, ord("b")]


def test_the_file_reads_back_the_same(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße,\n\n  日本 \x00 \u2028😀"
    assert again.encode(text).ids == TOKENIZER.encode(text).ids
