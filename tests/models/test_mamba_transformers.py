"""Mamba folders as transformers writes them give the logits of transformers' own models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.loader import load_model
from tests.models import mamba
from tests.models.test_mamba import DEVIATIONS, LENGTHS, deviations, prefill, random_tokens
from tests.models.variants import int32

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {}),
    "mamba untied, biases": (
        "Mamba",
        {"tie_word_embeddings": False, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    ),
    "mamba, other sizes": (
        "Mamba",
        {"expand": 3, "state_size": 5, "time_step_rank": 7, "layer_norm_epsilon": 1e-3},
    ),
    "falcon": ("FalconMamba", {"tie_word_embeddings": False, "mixer_rms_eps": 1e-3}),
    "falcon tied": ("FalconMamba", {"expand": 16, "intermediate_size": 40}),
}
cases = pytest.mark.parametrize(("name", "changes"), list(CASES.values()), ids=list(CASES))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.set_verbosity(before)


def written(folder: Path, name: str, changes: dict[str, Any], **how: Any) -> Any:
    """A random model whose folder transformers has written; every parameter matters."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("A_log"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embeddings" in parameter_name or "lm_head" in parameter_name:
                parameter.mul_(6)  # so that the best tokens stand apart
    model.to(how.pop("dtype", torch.float32)).save_pretrained(folder, **how)
    return model


@torch.no_grad()
def theirs(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens.long().unsqueeze(0), use_cache=False).logits[0]
    return logits.double()


@cases
def test_logits_are_those_of_the_reference(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = written(tmp_path, name, changes)
    ours, _ = load_model(tmp_path, "cpu")
    for length in LENGTHS:
        tokens = random_tokens(length, seed=length)
        got = prefill(ours, tokens, ours.new_state(1))
        assert deviations(got, theirs(model, tokens)) < DEVIATIONS


@pytest.mark.slow
@cases
def test_logits_of_a_long_text_are_too(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = written(tmp_path, name, changes), random_tokens(2049)
    ours, _ = load_model(tmp_path, "cpu")
    assert deviations(prefill(ours, tokens, ours.new_state(1)), theirs(model, tokens)) < DEVIATIONS


@cases
@torch.no_grad()
def test_prompt_state_and_steps_go_on_as_the_reference(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Half of a text as a prompt, the rest token by token, beside transformers' own cache."""
    model = written(tmp_path, name, changes)
    ours, _ = load_model(tmp_path, "cpu")
    tokens, state = random_tokens(60), ours.new_state(1)
    got = prefill(ours, tokens[:30], state)
    given = model(tokens[:30].long().unsqueeze(0), use_cache=True)
    assert deviations(got, given.logits[0].double()) < DEVIATIONS
    for token in tokens[30:].split(1):
        given = model(token.long().unsqueeze(0), cache=given.cache, use_cache=True)
        got = ours.logits(ours.step(token, state, int32([0])))
        assert deviations(got, given.logits[0].double()) < DEVIATIONS


@cases
def test_greedy_texts_are_those_of_its_generate(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = written(tmp_path, name, changes)
    ours, _ = load_model(tmp_path, "cpu")
    prompt, state = random_tokens(20), ours.new_state(1)
    expected = model.generate(
        prompt.long().unsqueeze(0), max_new_tokens=30, min_new_tokens=30, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, 20:]  # fmt: skip
    rows = theirs(model, torch.cat([prompt, expected]))[19:-1].topk(2).values
    assert bool((rows[:, 0] - rows[:, 1] > 2 * DEVIATIONS * rows.std()).all())
    row, text = prefill(ours, prompt, state)[-1], []
    for _ in range(30):
        text.append(int(row.argmax()))
        row = ours.logits(ours.step(int32(text[-1:]), state, int32([0])))[0]
    assert text == expected.tolist()


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
def test_bfloat16_folders_in_shards(name: str, tmp_path: Path) -> None:
    """The error against float64 is no larger than that of transformers in bfloat16."""
    model = written(tmp_path, name, {}, dtype=torch.bfloat16, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours, config = load_model(tmp_path, "cpu")
    assert config.dtype == "bfloat16"
    tokens = random_tokens(200)
    given = json.loads((tmp_path / "config.json").read_text())
    exact = mamba.logits(given, dict(model.state_dict()), tokens)
    error = (prefill(ours, tokens, ours.new_state(1)) - exact).norm() / exact.norm()
    reference = (theirs(model, tokens) - exact).norm() / exact.norm()
    assert 0 < error < 1.05 * reference
