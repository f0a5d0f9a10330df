"""Commands that read and write text, with tokenizers of all types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import processors

from service.terminal import text as terminal_text
from service.text.tokenizer import Tokenizer
from tests.cli.conftest import Minserve
from tests.tokenizer_types import TEXT, TYPES, save_model, with_bos_and_end

WHOLE = "\n".join(TEXT) + "\n" + " ".join(TEXT).replace("\n", " ")
every_type = pytest.mark.parametrize("name", TYPES)


@every_type
def test_a_file_is_scored_by_the_ids_of_its_whole_text(
    name: str, tmp_path: Path, minserve: Minserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(save_model(tmp_path, name))
    file = tmp_path / "text.txt"
    file.write_text(WHOLE, encoding="utf-8")
    arguments = ["score", file, "--model", tmp_path, "--device", "cpu", "--json"]
    arguments += ["--dtype", "float32"]
    at_once = minserve(*arguments)
    monkeypatch.setattr(terminal_text, "PIECE_BYTES", 700)
    assert len(list(terminal_text.text_pieces(file, tokenizer.last_cut))) > 3
    in_pieces = minserve(*arguments)
    assert (at_once.returncode, in_pieces.returncode) == (0, 0), at_once.stderr + in_pieces.stderr
    told = json.loads(in_pieces.stdout)
    assert told["tokens"] == len(tokenizer.encode(WHOLE, ends=True)) - 1
    assert told == pytest.approx(json.loads(at_once.stdout), rel=1e-4)


@every_type
def test_a_text_to_train_on_has_the_ids_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens that it spells out are these tokens."""
    library = TYPES[name]()
    special = next(iter(Tokenizer(library).special_ids), "")
    whole = WHOLE.replace("\n", f"\n{special}")
    file = tmp_path / "text.txt"
    file.write_text(whole, encoding="utf-8")
    monkeypatch.setattr(terminal_text, "PIECE_BYTES", 700)
    ids = list(terminal_text.encode_file(file, library))
    assert ids == library.encode(whole, add_special_tokens=False).ids


@every_type
def test_what_is_generated_is_text_whatever_the_tokens(
    name: str, tmp_path: Path, minserve: Minserve
) -> None:
    """Random weights write bytes that are no UTF-8."""
    save_model(tmp_path, name)
    for seed in range(4):
        done = minserve(
            "generate", "The quick", "--model", tmp_path, "--device", "cpu", "--seed", seed,
            "--max-tokens", "60", "--ignore-eos",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_a_stop_string_that_names_a_special_token(tmp_path: Path, minserve: Minserve) -> None:
    save_model(tmp_path, "byte_level")
    arguments = ["generate", "The", "--model", tmp_path, "--device", "cpu", "--ignore-eos"]
    arguments += ["--max-tokens", "4000", "--seed", "1"]
    whole = minserve(*arguments).stdout
    cut = minserve(*arguments, "--stop", "<|im_start|>").stdout
    assert len(cut) < len(whole) and whole.startswith(cut.rstrip("\n"))


def test_a_text_of_one_token_and_an_end_mark_is_scored(
    tmp_path: Path, minserve: Minserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the mark alone, which has no bytes."""

    def with_end() -> Library:
        library = with_bos_and_end()
        library.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        return library

    monkeypatch.setitem(TYPES, "with_end", with_end)
    save_model(tmp_path, "with_end")
    arguments = ["score", "-", "--model", tmp_path, "--device", "cpu"]
    done = minserve(*arguments, "--json", stdin=b"a")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["tokens"], figures["bits_per_byte"]) == (1, None)
    assert minserve(*arguments, stdin=b"a").stdout.splitlines()[-1].split() == [
        "bits", "per", "byte", "-",
    ]  # fmt: skip
