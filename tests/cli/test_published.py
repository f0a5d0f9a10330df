"""Commands on folders as they are published, with a SentencePiece tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from minGRU_pytorch.minLM import minLM

from engine import tokenizer_files
from engine.config import EngineConfig
from service.terminal import inspect
from service.text.tokenizer import Tokenizer
from tests.cli.conftest import Minserve
from tests.models import hgrn, mamba, mamba2
from tests.models.published import (
    VOCAB,
    WIDTH,
    min_lm,
    write_config,
    write_folder,
    write_single,
)
from tests.sentencepiece_models import bpe_pieces, encoded, write_model
from tests.tokenizer_types import TYPES

PIECES = bpe_pieces()
PADDED = 512  # the head is larger than the tokenizer
ON = ["--device", "cpu", "--threads", "1", "--dtype", "float32"]
MARGIN = 1e-4
PROMPT = "The quick brown"


@pytest.fixture
def theirs(tmp_path: Path) -> minLM:
    """The package's model, whose folder is tmp_path / "model"."""
    model = write_folder(tmp_path / "model", min_lm(num_tokens=PADDED), vocab_size=PADDED)
    write_model(tmp_path / "model", PIECES)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    return model.double()


def greedy(model: minLM, ids: list[int], count: int) -> list[int]:
    """The package's own choices; it fails where two tokens are as likely."""
    tokens = torch.tensor([ids])
    for _ in range(count):
        with torch.no_grad():
            best, second = (logits := model(tokens)[0, -1]).topk(2).values
        assert best - second > MARGIN
        tokens = torch.cat((tokens, logits.argmax().view(1, 1)), dim=1)
    return tokens[0, len(ids) :].tolist()


def test_greedy_text_is_the_reference_s(theirs: minLM, tmp_path: Path, minserve: Minserve) -> None:
    folder = tmp_path / "model"
    ids = [1, *encoded(PROMPT, PIECES)]
    expected = greedy(theirs, ids, 12)
    tokenizer = Tokenizer.load(folder, PADDED)
    assert tokenizer is not None
    decoder = tokenizer.decoder(after=ids)
    text = decoder.feed_all(expected) + decoder.flush()
    asked = ("--max-tokens", "12", "--temperature", "0", "--ignore-eos", *ON)
    done = minserve("generate", PROMPT, "--model", folder, *asked)
    assert (done.returncode, done.stdout) == (0, text + "\n"), done.stderr

    own = tmp_path / "own"
    converted = minserve("convert", folder, own)
    assert converted.returncode == 0, converted.stderr
    assert (own / "tokenizer.json").exists() and not (own / "tokenizer.model").exists()
    assert minserve("generate", PROMPT, "--model", own, *asked).stdout == text + "\n"


def test_score_is_the_reference_s(theirs: minLM, tmp_path: Path, minserve: Minserve) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over ñ\nthe lazy dog. " * 5)
    tokens = torch.tensor([1, *encoded(file.read_text(), PIECES)])
    with torch.no_grad():
        logits = theirs(tokens[None, :-1])[0]
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[1:]))
    done = minserve("score", file, "--model", tmp_path / "model", "--json", *ON)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nats_per_token"] == pytest.approx(loss, rel=1e-5)


def test_score_of_an_hgrn_folder_is_that_of_the_equations(
    tmp_path: Path, minserve: Minserve
) -> None:
    values = {**hgrn.VALUES, "vocab_size": len(PIECES), "use_short_conv": True}
    weights = hgrn.published_weights(values)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_single(folder, weights)
    write_model(folder, PIECES)
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    tokens = torch.tensor([1, *encoded(file.read_text(), PIECES)])
    logits = hgrn.logits(values, weights, tokens[:-1])
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[1:]))
    done = minserve("score", file, "--model", folder, "--json", *ON)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nats_per_token"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "equations", "shape", "convolved"),
    [("mamba", mamba, [3, 48, 16], 48), ("mamba2", mamba2, [3, 6, 8, 16], 48 + 2 * 16)],
    ids=["mamba", "mamba2"],
)
def test_inspect_tells_the_state_and_the_backend_of_a_mamba_folder(
    family: str,
    equations: Any,
    shape: list[int],
    convolved: int,
    tmp_path: Path,
    minserve: Minserve,
) -> None:
    weights = equations.published_weights(equations.VALUES)
    values, weights = equations.as_mamba_ssm(equations.VALUES, weights)
    (tmp_path / "config.json").write_text(json.dumps(values))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    done = minserve("inspect", tmp_path, "--json", "--device", "cpu", "--max-slots", "3")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["form"], told["family"], told["cell"]) == ("published", family, family)
    assert told["state_bytes"] == 4 * 3 * (48 * 16 + 3 * convolved)
    assert told["memory"]["states"] == 4 * told["state_bytes"]
    assert told["backend"]["name"] == "cpu"
    assert told["backend"]["paths"] == [{"name": "cpu", "used": True, "reason": None}]
    shown = minserve("inspect", tmp_path, "--device", "cpu").stdout
    assert f"{told['state_bytes']:,} bytes a sequence: ssm F32 {shape}" in shown


def test_a_mamba2_folder_quantised_at_load_and_before_says_the_same(
    tmp_path: Path, minserve: Minserve
) -> None:
    """And nearly what its weights say without it."""
    values = {**mamba2.VALUES, **mamba2.CODESTRAL, "vocab_size": len(PIECES)}
    weights = mamba2.published_weights(values)
    folder, own = tmp_path / "model", tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_single(folder, weights)
    write_model(folder, PIECES)
    done = minserve("convert", folder, own, "--quantize", "int8")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    sources = (("--model", folder, "--quantize", "int8"), ("--model", own))

    def nats(*source: str | Path) -> float:
        done = minserve("score", file, "--json", "--deterministic", *source, *ON)
        assert done.returncode == 0, done.stderr
        figure: float = json.loads(done.stdout)["nats_per_token"]
        return figure

    at_load, before = (nats(*source) for source in sources)
    assert at_load == before
    tokens = torch.tensor([1, *encoded(file.read_text(), PIECES)])
    exact = torch.nn.functional.cross_entropy(
        mamba2.logits(values, weights, tokens[:-1]), tokens[1:]
    )
    assert 0 < abs(at_load - float(exact)) < 0.02 * float(exact)
    told = json.loads(minserve("inspect", own, "--json", *ON[:2]).stdout)
    assert (told["quantization"], told["backend"]["name"]) == ("int8", "cpu")
    asked = ("--max-tokens", "12", "--temperature", "0", "--ignore-eos", *ON)
    texts = [minserve("generate", PROMPT, *source, *asked).stdout for source in sources]
    assert texts[0] == texts[1] and len(texts[0]) > 1


def test_inspect_tells_what_is_there(
    theirs: minLM, tmp_path: Path, minserve: Minserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    converted = Mock(wraps=tokenizer_files.tokenizer_json)
    monkeypatch.setattr(tokenizer_files, "tokenizer_json", converted)
    done = minserve("inspect", folder, "--json", *ON[:2], *ON[4:], "--max-slots", "3")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    parameters = sum(weight.numel() for weight in theirs.parameters())
    inner = int(WIDTH * 1.5)
    assert (told["family"], told["cell"], told["form"]) == ("minrnn", "mingru", "published")
    assert (told["parameters"], told["layers"], told["d_model"]) == (parameters, 2, WIDTH)
    converted.assert_called_once()
    assert told["tokenizer"] == {"file": "tokenizer.model", "type": "BPE", "tokens": len(PIECES)}
    assert told["state"] == [{"name": "cell", "shape": [2, inner], "dtype": "F32"}]
    assert told["state_bytes"] == 2 * inner * 4
    assert told["backend"] == {
        "name": "cpu", "paths": [{"name": "cpu", "used": True, "reason": None}],
    }  # fmt: skip
    memory = told["memory"]
    assert memory["weights"] == 4 * parameters
    assert memory["states"] == 4 * told["state_bytes"]
    assert memory["share_rows"] == 64 * (told["state_bytes"] + 4 * WIDTH)
    assert memory["total"] == sum(memory[name] for name in ("weights", "states", "share_rows"))

    other = minserve("inspect", folder, "--device", "cpu", "--dtype", "float16", "--quantize=int8")
    assert other.returncode == 0, other.stderr
    lines = dict(line.split("  ", 1) for line in other.stdout.splitlines() if line[0] != " ")
    assert lines["weights served"].strip() == "float16, matrices int8"
    assert "not used: weights are torch.float16" in other.stdout
    assert f"{parameters:,}" in lines["parameters"]


def test_inspect_tells_of_the_copy_in_16_bits(
    theirs: minLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "copy_wanted", lambda model, device: 12_300_000)  # as on Hopper
    asked = EngineConfig(model=str(tmp_path / "model"), device="cpu", quantize="int8")
    lines = inspect.shown(inspect.inspect_model(asked)).splitlines()
    (told,) = (line for line in lines if line.startswith("backend "))
    assert told.endswith(
        ", or hopper on a copy of the weights in 16 bits (12.3 MB), which is made if twice as much"
        " is free"
    )


def test_inspect_of_a_tokenizer_json_without_a_type(
    theirs: minLM, tmp_path: Path, minserve: Minserve
) -> None:
    folder = tmp_path / "model"
    layout = json.loads(TYPES["unigram"]().to_str())
    del layout["model"]["type"]
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    done = minserve("inspect", folder, "--json", *ON[:2])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["tokenizer"]
    assert (told["file"], told["type"]) == ("tokenizer.json", "Unigram")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_inspect_tells_what_is_known_of_a_device_that_is_not_there(
    theirs: minLM, tmp_path: Path, minserve: Minserve
) -> None:
    done = minserve("inspect", tmp_path / "model", "--device", "cuda", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "device 'cuda' cannot be used: " in done.stdout
    assert "on a Hopper GPU: no fused kernels: widths do not meet" in done.stdout


def test_a_tokenizer_that_is_given_replaces_the_folder_s(
    theirs: minLM, tmp_path: Path, minserve: Minserve
) -> None:
    assert minserve("convert", tmp_path / "model", tmp_path / "own").returncode == 0
    given = tmp_path / "given.json"
    (tmp_path / "own" / "tokenizer.json").rename(given)
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"?")  # not even read
    done = minserve("convert", tmp_path / "model", tmp_path / "other", "--tokenizer", given)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == given.read_bytes()


def test_errors_are_one_line(theirs: minLM, tmp_path: Path, minserve: Minserve) -> None:
    folder = tmp_path / "model"
    commands = (
        ("generate", "a", "--model", folder, *ON),
        ("inspect", folder),
        ("convert", folder, tmp_path / "x"),
    )
    write_folder(folder, min_lm(num_tokens=VOCAB))
    for told in commands:
        done = minserve(*told)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert f"has token id {len(PIECES) - 1}, but" in done.stderr
        assert f"ends at {VOCAB - 1}" in done.stderr
    write_config(folder, architectures=["LlamaForCausalLM"])
    for told in commands:
        done = minserve(*told)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "MinGRULMForCausalLM, or model_type" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_tokenizer_that_needs_the_extra(
    theirs: minLM, tmp_path: Path, minserve: Minserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    for told in (
        ("generate", "a", "--model", tmp_path / "model", *ON),
        ("inspect", tmp_path / "model"),
        ("convert", tmp_path / "model", tmp_path / "x"),
    ):
        done = minserve(*told)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "pip install 'minserve[sentencepiece]'" in done.stderr
    assert not (tmp_path / "x").exists()
