"""TokenRing: what rows drew is there until it is written over, wherever it lies."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.scheduler.decode_batch import RING_STEPS, TokenRing


def test_every_row_reads_what_it_drew_since_whenever() -> None:
    chance = random.Random(3)
    ring, all_tokens, rows = TokenRing(), np.empty((0, 0), np.int32), 2
    for _ in range(600):
        rows += chance.random() < 0.02
        steps = chance.randint(1, 32)
        drawn = np.random.default_rng(chance.randrange(10**9)).integers(0, 10**6, (rows, steps))
        drawn = drawn.astype(np.int32)
        before = np.zeros((rows, all_tokens.shape[1]), np.int32)
        before[: len(all_tokens)] = all_tokens
        all_tokens = np.concatenate([before, drawn], axis=1)
        ring.append(drawn.tobytes(), steps)
        assert ring.steps == all_tokens.shape[1]
        row = chance.randrange(rows)
        since = ring.steps - chance.randint(0, min(RING_STEPS, steps))
        assert ring.read(row, since) == all_tokens[row, since:].tobytes()
        long = max(0, ring.steps - RING_STEPS)
        assert ring.read(0, long) == all_tokens[0, long:].tobytes()
    assert ring.steps > 4 * RING_STEPS
    with pytest.raises(AssertionError, match="written over"):
        ring.read(0, ring.steps - RING_STEPS - 1)
