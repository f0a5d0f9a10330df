"""Parameters: a row is filled with what its slot's own request asks for, whoever was there."""

from __future__ import annotations

import random

import numpy as np
import torch

from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.runner.sampling.batch_params import BatchSamplingParams
from engine.runner.sampling.batch_rows import FILLED_WORDS, HostSamplingRows, host_sampling_rows
from engine.step_plan import Admission

SLOTS, VOCAB, EOS = 4, 50, 49


def admission(slot: int, params: SamplingParams) -> Admission:
    return Admission(Request(id=slot, prompt=pack_ids([1]), sampling=params), slot, slot, None, 0)


def filled(parameters: BatchSamplingParams, slots: list[int]) -> HostSamplingRows:
    memory = torch.full((FILLED_WORDS * (len(slots) + 1),), 7, dtype=torch.int32)
    at = host_sampling_rows(memory, len(slots) + 1)
    nothing = np.zeros(len(slots), np.int64)
    parameters.fill(at, np.array(slots, np.int32), nothing, nothing)
    return at


def looked_at(at: HostSamplingRows, row: int) -> tuple[object, ...]:
    """What a draw reads of a row: of one that takes the best token only this."""
    best = (at.remaining[row], *at.stop_ids[row], at.slots[row], at.cursor[row])
    if not at.temperature[row] > 0:
        return best
    drawn = at.temperature[row], at.streams[row], at.top_k[row], at.top_p[row], at.min_p[row]
    return (*best, *drawn)


def random_params(chance: random.Random) -> SamplingParams:
    if chance.random() < 0.5:
        return SamplingParams(temperature=0, max_tokens=chance.randint(1, 9), ignore_eos=True)
    return SamplingParams(
        temperature=chance.choice([0.5, 1.0]),
        top_k=chance.choice([0, 3]),
        top_p=chance.choice([0.5, 1.0]),
        min_p=chance.choice([0.0, 0.1]),
        seed=chance.randrange(1 << 40),
        max_tokens=chance.randint(1, 9),
        stop_token_ids=tuple(chance.sample(range(VOCAB - 1), chance.randint(0, 3))),
    )


def test_nothing_is_left_of_who_had_the_slot_before() -> None:
    chance = random.Random(0)
    parameters = BatchSamplingParams(SLOTS, VOCAB, (EOS,))
    for _ in range(200):
        slots = chance.sample(range(SLOTS), chance.randint(1, SLOTS))
        admissions = [admission(slot, random_params(chance)) for slot in slots]
        parameters.admit(admissions)
        fresh = BatchSamplingParams(SLOTS, VOCAB, (EOS,))
        fresh.admit(admissions)
        ours, alone = filled(parameters, slots), filled(fresh, slots)
        for row in range(len(slots)):
            assert looked_at(ours, row) == looked_at(alone, row)
        assert ours.slots[-1] == -1 and not ours.stop_ids[-1].any()
