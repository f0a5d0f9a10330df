"""GuidedStep: with graphs and without, padded or not, it draws what the sampler draws."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.protocol.sampling_params import SamplingParams
from engine.runner.context import RunnerContext
from engine.runner.guided_decoding import GuidedSampler, GuidedStep
from engine.runner.sampling.sampler import Rows, SampleStep
from tests.engine.runner.sampling.test_sampler import EOS, VOCAB, random_logits
from tests.engine.runner.sampling.test_sampler import sampler_with as sampling_with
from tests.engine.sampling import Sampling, logprobs_of
from tests.engine.structured_output.test_masks import PARAMS, allow, masks_of

ROWS = 8
#: What requests ask for: as for masks, and beside them.
ASKED: list[dict[str, Any]] = [
    *PARAMS,
    {"temperature": 1.0, "seed": 7, "logprobs": 3},
    {"temperature": 2.0, "seed": 8, "frequency_penalty": 1.5, "logprobs": 30},
    {"temperature": 0.0, "stop_token_ids": tuple(range(9))},
]
WAYS = [
    pytest.param("cpu", False, id="cpu"),
    pytest.param("cuda", False, id="gpu", marks=pytest.mark.gpu),
    pytest.param("cuda", True, id="gpu graphs", marks=pytest.mark.gpu),
]


class Table:
    """A model whose logits are a row of a table, for each token that is read."""

    def __init__(self, device: str) -> None:
        self.rows = random_logits(VOCAB, seed=1, device=device)

    def step(self, tokens: Tensor, state: object, slots: Tensor) -> Tensor:
        return self.rows.index_select(0, tokens.long())


def step_of(sampling: Sampling, model: Table, graphs: bool) -> GuidedStep:
    """Of the same sequences as another sampler has."""
    step = GuidedStep(
        RunnerContext(
            model,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            sampling.sampler,
            sampling.params,
            sampling.processors,
            sampling.uploads,
        ),
        ROWS,
        VOCAB,
    )
    if graphs:
        step.capture([1, 4, ROWS], torch.cuda.graph_pool_handle())
    return step


def draw(step: GuidedStep, rows: Rows, allowed: dict[int, set[int]]) -> SampleStep:
    """Some rows have a mask."""
    step.begin(rows)
    if not allowed:
        return step.sample(rows, None)
    masks = step.masks(len(rows.keys), len(allowed))
    masks.of[list(allowed)] = range(len(allowed))
    masks.bits[:] = masks_of(*allowed.values()).numpy()[:, : masks.bits.shape[1]]
    return step.sample(rows, masks)


@pytest.mark.parametrize(("device", "graphs"), WAYS)
@torch.inference_mode()
def test_draws_are_the_samplers(device: str, graphs: bool) -> None:
    params = [SamplingParams(**fields) for fields in ASKED]
    expected, own = (sampling_with(*params, device=device) for _ in range(2))
    model, random = Table(device), Random(0)
    step = step_of(own, model, graphs)
    last, drawn = [0] * ROWS, [0] * ROWS
    masked = 0
    for _ in range(60):
        keys = random.sample(range(ROWS), random.randint(1, ROWS))
        rows = range(len(keys))
        allowed = {
            row: {EOS, *random.sample(range(VOCAB), random.randint(1, 9))}
            for row in rows
            if random.random() < 0.4
        }
        masked += bool(allowed)
        positions = [drawn[key] for key in keys]
        at = Rows(keys, keys, [last[key] for key in keys], positions)
        result = draw(step, at, allowed)
        logits = model.rows[at.tokens]
        masks = allow(len(keys), allowed, device) if allowed else None
        other = expected.sample(keys, positions, logits, masks)
        assert result.tokens.tolist() == other.tokens.tolist()
        assert result.keys == keys
        assert logprobs_of(result) == other.logprobs
        for row, token in zip(keys, result.tokens.tolist(), strict=True):
            last[row], drawn[row] = token, drawn[row] + 1
        for row, tokens in allowed.items():
            assert int(result.tokens[row]) in tokens
    assert 10 < masked < 60


class Matchers:
    """Whose masks have so many words; of each row the last bits say which it is."""

    def __init__(self, words: int) -> None:
        self.words = words

    def fill(self, keys: list[int], positions: list[int], out: NDArray[np.int32]) -> None:
        assert out.shape == (len(keys), self.words)
        out[:] = np.arange(self.words) + 100 * np.array(keys)[:, None]


@pytest.mark.parametrize("words", [1, 2, 3])
def test_matchers_may_have_more_tokens_than_the_model_or_fewer(words: int) -> None:
    sampling = Sampling(VOCAB, (EOS,))
    context = RunnerContext(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        sampling.sampler,
        sampling.params,
        sampling.processors,
        sampling.uploads,
    )
    draws = GuidedSampler(context, None, Matchers(words))  # type: ignore[arg-type]
    bits = np.full((2, 2), -1, np.int32)
    draws._fill(Rows([7, 8, 9], [0, 1, 2], [0, 0, 0], [1, 1, 1]), [0, 2], bits)
    assert bits[:, 0].tolist() == [700, 900]
    assert words < 2 or bits[:, 1].tolist() == [701, 901]


@pytest.mark.parametrize(("device", "graphs"), WAYS)
@torch.inference_mode()
def test_logits_that_are_not_finite_are_told(device: str, graphs: bool) -> None:
    sampling = sampling_with(*[SamplingParams(temperature=1.0, seed=1)] * 3, device=device)
    model = Table(device)
    model.rows[5, 7] = float("nan")
    step = step_of(sampling, model, graphs)
    tokens = draw(step, Rows([0, 1, 2], [0, 1, 2], [4, 5, 6], [1, 1, 1]), {1: {3}, 2: {9}}).tokens
    assert tokens[0] >= 0 and tokens[1:].tolist() == [-1, 9]
