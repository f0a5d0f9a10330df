"""Mamba-2 folders as transformers writes them give the logits of transformers' own models.

Its gated norm is per group since 5.24; with one group, older versions compute the same. It clamps
time steps of prompts, not those of single tokens with a cache, so whole texts are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.loader import load_model
from tests.models import mamba2
from tests.models.test_mamba import DEVIATIONS, deviations, prefill, random_tokens
from tests.models.test_mamba_transformers import _quiet, theirs  # noqa: F401  (a fixture)
from tests.models.variants import int32

transformers = pytest.importorskip("transformers")

GROUPED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 8,
    "state_size": 16, "n_groups": 1, "chunk_size": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"n_groups": 3},
    "limits, tied": {"time_step_limit": (0.02, 0.05), "tie_word_embeddings": True},
    "other sizes": {
        "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "expand": 4, "head_dim": 16,
        "state_size": 5, "layer_norm_epsilon": 1e-3,
    },
}  # fmt: skip
cases = pytest.mark.parametrize("changes", list(CASES.values()), ids=list(CASES))


def written(folder: Path, changes: dict[str, Any], **how: Any) -> Any:
    """A random model whose folder transformers has written; every parameter matters."""
    if changes.get("n_groups", 1) > 1 and not GROUPED:
        pytest.skip("this version norms all groups together")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(**{**SIZES, **changes})
    model = transformers.Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embeddings" in name or "lm_head" in name:
                parameter.mul_(6)  # so that the best tokens stand apart
    model.to(how.pop("dtype", torch.float32)).save_pretrained(folder, **how)
    return model


@cases
def test_logits_are_those_of_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    model = written(tmp_path, changes)
    ours, _ = load_model(tmp_path, "cpu")
    for length in (1, 2, 7, 64, 257, 2049):
        tokens = random_tokens(length, seed=length)
        got = prefill(ours, tokens, ours.new_state(1))
        assert deviations(got, theirs(model, tokens)) < DEVIATIONS
        exact = ours.double()(tokens.unsqueeze(0))[0]
        assert deviations(exact, theirs(model.double(), tokens)) < DEVIATIONS
        ours.float(), model.float()


@cases
def test_greedy_texts_are_those_of_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    """A prompt, then step by step, beside transformers' whole text."""
    model = written(tmp_path, changes)
    ours, _ = load_model(tmp_path, "cpu")
    text, state, told = random_tokens(20), ours.new_state(1), 0
    row = prefill(ours, text, state)[-1:]
    for _ in range(20):
        expected = theirs(model, text)
        best, second = expected[-1].topk(2).values
        if best - second > 2 * DEVIATIONS * expected.std():
            assert int(row.argmax()) == int(expected[-1].argmax())
            told += 1
        token = expected[-1].argmax().int().view(1)
        text = torch.cat([text, token])
        row = ours.logits(ours.step(token, state, int32([0])))
    assert told > 15


def test_bfloat16_folders_in_shards(tmp_path: Path) -> None:
    """The error against float64 is no larger than that of transformers in bfloat16."""
    model = written(tmp_path, {}, dtype=torch.bfloat16, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours, config = load_model(tmp_path, "cpu")
    assert config.dtype == "bfloat16"
    tokens = random_tokens(200)
    given = json.loads((tmp_path / "config.json").read_text())
    exact = mamba2.logits(given, dict(model.state_dict()), tokens)
    error = (prefill(ours, tokens, ours.new_state(1)) - exact).norm() / exact.norm()
    reference = (theirs(model, tokens) - exact).norm() / exact.norm()
    assert 0 < error < 1.05 * reference
