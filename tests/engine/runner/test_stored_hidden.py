"""A prompt that is wholly cached: its first token follows from the hidden state that is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.models.backends.cpu import CpuBackend
from engine.protocol.events import Finished
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner
from tests.engine.runner.test_model_runner import load, random_prompt, save_random_model

# Where their bits depend on nothing else: packed models on the CPU, and fixed sums on Hopper.
EXACT = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"quantize": "int8"}, id="int8"),
    pytest.param({"dtype": "float32", "deterministic": True}, id="deterministic"),
    pytest.param(
        {"dtype": "bfloat16", "deterministic": True, "device": "cuda"},
        marks=pytest.mark.gpu,
        id="gpu deterministic",
    ),
]
ROUNDED = [
    pytest.param({"dtype": "float16"}, id="torch float16"),
    pytest.param({"dtype": "bfloat16", "device": "cuda"}, marks=pytest.mark.gpu, id="gpu bfloat16"),
    pytest.param({"dtype": "float16", "device": "cuda"}, marks=pytest.mark.gpu, id="gpu float16"),
]
TIERS = {
    "device": {"share_slots": 12, "host_state_bytes": 0},
    "host": {"share_slots": 0, "host_state_bytes": 2**20},
    "both": {"share_slots": 1, "host_state_bytes": 2**20},
}
PROMPT = random_prompt(150, seed=3)


def runner_of(folder: Path, **fields: Any) -> ModelRunner:
    width = 384 if fields.get("device") == "cuda" else 32
    model = save_random_model(folder, d_model=width, conv_kernel=3)
    return load(model, **fields)


def ask(engine: Engine, *prompts: list[int], **sampling: Any) -> list[Finished]:
    """The ends of greedy requests that come at once, in their order."""
    asked = {"max_tokens": 3, "temperature": 0, "logprobs": 4, "ignore_eos": True, **sampling}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**asked, choice=number, seed=5)
        engine.add("c", Request(id=number, prompt=pack_ids(prompt), sampling=params, stream=False))
    ends: dict[int, Finished] = {}
    while engine.has_work:
        for events in engine.step().values():
            assert not events.failed
            ends |= {end.request: end for end in events.finished}
    return [ends[number] for number in range(len(prompts))]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fields", [*EXACT, *ROUNDED])
def test_the_answer_is_that_of_the_prompt_read(
    tmp_path: Path, fields: dict[str, Any], tier: str
) -> None:
    engine = Engine(runner_of(tmp_path, **fields, **TIERS[tier]))
    (fresh,) = ask(engine, PROMPT)
    for other in range(3):  # with one row on the device, the state moves to host memory
        ask(engine, random_prompt(20, seed=10 + other))
    for _ in range(2):  # from where it is, and from where it was moved to
        (again,) = ask(engine, PROMPT)
        assert again.cached_tokens == len(PROMPT)
        if fields in [param.values[0] for param in EXACT]:
            assert (again.tokens, again.logprobs) == (fresh.tokens, fresh.logprobs)
        else:
            one, two = (end.logprobs[0].logprob for end in (again, fresh))
            assert one == pytest.approx(two, abs=0.02)


def test_samples_of_a_cached_prompt_read_nothing_and_share_one_row_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(runner_of(tmp_path))
    other = random_prompt(20, seed=4)
    prompts = [PROMPT, PROMPT, other, PROMPT, other]
    fresh = [ask(engine, PROMPT)[0].tokens, ask(engine, other)[0].tokens]
    rows: list[int] = []
    logits = CpuBackend.logits

    def counting(backend: CpuBackend, hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return logits(backend, hidden)

    def reading(*args: object) -> Tensor:
        raise AssertionError("a prompt is read")

    monkeypatch.setattr(CpuBackend, "logits", counting)
    monkeypatch.setattr(CpuBackend, "prefill", reading)
    ends = ask(engine, *prompts)
    assert rows == [2]
    assert [end.tokens for end in ends] == [fresh[prompt is other] for prompt in prompts]
    hot = ask(engine, PROMPT, PROMPT, PROMPT, PROMPT, temperature=5.0)
    assert len({end.tokens[0] for end in hot}) > 1, "each is sampled with its own numbers"


def test_a_state_after_an_answer_has_no_hidden_state_and_ends_no_prompt(tmp_path: Path) -> None:
    """The prompt is then read from an earlier state, and its own hidden state is stored."""
    engine = Engine(runner_of(tmp_path))
    (first,) = ask(engine, PROMPT, max_tokens=6)
    longer = [*PROMPT, *first.tokens[:5]]  # the last token of an answer is not read
    (again,) = ask(engine, longer)
    assert len(PROMPT) <= again.cached_tokens < len(longer)
    (third,) = ask(engine, longer)
    assert third.cached_tokens == len(longer)
    without = Engine(load(tmp_path, share_slots=0, host_state_bytes=0))
    (fresh,) = ask(without, longer)
    assert fresh.cached_tokens == 0
    assert third.tokens == again.tokens == fresh.tokens
    assert third.logprobs == again.logprobs


def test_every_backend_names_the_type_of_its_hidden_states(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        model = runner_of(tmp_path / dtype, dtype=dtype)._model
        state = getattr(model, "model", model).new_state(1)
        tokens, bounds = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 2])
        slots = torch.zeros(1, dtype=torch.int32)
        with torch.inference_mode():
            hidden = model.prefill(tokens, bounds.int(), state, slots)
        assert hidden.dtype == model.hidden_dtype
