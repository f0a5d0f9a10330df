"""Sampler: each request's parameters act on its own row, in order, whatever the batch."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import sample_
from engine.protocol.sampling_params import SamplingParams
from engine.runner.sampling.random_streams import stream_ids
from tests.engine.sampling import Sampling
from tests.ops.torch_sampling import uniform

VOCAB = 40
EOS = 39
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sampler_with(
    *params: SamplingParams, prompts: list[list[int]] | None = None, device: str = "cpu"
) -> Sampling:
    """A sampler that has admitted these, with keys 0, 1, ..."""
    sampler = Sampling(VOCAB, (EOS,), device, slots=len(params))
    for key, one in enumerate(params):
        sampler.admit(key, one, [0] if prompts is None else prompts[key])
    return sampler


def random_logits(rows: int, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 2).to(device)


def draws_of(params: SamplingParams, logits: Tensor, count: int) -> list[int]:
    """Tokens at positions 0 to count - 1, all from the same logits [vocab]."""
    sampler = sampler_with(params)
    return [
        int(sampler.sample([0], [position], logits.unsqueeze(0)).tokens)
        for position in range(count)
    ]


def reference_support(
    row: list[float], params: SamplingParams, prompt: list[int], answer: list[int]
) -> dict[int, float]:
    """The probabilities of the tokens that can be drawn, by the documented order of operations."""
    logits = list(row)
    for id in set(prompt) | set(answer):
        penalty = params.repetition_penalty
        logits[id] = logits[id] / penalty if logits[id] > 0 else logits[id] * penalty
    for id in set(answer):
        logits[id] -= params.presence_penalty + params.frequency_penalty * answer.count(id)
    for id, bias in params.logit_bias.items():
        logits[id] += bias
    if len(answer) < params.min_tokens:
        for id in (EOS, *params.stop_token_ids):
            logits[id] = -math.inf
    logits = [value / params.temperature for value in logits]
    ids = sorted(range(VOCAB), key=lambda id: (-logits[id], id))
    if params.top_k:
        ids = ids[: params.top_k]
    weights = [math.exp(logits[id] - logits[ids[0]]) for id in ids]
    total = sum(weights)
    before = [sum(weights[:index]) / total for index in range(len(ids))]
    kept = {
        id: weight
        for id, weight, mass in zip(ids, weights, before, strict=True)
        if (mass < params.top_p or id == ids[0]) and weight >= params.min_p and weight > 0
    }
    return {id: weight / sum(kept.values()) for id, weight in kept.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_top_p_of_nothing_leaves_the_best_token(device: str) -> None:
    """Also beside rows that draw, and whatever else is asked for."""
    logits = random_logits(40, seed=3, device=device)
    logits[:, 5] = logits[:, 9] = 9.0  # of equal ones, the first
    best = SamplingParams(temperature=2.0, top_p=0.0, top_k=3, min_p=0.1, seed=4)
    for other in (best, SamplingParams(temperature=5.0, seed=1)):
        params = [best if key % 2 else other for key in range(40)]
        sampler = sampler_with(*params, device=device)
        tokens = sampler.sample(list(range(40)), [0] * 40, logits).tokens.tolist()
        assert set(tokens[1::2]) == {5}
        assert (set(tokens[::2]) == {5}) == (other is best)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 2.5, "presence_penalty": 0.5, "frequency_penalty": 0.8},
        {"logit_bias": {3: 4.0, 5: -100.0}, "top_k": 5},
        {"repetition_penalty": 3.0, "logit_bias": {7: 5.0}, "temperature": 1.7, "top_p": 0.85},
        {"min_tokens": 9, "stop_token_ids": (1, 2), "top_k": 6, "temperature": 2.0},
    ],
    ids=lambda params: " ".join(params) or "plain",
)
def test_draws_follow_the_documented_order_of_operations(params: dict[str, Any]) -> None:
    """Chi-square of 4,000 draws against the reference, at p = 0.001; nothing outside of it."""
    prompt, answer, count = [4, 7, 7, 8], [7, 9, 9, 30], 4000
    sampling = [SamplingParams(**params, seed=seed, max_tokens=9) for seed in range(count)]
    sampler = sampler_with(*sampling, prompts=[prompt] * count)
    keys = list(range(count))
    for position, token in enumerate(answer):
        forced = torch.full((count, VOCAB), -1e6)
        forced[:, token] = 1e6
        assert set(sampler.sample(keys, [position] * count, forced).tokens.tolist()) == {token}
    row = random_logits(1, seed=8)[0]
    row[[1, 2, EOS]] = 4.0
    tokens = sampler.sample(keys, [len(answer)] * count, row.expand(count, -1)).tokens.tolist()
    expected = reference_support(row.tolist(), sampling[0], prompt, answer)
    assert set(tokens) <= set(expected)
    statistic, freedom, rest, rest_seen = 0.0, -1, 1.0, count
    for id, share in expected.items():
        if share * count >= 5:  # the rarer ones are one class, as the test asks
            statistic += (tokens.count(id) - share * count) ** 2 / (share * count)
            freedom, rest, rest_seen = freedom + 1, rest - share, rest_seen - tokens.count(id)
    if rest * count >= 5:
        statistic += (rest_seen - rest * count) ** 2 / (rest * count)
        freedom += 1
    # Wilson and Hilferty's approximation of the 99.9 % point.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom >= 1 and statistic < bound


def test_temperature_zero_is_the_lowest_of_the_best_ids() -> None:
    logits = random_logits(2)
    logits[0, [9, 5, 30]] = 50.0
    logits[1, 0] = 60.0
    sampler = sampler_with(*[SamplingParams(temperature=0, seed=seed) for seed in range(2)])
    assert sampler.sample([0, 1], [0, 0], logits).tokens.tolist() == [5, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(30)
    sampler = sampler_with(*[SamplingParams(temperature=temperature, seed=s) for s in range(30)])
    drawn = sampler.sample(list(range(30)), [0] * 30, logits)
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_uniform_over_what_is_possible() -> None:
    params = SamplingParams(temperature=1e300, min_tokens=2000, stop_token_ids=tuple(range(30)))
    assert set(draws_of(params, random_logits(1)[0], 500)) == set(range(30, EOS))


@pytest.mark.parametrize(
    "wide", [{"top_k": VOCAB}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}]
)
def test_a_filter_that_keeps_everything_changes_no_draw(wide: dict[str, Any]) -> None:
    logits = random_logits(1, seed=2)[0]
    plain = draws_of(SamplingParams(seed=5), logits, 100)
    assert draws_of(SamplingParams(seed=5, **wide), logits, 100) == plain
    assert draws_of(SamplingParams(seed=5, top_p=1 - 1e-15), logits, 100) == plain
    assert len(set(plain)) > 5


@pytest.mark.parametrize("device", DEVICES)
def test_a_draw_depends_on_seed_choice_position_and_nothing_else(device: str) -> None:
    """Each row drawn alone, in other company and in another place, in any order of steps."""
    generator = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.7, "top_k": 30},
        {"min_p": 0.1},
        {"logit_bias": {3: 2.0}},
        {"min_tokens": 3},
        {"logprobs": 3},
        {"repetition_penalty": 1.4},
    ]
    params = [
        SamplingParams(**generator.choice(kinds), seed=generator.randrange(2**63), choice=row % 3)
        for row in range(36)
    ]
    logits = random_logits(36, seed=3, device=device)
    positions = [generator.randrange(1000) for _ in params]
    alone = []
    for row, one in enumerate(params):
        sampler = sampler_with(one, prompts=[[row]], device=device)
        alone.append(int(sampler.sample([0], [positions[row]], logits[row : row + 1]).tokens))
    for _ in range(5):
        rows = generator.sample(range(36), generator.randrange(2, 36))
        sampler = sampler_with(*params, prompts=[[row] for row in range(36)], device=device)
        drawn = sampler.sample(rows, [positions[row] for row in rows], logits[rows])
        assert drawn.tokens.tolist() == [alone[row] for row in rows]


def test_seed_choice_and_position_each_change_the_draws() -> None:
    logits = random_logits(1, seed=4)[0]
    base = draws_of(SamplingParams(seed=1, choice=0), logits, 200)
    for other in (SamplingParams(seed=2, choice=0), SamplingParams(seed=1, choice=1)):
        drawn = draws_of(other, logits, 200)
        same = sum(a == b for a, b in zip(base, drawn, strict=True))
        assert same < 60  # by chance about 20: the sum of squared probabilities is about 0.1
    assert len(set(base)) > 5  # positions
    assert base == draws_of(SamplingParams(seed=1, choice=0), logits, 200)


def test_min_tokens_rules_out_every_end_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 12]] = 30.0
    logits[0, 3] = 5.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(12,))
    sampler = sampler_with(params)
    tokens = [int(sampler.sample([0], [position], logits).tokens) for position in range(4)]
    assert tokens == [3, 3, 12, 12]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_finite_are_named_and_spoil_no_neighbour(device: str) -> None:
    features = SamplingParams(
        top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, logit_bias={1: 1.0}, logprobs=2
    )
    params = [kind for _ in range(4) for kind in (SamplingParams(), features)]
    logits = random_logits(8, device=device)
    clean = sampler_with(*params, device=device).sample(list(range(8)), [0] * 8, logits)
    broken = logits.clone()
    broken[0, 7] = broken[1, 7] = math.nan
    broken[2] = broken[3, 1] = math.inf
    broken[4] = -math.inf
    drawn = sampler_with(*params, device=device).sample(list(range(8)), [0] * 8, broken)
    assert (drawn.tokens >= 0).tolist() == [False] * 5 + [True] * 3
    assert drawn.tokens[5:].tolist() == clean.tokens[5:].tolist()
    assert all(0 <= token < VOCAB for token in drawn.tokens[5:].tolist())


def test_extreme_parameters_still_give_tokens() -> None:
    params = [
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=1e300, presence_penalty=1e300),
        SamplingParams(presence_penalty=-1e300, frequency_penalty=-1e300),
        SamplingParams(logit_bias={2: 1e300, 3: -1e300}),
    ]
    logits = random_logits(4)
    logits[:, 0] = 0.0
    sampler = sampler_with(*params)
    for position in range(5):
        drawn = sampler.sample([0, 1, 2, 3], [position] * 4, logits)
        assert (drawn.tokens >= 0).all()
    assert int(drawn.tokens[3]) == 2


def test_log_probabilities_are_of_the_raw_logits_and_of_the_rows_that_ask() -> None:
    """Biased and cooled draws report what the model itself thinks of them."""
    params = [
        SamplingParams(logprobs=3, temperature=0.1, logit_bias={6: 100.0}),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=0),
    ]
    logits = random_logits(3)
    logits[0, 6] = -1.0
    sampler = sampler_with(*params)
    drawn = sampler.sample([0, 1, 2], [0, 0, 0], logits)
    assert [(row, len(one.top_ids)) for row, one in drawn.logprobs.items()] == [(0, 3), (2, 0)]
    first, last = drawn.logprobs.values()
    reference = logits.double().log_softmax(-1)[[0, 2]]
    chosen = reference.gather(-1, drawn.tokens[[0, 2], None]).squeeze(-1)
    assert [first.logprob, last.logprob] == pytest.approx(chosen.tolist(), abs=1e-5)
    assert int(drawn.tokens[0]) == 6 and (first.is_greedy, last.is_greedy) == (False, True)
    assert first.top_ids == logits[0].topk(3).indices.tolist()
    assert first.top_logprobs == pytest.approx(reference[0].topk(3).values.tolist(), abs=1e-5)


def test_without_wishes_there_are_no_log_probabilities() -> None:
    assert sampler_with(SamplingParams()).sample([0], [0], random_logits(1)).logprobs == {}


def test_penalties_begin_anew_with_every_request() -> None:
    """What one sequence has counted in a slot tells the next one there nothing."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    sampler = Sampling(VOCAB, (EOS,), slots=30)
    for turn in range(3):
        for slot in range(30):  # more than have rows of counts at first
            told = (turn + slot) % 2 == 1
            sampler.admit(slot, params, [5] if told else [0])
            first = sampler.sample([slot], [0], logits)
            assert int(first.tokens) == (6 if told else 5)
            assert int(sampler.sample([slot], [1], logits).tokens) == (5 if told else 6)
            if slot % 3 == 0:  # others keep their rows
                sampler.admit(slot, SamplingParams(temperature=0))
                for position in range(3):
                    assert int(sampler.sample([slot], [position], logits).tokens) == 5


def test_a_slot_may_be_given_to_other_parameters() -> None:
    logits = random_logits(1)
    sampler = sampler_with(SamplingParams(temperature=0, logit_bias={4: 100.0}))
    assert int(sampler.sample([0], [0], logits).tokens) == 4
    plain = SamplingParams(temperature=0, logit_bias={9: 100.0})
    sampler.admit(0, plain)
    assert int(sampler.sample([0], [0], logits).tokens) == 9


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_is_the_one_that_a_batch_on_the_device_would_draw(device: str) -> None:
    """Of two tokens with the random number at the edge between them, so that the last bit of a
    weight decides: who else is there decides which of the two ways a row takes."""
    seeds, around = range(400), range(-6, 7)
    streams = stream_ids(torch.tensor(seeds), torch.zeros(len(seeds), dtype=torch.int64))
    numbers = uniform(streams, torch.zeros_like(streams))  # the first weighs this part of the sum
    odds = torch.maximum(numbers, 1 - numbers)  # a logit of at most 0 gives the other the rest
    edge = (1 / odds - 1).log().float()
    first = numbers < 0.5
    rows, keys = [], []
    for seed, logit in enumerate(edge.tolist()):
        for ulps in around:
            bits = torch.tensor(logit).view(torch.int32) + ulps
            small = float(bits.view(torch.float32))
            rows.append([small, 0.0] if first[seed] else [0.0, small])
            keys.append(seed)
    logits = torch.tensor(rows, device=device)
    sampler = Sampling(2, (), device, slots=len(keys))
    for key, seed in enumerate(keys):
        sampler.admit(key, SamplingParams(seed=seed, max_tokens=9))
    count = len(keys)
    got = sampler.sample(list(range(count)), [0] * count, logits).tokens.tolist()

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    tokens = column(0, torch.int32)
    sample_(
        logits, tokens, column(0, torch.int32), column(0, torch.int64), column(9, torch.int32),
        column(0, torch.int32), torch.empty(1, count, dtype=torch.int32, device=device),
        column(1, torch.float32), column(0, torch.int32), column(1, torch.float64),
        column(0, torch.float32), streams[keys].to(device),
        torch.empty(count, 0, dtype=torch.int32, device=device),
    )  # fmt: skip
    assert len(set(tokens.tolist())) == 2
    assert got == tokens.tolist()
