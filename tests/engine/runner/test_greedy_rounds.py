"""Rounds of batches that draw nothing but best tokens, for which a model may compute no logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.backends import dispatch, hopper
from engine.models.backends.selector import ModelBackend
from engine.models.loader import save_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState, StepToBests
from engine.protocol.requests import Request
from engine.runner import device_batch as decoding
from engine.runner.model_runner import ModelRunner
from engine.runner.sampling.batch_rows import SamplingRows, sample_rows
from engine.step_plan import DecodeRow, StepPlan
from tests.engine.runner.test_device_batch import (
    Overlapping,
    batch_of,
    begin,
    drawn_by,
    more,
    save_steep_model,
    serve,
)
from tests.engine.runner.test_model_runner import SLOTS, load, request_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_steep_model(tmp_path_factory.mktemp("model"))


class BestsToo:
    """A model whose greedy steps are apart; notes the sizes of these and of the others."""

    def __init__(self, model: ModelBackend) -> None:
        self._model = model
        self.greedy: list[int] = []
        self.others: list[int] = []

    def step_to_bests(self, rows: int) -> StepToBests:
        return self._logits

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        self.others.append(len(tokens))
        return self._model.step(tokens, state, slots)

    def _logits(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        self.greedy.append(len(tokens))
        return self._model.step(tokens, state, slots)


def sample_as_if_bests(logits: Tensor, at: SamplingRows) -> None:
    assert not at.temperature[at.slots >= 0].any()
    sample_rows(logits, at)


def bests_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> BestsToo:
    model = BestsToo(runner._model)
    monkeypatch.setattr(runner._batch, "_model", model)
    monkeypatch.setattr(decoding, "sample_bests", sample_as_if_bests)
    return model


def greedy_and_mixed(each: int) -> tuple[list[Request], list[Request]]:
    """`each` that draw the best token, and twice as many, some of the first of which do not."""
    greedy = [request_of(id, [3, id], max_tokens=50) for id in range(each)]
    mixed = []
    for id in range(2 * each):
        sampled = id < each // 2 and id % 3 == 2
        length = 9 + id % 17 if sampled else 50
        mixed.append(request_of(id, [4, id], temperature=float(sampled), max_tokens=length))
    return greedy, mixed


@pytest.mark.parametrize("kind", [ModelRunner, Overlapping])
def test_batches_that_draw_the_best_alone_need_no_logits(
    kind: type[ModelRunner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others come and go."""
    runner = kind(load(folder).config)
    greedy, mixed = greedy_and_mixed(12)
    expected = [serve(runner, requests) for requests in (greedy, mixed)]
    model = bests_of(runner, monkeypatch)
    assert serve(runner, greedy) == expected[0]
    assert model.greedy
    assert not model.others
    model.greedy.clear()
    assert serve(runner, mixed) == expected[1]
    assert model.greedy
    assert model.others


@pytest.mark.parametrize("kind", [ModelRunner, Overlapping])
@pytest.mark.parametrize("slots", [4, SLOTS])
def test_logits_are_needed_only_while_somebody_draws_from_them(
    slots: int, kind: type[ModelRunner], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever that is: it ends by itself, its row left empty or taken by another."""
    runner = kind(load(folder, max_slots=slots).config)
    runner.most_steps = 4
    model = bests_of(runner, monkeypatch)
    sampled = request_of(0, [5], temperature=1.0, max_tokens=5, ignore_eos=True)
    greedy = [request_of(id, [3, id], max_tokens=90, ignore_eos=True) for id in range(1, 4)]
    later = request_of(4, [6], max_tokens=9, ignore_eos=True)
    serve(runner, [sampled, *greedy, later])
    assert 4 <= len(model.others) <= 12
    assert len(model.greedy) > 80


@pytest.mark.gpu
def test_greedy_rounds_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one size give the same with and without logits, and each has its own graphs."""
    runner = runner_with_a_head_of_exact_sums(tmp_path, monkeypatch)
    taken: list[str] = []
    for kind, graphs in runner._batch._graphs.items():
        name = "greedy" if kind.greedy else "others" if any(kind) else "drawn"
        monkeypatch.setattr(graphs, "replay", noting(taken, name, graphs.replay))
    prompts = {key: [3, key] for key in range(60)}
    told = {}
    for greedy in (True, False):
        first = begin(runner, prompts, max_tokens=25, ignore_eos=True)
        rows = [DecodeRow(key, key, first[key], 1) for key in prompts]
        plans = [batch_of(rows, steps=13, greedy=greedy), more(steps=13, greedy=greedy)]
        pending = [runner.start(plan) for plan in plans]
        results = [runner.finish(one) for one in pending]
        pairs = zip(plans, results, strict=True)
        told[greedy] = [drawn_by(*pair, list(prompts)) for pair in pairs]
        runner.run(StepPlan(release=list(prompts)))
    assert taken == ["greedy"] * 2 + ["drawn"] * 2
    assert told[True] == told[False]
    assert {len(ids) for ids in told[True][1].values()} == {11}  # the first was the prompt's
    assert len({tuple(ids) for ids in told[True][0].values()}) > 20


@pytest.mark.gpu
def test_greedy_requests_are_served_by_graphs_of_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_with_a_head_of_exact_sums(tmp_path, monkeypatch)
    taken: list[str] = []
    for kind, graphs in runner._batch._graphs.items():
        name = "greedy" if kind.greedy else "others" if any(kind) else "drawn"
        monkeypatch.setattr(graphs, "replay", noting(taken, name, graphs.replay))
    greedy, _ = greedy_and_mixed(60)
    answers = serve(runner, greedy)
    assert all(len(ids) == 50 or reason == "stop" for ids, reason in answers.values())
    # Batches of few rows, while they begin and end, have logits always.
    assert set(taken) == {"drawn", "greedy"}


def runner_with_a_head_of_exact_sums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Of a vocabulary and batches for which bests are found apart. A logit is the sum of two
    channels, which no order of summing changes, so both kinds of steps draw the same tokens."""
    torch.manual_seed(3)
    config = MinRnnConfig(
        cell="mingru",
        vocab_size=3001,
        d_model=64,
        n_layers=2,
        tie_embeddings=False,
        head_bias=True,
        eos_token_id=7,
        dtype="bfloat16",
    )
    model = LM(config)
    with torch.no_grad():
        assert model.head is not None
        channels = torch.rand(config.vocab_size, config.d_model).topk(2).indices
        signs = torch.randint(0, 2, channels.shape) * 2.0 - 1
        for parameter in model.head.parameters():
            parameter.zero_()
        model.head.weight.scatter_(1, channels, signs)
    save_model(folder, model, config, "bfloat16")
    if hopper.supports(model.to("cuda", torch.bfloat16), torch.device("cuda")) is not None:
        pytest.skip("no kernels for this GPU")
    # Prompts in a chain, steps to a head apart: the first and second of all that are compared.
    monkeypatch.setattr(dispatch, "quickest_graph_of", lambda runs, lasting: int(lasting))
    runner = load(folder, device="cuda", dtype="bfloat16", max_slots=64)
    runner.warm_up()
    return runner


def noting(taken: list[str], name: str, replay: Callable[[int, int], None]) -> Any:
    def noted(size: int, steps: int) -> None:
        taken.append(name)
        replay(size, steps)

    return noted
