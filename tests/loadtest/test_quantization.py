"""The table of losses: what it measures, and that it tells a loss that changed too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.models import registry
from engine.models.loader import load_model, save_model
from engine.models.mamba.config import MambaConfig
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.training.evaluation import carried_loss, windows_loss
from engine.training.tokenizer import byte_level_tokenizer
from loadtest import quantization
from loadtest.quantization import main

TEXT = "To be, or not to be: that is the question.\n" * 80


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    torch.manual_seed(0)
    config = MinRnnConfig(
        cell="minlstm", vocab_size=tokenizer.get_vocab_size(), d_model=24, n_layers=1, conv_kernel=3
    )
    save_model(tmp_path / "tiny", LM(config), config, "bfloat16")
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    return tmp_path / "tiny"


def test_states_of_both_types_are_measured(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantization, "STREAMS", 2)  # pieces so long that rounding tells
    tokenizer, folder = byte_level_tokenizer(), tmp_path / "mamba"
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=24,
        n_layers=1,
        inner=48,
        state_size=16,
        dt_rank=8,
    )
    save_model(folder, registry.build(config), config, "float32")
    tokenizer.save(str(folder / "tokenizer.json"))
    where = tmp_path / "figures.json"
    main(["--data", str(data), "--model", str(folder), "--device", "cpu", "--json", str(where)])
    exact, narrow = [row for row in json.loads(where.read_text())["rows"] if row["states"]]
    assert (exact["states"], narrow["states"]) == ("float32", "bfloat16")
    for row in (exact, narrow):
        assert row["stepped"] == pytest.approx(row["carried"], abs=0.05)
    assert exact["stepped"] != narrow["stepped"]
    assert "by the type of states" in capsys.readouterr().out


def test_the_losses_are_the_trainers_on_the_last_tenth(
    folder: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.device.library.cpu_isa", lambda: "avx512")  # whatever this one has
    where = tmp_path / "figures.json"
    code = main(
        ["--data", str(data), "--model", str(folder), "--device", "cpu", "--json", str(where)]
    )
    assert code == 0
    rows = json.loads(where.read_text())["rows"]
    assert [(row["weights"], row["activations"]) for row in rows] == [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("int8", "float32"),
        ("fp8", "float32"),
    ]
    test = torch.tensor(list(TEXT.encode()))[int(len(TEXT) * 0.9) :]
    for row, kind in ((rows[0], None), (rows[2], "int8"), (rows[3], "fp8")):
        model, _ = load_model(folder, "cpu", "float32", kind)
        assert row["windows"] == pytest.approx(
            windows_loss(model, test, window=256, batch=64).per_token
        )
        assert row["carried"] == pytest.approx(carried_loss(model, test).per_token)
    assert rows[0]["error"] is None
    assert 0 < rows[2]["error"] <= rows[2]["plain_error"] < 0.02
    assert rows[2]["error"] < rows[3]["error"] < rows[3]["plain_error"] < 0.04
    assert rows[2]["bytes"] < rows[1]["bytes"] < rows[0]["bytes"]
    shown = capsys.readouterr().out
    assert f"{rows[3]['windows']:.4f} ({rows[3]['windows'] - rows[0]['windows']:+.4f})" in shown


def test_a_change_beyond_what_is_allowed_ends_with_1(
    folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "ALLOWED", 0.0)
    assert main(["--data", str(data), "--model", str(folder), "--device", "cpu"]) == 1


def test_quantised_weights_are_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(data), "--model", "shakespeare-mingru", "--device", "cpu"])
    assert "shakespeare-mingru: is quantised" in capsys.readouterr().err
