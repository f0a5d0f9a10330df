from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from service.terminal.text import TextError, text_pieces
from service.text.tokenizer import Tokenizer as Wrapped

LINES = st.text(alphabet=st.sampled_from("ab \n\t\r\u2003é😀"), max_size=200)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text") / "text"


@given(text=LINES, piece_bytes=st.integers(1, 50))
def test_the_pieces_are_the_text(file: Path, text: str, piece_bytes: int) -> None:
    file.write_bytes(text.encode())
    pieces = list(text_pieces(file, piece_bytes=piece_bytes))
    assert "".join(pieces) == text
    assert all(pieces)
    assert all(len(piece) <= 4 * piece_bytes for piece in pieces)


@given(words=st.lists(st.sampled_from(["ab", "a", "b ", " ", "\n", "\n\n"]), max_size=100))
def test_pieces_encode_as_the_whole_text_does(file: Path, words: list[str]) -> None:
    text = "".join(f"{word}{'a' if index % 3 == 0 else ''}\nb" for index, word in enumerate(words))
    file.write_bytes(text.encode())
    pieces = list(text_pieces(file, Wrapped(BPE).last_cut, 64))
    ids = [id for piece in pieces for id in BPE.encode(piece).ids]
    assert ids == BPE.encode(text).ids


def _byte_pair_tokenizer() -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["ab ab\n\nab a\n b"] * 20, trainer)
    return library


BPE = _byte_pair_tokenizer()


@pytest.mark.parametrize("before", [0, 3, 63, 64, 65, 200])
def test_bytes_that_are_no_text_are_told_with_their_place(tmp_path: Path, before: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * before + b"\xc3(" + b"y" * 100)
    with pytest.raises(TextError, match=f"at byte {before}$"):
        list(text_pieces(path, 64))
