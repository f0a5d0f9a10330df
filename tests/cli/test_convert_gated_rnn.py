"""A GRU or LSTM language model of PyTorch code, from its state dict to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.models.loader import load_config
from tests.cli.conftest import Minserve
from tests.models import gated_rnn
from tests.sentencepiece_models import bpe_pieces, write_model

ON = ["--device", "cpu", "--threads", "1"]
WORDS = [f"word{id}" for id in range(59)] + ["<unk>", "<eos>"]
PROMPT = "word3 word1 word4\nword1 word5"
kinds = pytest.mark.parametrize("kind", list(gated_rnn.KINDS))


def write(folder: Path, kind: str) -> nn.Module:
    """The files that a user has: model.pt, a state dict, and words.txt."""
    module = gated_rnn.published(kind, seed=5)
    with torch.no_grad():  # no two words are as likely
        module.decoder.weight.mul_(5)
    torch.save(module.state_dict(), folder / "model.pt")
    (folder / "words.txt").write_text("\n".join(WORDS))
    return module


@kinds
def test_its_text_is_the_module_s(kind: str, tmp_path: Path, minserve: Minserve) -> None:
    module, folder = write(tmp_path, kind), tmp_path / "my-model"
    done = minserve("convert", tmp_path / "model.pt", folder, "--tokenizer", tmp_path / "words.txt")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}: {kind}, 2 layers of width 24\n" and not done.stderr
    ids = [3, 1, 4, 60, 1, 5]
    for _ in range(8):
        best, second = (logits := gated_rnn.logits(module, torch.tensor(ids))[-1]).topk(2).values
        assert best - second > 1e-3
        ids.append(int(logits.argmax()))
    expected = " ".join(WORDS[id] for id in ids[6:])
    done = minserve("generate", PROMPT, "--model", folder, "--max-tokens", "8", *ON,
                    "--temperature", "0")  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, expected)


@kinds
def test_it_is_inspected_and_scored(kind: str, tmp_path: Path, minserve: Minserve) -> None:
    module, folder = write(tmp_path, kind), tmp_path / "my-model"
    minserve("convert", tmp_path / "model.pt", folder, "--tokenizer", tmp_path / "words.txt")
    done = minserve("inspect", folder, "--json", *ON[:2])
    report = json.loads(done.stdout)
    assert (report["family"], report["cell"], report["tied_head"]) == (kind, kind, False)
    assert report["state_bytes"] == 4 * 2 * 24 * (1 if kind == "gru" else 2)
    assert report["backend"]["name"] == "cpu"
    (tmp_path / "text.txt").write_text(PROMPT)
    assert "2 of width 24\n" in minserve("inspect", folder).stdout
    done = minserve("score", tmp_path / "text.txt", "--model", folder, "--json", *ON)
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([3, 1, 4, 60, 1, 5])
    rows = gated_rnn.logits(module, ids).log_softmax(-1)
    expected = -float(rows[:-1].gather(1, ids[1:, None]).mean())
    assert json.loads(done.stdout)["nats_per_token"] == pytest.approx(expected, abs=1e-4)


@kinds
def test_int8_weights_are_written_and_served(kind: str, tmp_path: Path, minserve: Minserve) -> None:
    write(tmp_path, kind)
    told = []
    for name, convert, serve in (
        ("whole", [], ["--quantize", "int8"]),
        ("int8", ["--quantize", "int8"], []),
    ):
        done = minserve("convert", tmp_path / "model.pt", tmp_path / name, "--family", kind,
                        "--tokenizer", tmp_path / "words.txt", *convert)  # fmt: skip
        assert done.returncode == 0, done.stderr
        done = minserve("generate", PROMPT, "--model", tmp_path / name, "--max-tokens", "8",
                        "--temperature", "0", *ON, *serve)  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    assert load_config(tmp_path / "int8").quantization == "int8"


def test_an_embedding_of_another_width_is_told(tmp_path: Path, minserve: Minserve) -> None:
    torch.save(gated_rnn.published("gru", embedding=10).state_dict(), tmp_path / "model.pt")
    done = minserve("convert", tmp_path / "model.pt", tmp_path / "my-model")
    assert done.returncode == 0 and "serves token ids only" in done.stderr
    done = minserve("inspect", tmp_path / "my-model")
    assert "2 of width 24, on an embedding of width 10\n" in done.stdout


def test_a_sentencepiece_model_is_converted(tmp_path: Path, minserve: Minserve) -> None:
    pieces = bpe_pieces()
    write_model(tmp_path, pieces)
    (tmp_path / "tokenizer.model").rename(tmp_path / "spm.model")
    module = gated_rnn.published("gru")
    module.encoder, module.decoder = nn.Embedding(512, 24), nn.Linear(24, 512)
    torch.save(module.state_dict(), tmp_path / "model.pt")
    done = minserve("convert", tmp_path / "model.pt", tmp_path / "my-model",
                    "--tokenizer", tmp_path / "spm.model")  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = minserve("generate", "The", "--model", tmp_path / "my-model", "--max-tokens", "3", *ON)
    assert done.returncode == 0, done.stderr


def test_errors_are_one_line_and_leave_nothing(tmp_path: Path, minserve: Minserve) -> None:
    module = write(tmp_path, "gru")
    torch.save(module, tmp_path / "module.pt")
    (tmp_path / "long.txt").write_text("\n".join([*WORDS, "more"]))
    (tmp_path / "wrong.txt").write_text("a b\n")
    for source, options, message in (
        ("module.pt", [], "weights_only=False).state_dict()"),
        ("model.pt", ["--family", "lstm"], "shows 3 gates: GRU layers, of the family gru"),
        ("model.pt", ["--family", "gpt"], "family is 'gpt'; allowed for a state dict: minrnn, "),
        ("model.pt", ["--norm-eps", "0.1"], "norm_eps is 0.1; allowed: none for a gru model"),
        ("model.pt", ["--tokenizer", tmp_path / "long.txt"], "has token id 61, but"),
        ("model.pt", ["--tokenizer", tmp_path / "wrong.txt"], "line 1 is 'a b'; allowed"),
        ("model.pt", ["--tokenizer", tmp_path / "none.txt"], "none.txt: no such file"),
    ):
        done = minserve("convert", tmp_path / source, tmp_path / "out", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()
    done = minserve("train", "--cell", "gru", "--data", tmp_path / "words.txt", "--out", tmp_path)
    assert done.returncode == 2 and "gru" in done.stderr
