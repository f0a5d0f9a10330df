"""What grammars cost is measured along texts that match, and printed for every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import grammars
from tests.engine.texts import save_bytes


def test_the_whole_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "RUNS", 1)
    monkeypatch.setattr(grammars, "BESIDE_SECONDS", 0.05)
    size = save_bytes(tmp_path)
    options = ["--tokenizer", tmp_path, "--vocab-size", size, "--streams", 3, "--tokens", 4]
    assert grammars.main([str(one) for one in (*options, "--json", tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [one["grammar"] for one in figures["masks"]] == list(grammars.TEXTS)
    assert [one["requests"] for one in figures["engine"]] == list(grammars.KINDS)
    alone, *mixed = figures["beside"]
    assert (alone["others"], alone["streams"], alone["of_others"]) == ("nothing", 0, 0.0)
    assert len(mixed) == 2 * (len(grammars.KINDS) - 1)
    assert all(one["plain"] > 0 for one in figures["beside"])
    assert all(one["of_others"] > 0 for one in mixed)
    assert all(value > 0 for row in figures["masks"] for value in list(row.values())[1:])
    printed = capsys.readouterr().out
    assert all(one["requests"] in printed for one in figures["engine"])


def test_random_weights_of_a_size_have_no_grammars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream alone has no company."""
    monkeypatch.setattr(grammars, "RUNS", 1)
    size, saved = save_bytes(tmp_path), tmp_path / "figures.json"
    options = ["--tokenizer", tmp_path, "--vocab-size", size, "--streams", 1, "--tokens", 4]
    options += ["--model", "6.3m", "--json", saved]
    assert grammars.main([str(one) for one in options]) == 0
    figures = json.loads(saved.read_text(encoding="utf-8"))
    kinds = [name for name, fields in grammars.KINDS.items() if "grammar" not in fields]
    assert [one["requests"] for one in figures["engine"]] == kinds
    assert figures["beside"] == []


def test_random_weights_have_the_byte_pairs_of_their_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "RUNS", 1)
    size, saved = save_bytes(tmp_path), tmp_path / "figures.json"
    shape = {"d_model": 32, "n_layers": 1, "expansion": 1.0, "vocab_size": size}
    monkeypatch.setitem(grammars.SIZES, "6.3m", shape)
    options = ["--tokenizer", tmp_path, "--vocab-size", size, "--streams", 1, "--tokens", 4]
    options += ["--model", "6.3m", "--json", saved]
    assert grammars.main([str(one) for one in options]) == 0
    figures = json.loads(saved.read_text(encoding="utf-8"))
    assert [one["requests"] for one in figures["engine"]] == list(grammars.KINDS)


def test_a_text_that_does_not_match_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, text = grammars.TEXTS["a schema"]
    monkeypatch.setattr(grammars, "TEXTS", {"wrong": (grammar, text.replace("age", "agf"))})
    with pytest.raises(RuntimeError, match="wrong"):
        grammars.measure_masks(tmp_path, save_bytes(tmp_path), 2, threads=1)
