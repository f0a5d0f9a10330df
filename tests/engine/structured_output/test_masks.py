"""Masks of grammars in the sampler: first of all, and on the rows that have one alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ops.upload import UploadRing
from engine.protocol.sampling_params import SamplingParams
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.runner.sampling.sampler import Allowed
from tests.engine.runner.sampling.test_sampler import (
    DEVICES,
    EOS,
    VOCAB,
    random_logits,
    sampler_with,
)

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 6, "logit_bias": {1: 100.0, 2: -100.0}, "min_tokens": 3},
]


def masks_of(*rows: set[int]) -> Tensor:
    """The bits of these tokens; those of the last word's rest are set, and mean nothing."""
    each = np.zeros((len(rows), 64), np.uint8)
    each[:, VOCAB:] = 1
    for row, tokens in enumerate(rows):
        each[row, sorted(tokens)] = 1
    return torch.from_numpy(np.packbits(each, axis=1, bitorder="little").view(np.int32))


def allow(rows: int, masks: dict[int, set[int]], device: str = "cpu") -> Allowed:
    """Of so many rows, some have a mask."""
    mask_of = torch.full((rows,), -1, dtype=torch.int32)
    for which, row in enumerate(masks):
        mask_of[row] = which
    return Allowed(masks_of(*masks.values()).to(device), mask_of.to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_tokens(device: str) -> None:
    rows = [{0, 7, 8, 31, 32, 39}, set(), set(range(VOCAB))]
    logits = random_logits(3, device=device)
    masked = logits.clone()
    where = torch.device(device)
    slots = torch.zeros(3, dtype=torch.int32, device=where)
    allowed = allow(3, dict(enumerate(rows)), device)
    processors = LogitsProcessors(1, VOCAB, (EOS,), UploadRing(where))
    processors.apply(masked, slots, slots, slots.long(), *allowed)
    for row, tokens in enumerate(rows):
        finite = {int(token) for token in masked[row].isfinite().nonzero()}
        assert finite == tokens
        kept = sorted(tokens)
        assert torch.equal(masked[row, kept], logits[row, kept])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fields", PARAMS)
def test_only_what_is_allowed_is_drawn(fields: dict[str, Any], device: str) -> None:
    tokens = {3, 11, 12, 30, EOS}
    sampler = sampler_with(SamplingParams(**fields), device=device)
    allowed = allow(1, {0: tokens}, device)
    drawn = set()
    for position in range(60):
        logits = random_logits(1, position, device)
        draws = sampler.sample([0], [position], logits, allowed)
        assert int(draws.tokens) >= 0
        drawn.add(int(draws.tokens))
        if position < fields.get("min_tokens", 0):
            assert int(draws.tokens) != EOS
    assert drawn <= tokens and len(drawn) > 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fields", PARAMS)
def test_a_mask_of_everything_changes_nothing(fields: dict[str, Any], device: str) -> None:
    params = SamplingParams(**fields)
    free, masked = sampler_with(params, device=device), sampler_with(params, device=device)
    allowed = allow(1, {0: set(range(VOCAB))}, device)
    for position in range(20):
        logits = random_logits(1, position, device)
        expected = free.sample([0], [position], logits)
        assert torch.equal(masked.sample([0], [position], logits, allowed).tokens, expected.tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_without_a_grammar_draw_what_they_drew(device: str) -> None:
    params = [SamplingParams(**{**fields, "logprobs": 2}) for fields in PARAMS]
    free, masked = sampler_with(*params, device=device), sampler_with(*params, device=device)
    rows, keys = [1, 3], list(range(len(params)))
    allowed = allow(len(params), {1: {1}, 3: {2}}, device)
    for position in range(12):
        logits = random_logits(len(params), position, device)
        positions = [position] * len(params)
        expected = free.sample(keys, positions, logits).tokens.tolist()
        tokens = masked.sample(keys, positions, logits, allowed).tokens.tolist()
        assert [tokens[row] for row in rows] == [1, 2]
        assert all(tokens[row] == expected[row] for row in keys if row not in rows)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampler = sampler_with(SamplingParams(temperature=0.0, logprobs=2))
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 9] = 3.0, 1.0
    draws = sampler.sample([0], [0], logits, allow(1, {0: {9, 10}}))
    assert draws.tokens.tolist() == [9]
    (logprobs,) = draws.logprobs.values()
    total = math.log(VOCAB - 2 + math.exp(3) + math.exp(1))
    assert logprobs.logprob == pytest.approx(1 - total, abs=1e-6)
    assert logprobs.top_ids == [5, 9]
    assert not logprobs.is_greedy


def test_top_k_counts_what_is_allowed() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    allowed = allow(1, {0: {0, 1, 2}})
    sampler = sampler_with(SamplingParams(temperature=50.0, top_k=2, seed=1))
    drawn = {int(sampler.sample([0], [at], logits, allowed).tokens) for at in range(50)}
    assert drawn == {1, 2}


def test_logits_that_are_not_finite_are_told_under_a_mask_too() -> None:
    sampler = sampler_with(SamplingParams(temperature=1.0))
    logits = random_logits(1)
    logits[0, 20] = math.nan
    draws = sampler.sample([0], [0], logits, allow(1, {0: {4}}))
    assert draws.tokens.tolist() == [-1]
