"""`--quantize`: of weights at load and of a written checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, Quantization
from engine.engine import Engine
from engine.models.loader import load_config, load_model
from engine.training.evaluation import carried_loss
from service import cli
from service.settings import Settings
from tests.cli.conftest import TEXT, Minserve

ON_CPU = ["--device", "cpu"]
EXACTLY = [*ON_CPU, "--dtype", "float32"]  # whatever this processor has
kinds = pytest.mark.parametrize("kind", ["int8", "fp8"])


@pytest.fixture
def quantised(minserve: Minserve, trained: Path, tmp_path: Path, kind: Quantization) -> Path:
    """The folder that `minserve convert --quantize` writes."""
    folder = tmp_path / "quantised"
    done = minserve("convert", trained, folder, "--quantize", kind)
    assert done.returncode == 0, done.stderr
    assert kind in done.stdout
    return folder


@kinds
def test_generate_at_load_and_from_a_quantised_folder(
    minserve: Minserve, trained: Path, quantised: Path, kind: Quantization
) -> None:
    arguments = [*ON_CPU, "--max-tokens", "30", "--seed", "1"]
    at_load = minserve("generate", "To be", "--model", trained, "--quantize", kind, *arguments)
    assert at_load.returncode == 0, at_load.stderr
    assert len(at_load.stdout) > 1
    for more in ([], ["--quantize", kind], ["--quantize", "none"]):
        stored = minserve("generate", "To be", "--model", quantised, *more, *arguments)
        assert stored.returncode == 0, stored.stderr
        assert stored.stdout == at_load.stdout


@kinds
def test_score_at_load_and_from_a_quantised_folder(
    minserve: Minserve, trained: Path, quantised: Path, text_file: Path, kind: Quantization
) -> None:
    def nats(*arguments: str | Path) -> float:
        done = minserve("score", text_file, "--json", *EXACTLY, *arguments)
        assert done.returncode == 0, done.stderr
        figure: float = json.loads(done.stdout)["nats_per_token"]
        return figure

    exact = nats("--model", trained)
    at_load = nats("--model", trained, "--quantize", kind)
    assert at_load == nats("--model", quantised)
    model, _ = load_model(trained, "cpu", "float32", kind)
    expected = carried_loss(model, torch.tensor(list(TEXT.encode()))).per_token
    assert math.isclose(at_load, expected, rel_tol=1e-6)
    assert exact != at_load and abs(exact - at_load) < 0.02


@kinds
def test_a_folder_that_is_quantised_otherwise_is_refused(
    minserve: Minserve, quantised: Path, text_file: Path, kind: Quantization, tmp_path: Path
) -> None:
    other = "fp8" if kind == "int8" else "int8"
    options = ["--quantize", other]
    for command in (
        ["generate", "To be", "--model", quantised, *options, *ON_CPU],
        ["score", text_file, "--model", quantised, *options, *ON_CPU],
        ["convert", quantised, tmp_path / "again", *options],
    ):
        done = minserve(*command)
        assert done.returncode == 2
        assert f"its weights are {kind} and cannot be quantised as {other}" in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("command", ["generate", "score", "convert", "serve"])
def test_an_unknown_quantization_is_refused(
    command: str, minserve: Minserve, trained: Path, text_file: Path, tmp_path: Path
) -> None:
    arguments = {
        "generate": ["To be", "--model", trained],
        "score": [text_file, "--model", trained],
        "convert": [trained, tmp_path / "out"],
        "serve": ["--model", trained],
    }[command]
    done = minserve(command, *arguments, "--quantize", "int4")
    assert done.returncode == 2
    assert "int4" in done.stderr and "'fp8'" in done.stderr.replace('"', "'")


def test_serve_takes_it_from_the_environment_and_its_option(
    monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    assert Settings().engine_config().quantization is None
    monkeypatch.setenv("MINSERVE_QUANTIZE", "fp8")
    assert Settings().engine_config().quantization == "fp8"
    seen: list[EngineConfig] = []
    monkeypatch.setattr(
        "service.server.server.serve", lambda settings: seen.append(settings.engine_config()) or 0
    )
    assert cli.main(["serve", "--model", str(trained), "--quantize", "int8"]) == 0
    assert seen[0].quantization == "int8"


@kinds
def test_the_engine_says_how_its_model_is_quantised(
    trained: Path, quantised: Path, kind: Quantization
) -> None:
    config = {"device": "cpu", "threads": 1, "max_slots": 1, "share_slots": 0}
    plain = Engine.load(EngineConfig(model=str(trained), **config)).info
    at_load = Engine.load(EngineConfig(model=str(trained), quantize=kind, **config)).info
    stored = Engine.load(EngineConfig(model=str(quantised), **config)).info
    assert (plain.quantization, at_load.quantization, stored.quantization) == (None, kind, kind)
    assert plain.parameters == at_load.parameters == stored.parameters
    assert load_config(quantised).quantization == kind
