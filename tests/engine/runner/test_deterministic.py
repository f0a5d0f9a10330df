"""`deterministic`, end to end: tokens, log-probabilities and scores of a request have the bits that
they have alone, whatever runs beside it and wherever its prompt is split or taken from a cache."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from engine.config import SCAN_CHUNK, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.models.backends.selector import select_backend
from engine.models.loader import save_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.protocol.events import Finished
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner
from engine.step_plan import StepPlan

VOCAB = 1037  # in rows of logits that begin at no multiple of anything
SMALL = {"d_model": 48, "n_layers": 2}
WIDE = {"d_model": 384, "n_layers": 2, "device": "cuda", "dtype": "bfloat16", "max_slots": 100}
GPU = pytest.mark.gpu
SETUPS = [
    pytest.param({**SMALL, "cell": "mingru"}, id="cpu mingru float32"),
    pytest.param(
        {**SMALL, "cell": "minlstm", "conv_kernel": 4, "dtype": "bfloat16", "threads": 2},
        id="cpu minlstm conv bfloat16",
    ),
    pytest.param(
        {**SMALL, "cell": "mingru", "quantize": "int8"},
        id="cpu mingru int8",
        marks=pytest.mark.slow,
    ),
    pytest.param({**WIDE, "cell": "mingru"}, marks=GPU, id="gpu mingru"),
    pytest.param(
        {**WIDE, "cell": "minlstm", "conv_kernel": 4, "learned_initial_state": True},
        marks=GPU,
        id="gpu minlstm conv",
    ),
    pytest.param(
        {**WIDE, "cell": "mingru", "d_model": 768, "expansion": 1.5, "tie_embeddings": True},
        marks=GPU,
        id="gpu mingru 768",
    ),
]
_ENGINE = {field.name for field in dataclasses.fields(EngineConfig)} - {"dtype"}


def setup_of(folder: Path, fields: dict[str, Any]) -> EngineConfig:
    """Saves a random model; how it is run deterministically."""
    torch.manual_seed(1)
    shape = {name: value for name, value in fields.items() if name not in _ENGINE}
    config = MinRnnConfig(vocab_size=VOCAB, **{**shape, "dtype": "float32"})
    model = LM(config)
    with torch.no_grad():  # sharper than random logits are, so that no answer is like another's
        (model.embedding if model.head is None else model.head).weight.mul_(3)
    save_model(folder, model, config, "float32")
    given = {name: value for name, value in fields.items() if name in _ENGINE}
    defaults = {"device": "cpu", "max_slots": 24, "share_slots": 8, "threads": 1}
    dtype = fields.get("dtype", "float32")
    return EngineConfig(model=str(folder), dtype=dtype, deterministic=True, **{**defaults, **given})


class Answer(NamedTuple):
    """Floats are compared as they are: equal means equal in every bit, none being a NaN or 0."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    scores: list[TokenLogprobs]


class Company(NamedTuple):
    answers: dict[int, Answer]
    cached_tokens: int
    largest_batch: int


def serve(runner: ModelRunner, arrivals: Sequence[Sequence[Request]]) -> Company:
    """The answers of an engine to which requests come step by step."""
    engine = Engine(runner)
    waves = list(arrivals)
    scores: dict[int, list[TokenLogprobs]] = {}
    ends: dict[int, Finished] = {}
    largest = 0
    while waves or engine.has_work:
        for request in waves.pop(0) if waves else ():
            engine.add("c", request)
        events = engine.step().get("c")
        if events is None:
            continue
        assert not events.failed
        largest = max(largest, events.stats.batch_size)
        for part in events.scores:
            scores.setdefault(part.request, []).extend(part.reports.unpack())
        ends |= {one.request: one for one in events.finished}
    # What ended last is released with the next plan, which the next engine makes.
    runner.run(StepPlan(release=list(range(sum(map(len, arrivals))))))
    answers = {
        id: Answer(list(end.tokens), end.logprobs, scores.get(id, [])) for id, end in ends.items()
    }
    return Company(answers, sum(end.cached_tokens for end in ends.values()), largest)


def random_requests(chance: random.Random, count: int) -> list[Request]:
    """Prompts of all lengths, many of which begin alike, read and answered in all ways."""
    stem = chance.choices(range(VOCAB), k=700)
    return [_random_request(chance, id, stem) for id in range(count)]


def _random_request(chance: random.Random, id: int, stem: list[int]) -> Request:
    length = chance.choice([1, 2, 9, 127, 128, 129, 200, 300, 513, 700])
    own = chance.choice([0, 1, length // 2, length])
    prompt = stem[: length - own] + chance.choices(range(VOCAB), k=own)
    score = chance.random() < 0.4
    return Request(
        id=id,
        prompt=pack_ids(prompt),
        sampling=SamplingParams(
            max_tokens=chance.choice([0, 1, 6, 20]) if score else chance.choice([1, 6, 20]),
            temperature=chance.choice([0.0, 0.0, 0.9]),
            top_p=chance.choice([1.0, 0.8]),
            seed=chance.randrange(100),
            logprobs=chance.choice([None, 0, 3]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
        ),
        stream=False,
        score=score,
        score_from=chance.choice([1, max(1, length // 2)]),
        score_top=chance.choice([0, 0, 4]),
        cache_points=tuple({chance.randint(1, length) for _ in range(chance.choice([0, 1, 3]))}),
    )


def in_waves(chance: random.Random, requests: Sequence[Request]) -> Iterator[list[Request]]:
    """All requests, in random order, a few at a time with pauses between."""
    left = chance.sample(list(requests), len(requests))
    while left:
        size = chance.choice([0, 1, 2, 12])
        yield left[:size]
        left = left[size:]


@pytest.mark.parametrize("fields", SETUPS)
def test_company_changes_no_bit(fields: dict[str, Any], tmp_path: Path) -> None:
    config = setup_of(tmp_path, fields)
    runners = []
    for budget in (SCAN_CHUNK, 300, 8192):  # prompts are split everywhere, here and there, nowhere
        runners.append(ModelRunner(dataclasses.replace(config, max_step_tokens=budget)))
        runners[-1].warm_up()
    chance = random.Random(7)
    requests = random_requests(chance, 40 if config.device == "cpu" else 160)
    # Alone also means: with nothing shared, and the whole prompt at once.
    alone: dict[int, Answer] = {}
    for request in requests[::2]:
        bare = msgspec.structs.replace(request, cache_points=())
        alone |= serve(runners[-1], [[bare]]).answers
    for runner in runners:
        company = serve(runner, list(in_waves(chance, requests)))
        assert company.largest_batch > 4 and company.cached_tokens > 0
        assert len(company.answers) == len(requests)
        for id, answer in alone.items():
            assert company.answers[id] == answer, (id, requests[id])


@pytest.mark.parametrize("fields", SETUPS)
def test_what_else_is_asked_for_changes_no_score(fields: dict[str, Any], tmp_path: Path) -> None:
    """The best tokens beside a score, asked for by the request itself or by a neighbour."""
    runner = ModelRunner(setup_of(tmp_path, fields))
    prompt = pack_ids(random.Random(3).choices(range(VOCAB), k=300))
    nothing = SamplingParams(max_tokens=0)
    plain = Request(id=0, prompt=prompt, sampling=nothing, score=True, stream=False)
    ranked = msgspec.structs.replace(plain, id=1, score_top=5)
    alone = serve(runner, [[plain]]).answers[0].scores
    together = serve(runner, [[plain, ranked]]).answers
    assert together[0].scores == alone
    assert [one.logprob for one in together[1].scores] == [one.logprob for one in alone]
    assert all(len(one.top_ids) == 5 for one in together[1].scores)
    for one in together[1].scores:
        if one.is_greedy:
            assert one.top_logprobs[0] == one.logprob


def test_the_info_says_so(tmp_path: Path) -> None:
    config = setup_of(tmp_path, {**SMALL, "cell": "mingru"})
    assert ModelRunner(config).info.deterministic
    assert not ModelRunner(dataclasses.replace(config, deterministic=False)).info.deterministic


@pytest.mark.parametrize("choice", [{"dtype": "float16"}, {"quantize": "fp8"}], ids=str)
def test_what_is_not_possible_is_refused(choice: dict[str, Any], tmp_path: Path) -> None:
    config = setup_of(tmp_path, {**SMALL, "cell": "mingru"})
    with pytest.raises(EngineError, match="float32, bfloat16 or int8 weights on a CPU") as raised:
        ModelRunner(dataclasses.replace(config, **choice))
    assert isinstance(raised.value, ConfigError) and raised.value.param == "deterministic"
    ModelRunner(dataclasses.replace(config, deterministic=False, **choice))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "choice", [{"dtype": "float32"}, {"dtype": "float16"}, {"quantize": "int8"}, {"d_model": 200}]
)
def test_what_is_not_possible_on_a_gpu_is_refused(choice: dict[str, Any], tmp_path: Path) -> None:
    config = setup_of(tmp_path, {**WIDE, "cell": "mingru", **choice})
    with pytest.raises(ConfigError, match="bfloat16 weights on a Hopper GPU"):
        ModelRunner(config)


def test_a_budget_that_splits_prompts_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape(f"at least {SCAN_CHUNK} with deterministic")):
        EngineConfig(deterministic=True, max_step_tokens=SCAN_CHUNK - 1)
    EngineConfig(deterministic=True, max_step_tokens=SCAN_CHUNK)
    EngineConfig(max_step_tokens=1)
    with pytest.raises(ConfigError, match="true or false"):
        EngineConfig(deterministic="yes")  # type: ignore[arg-type]


def test_a_model_that_torch_computes_is_refused() -> None:
    model = LM(MinRnnConfig(cell="mingru", vocab_size=9, d_model=8, n_layers=1)).double()
    with pytest.raises(ConfigError, match="deterministic"):
        select_backend(model, torch.device("cpu"), deterministic=True)
