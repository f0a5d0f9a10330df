"""An SRU language model of PyTorch code, from its state dict to text; and one that is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.loader import load_config
from tests.cli.conftest import Minserve
from tests.models import sru

ON = ["--device", "cpu", "--threads", "1"]
WORDS = [f"word{id}" for id in range(59)] + ["<unk>", "<eos>"]
PROMPT = "word3 word1 word4\nword1 word5"
IDS = [3, 1, 4, 60, 1, 5]
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({"rescale": True, "projection_size": 7}, []),
    "options": (
        {"use_tanh": True, "layer_norm": True, "normalize_after": True, "has_skip_term": False},
        ["--tanh", "--normalize-after", "--no-skip-term"],
    ),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def write(folder: Path, kind: str) -> sru.Published:
    """The files that a user has: model.pt, a state dict, and words.txt."""
    module = sru.published(seed=6, **KINDS[kind][0])
    with torch.no_grad():  # no two words are as likely
        module.output_layer.weight.mul_(5)
    torch.save(module.state_dict(), folder / "model.pt")
    (folder / "words.txt").write_text("\n".join(WORDS))
    return module


def convert(minserve: Minserve, folder: Path, kind: str, name: str, *options: str) -> Path:
    out = folder / name
    given = ["--tokenizer", folder / "words.txt", *KINDS[kind][1], *options]
    done = minserve("convert", folder / "model.pt", out, *given)
    assert done.returncode == 0, done.stderr
    return out


@kinds
def test_its_text_and_scores_are_the_module_s(
    kind: str, tmp_path: Path, minserve: Minserve
) -> None:
    module = write(tmp_path, kind)
    folder = convert(minserve, tmp_path, kind, "my-model", "--family", "sru")
    ids = list(IDS)
    for _ in range(8):
        best, second = (logits := sru.logits(module, torch.tensor(ids))[-1]).topk(2).values
        assert best - second > 1e-3
        ids.append(int(logits.argmax()))
    expected = " ".join(WORDS[id] for id in ids[6:])
    done = minserve("generate", PROMPT, "--model", folder, "--max-tokens", "8", *ON,
                    "--temperature", "0")  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, expected)
    report = json.loads(minserve("inspect", folder, "--json", *ON[:2]).stdout)
    assert (report["family"], report["cell"]) == ("sru", "sru")
    assert report["state_bytes"] == 4 * 2 * 24
    (tmp_path / "text.txt").write_text(PROMPT)
    done = minserve("score", tmp_path / "text.txt", "--model", folder, "--json", *ON)
    assert done.returncode == 0, done.stderr
    rows = sru.logits(module, torch.tensor(IDS)).log_softmax(-1)
    nats = -float(rows[:-1].gather(1, torch.tensor(IDS)[1:, None]).mean())
    assert json.loads(done.stdout)["nats_per_token"] == pytest.approx(nats, abs=1e-4)


@kinds
def test_int8_weights_are_written_and_served(kind: str, tmp_path: Path, minserve: Minserve) -> None:
    write(tmp_path, kind)
    whole = convert(minserve, tmp_path, kind, "whole")
    eight = convert(minserve, tmp_path, kind, "int8", "--quantize", "int8")
    told = []
    for folder, options in ((whole, ["--quantize", "int8"]), (eight, [])):
        done = minserve("generate", PROMPT, "--model", folder, "--max-tokens", "8",
                        "--temperature", "0", *ON, *options)  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    assert load_config(eight).quantization == "int8"


def test_errors_are_one_line_and_leave_nothing(tmp_path: Path, minserve: Minserve) -> None:
    write(tmp_path, "plain")
    for options, message in (
        (["--family", "lstm"], "there are no recurrent layers"),
        (["--normalize-after"], "normalize_after is True; allowed: False, since there are no"),
        (["--normalize-gates"], "normalize_gates is True; allowed: none for a sru model"),
    ):
        done = minserve("convert", tmp_path / "model.pt", tmp_path / "out", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_the_own_block_is_trained_and_read(tmp_path: Path, minserve: Minserve) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    done = minserve(
        *("train", "--cell", "sru", "--data", tmp_path / "text.txt", "--out", tmp_path / "own"),
        *(*ON, "--layers", "1", "--d-model", "16", "--batch", "4", "--window", "16"),
        *("--steps", "3"),
    )
    assert done.returncode == 0, done.stderr
    assert load_config(tmp_path / "own").cell == "sru"
    done = minserve("generate", "the", "--model", tmp_path / "own", "--max-tokens", "3", *ON)
    assert done.returncode == 0, done.stderr
