"""Reports: what is packed comes out as it was."""

from __future__ import annotations

import random

import pytest
import torch

from engine import ops
from engine.protocol.logprobs import MOST_TOP, PackedLogprobs, TokenLogprobs, words_of_report
from tests.reports import in_float32, packed


def random_tokens(count: int, top: int) -> list[TokenLogprobs]:
    chance = random.Random(count * 100 + top)
    return [
        TokenLogprobs(
            in_float32(-chance.random() * 30),
            [chance.randrange(2**24) for _ in range(top)],
            [in_float32(-chance.random()) for _ in range(top)],
            chance.random() < 0.5,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("top", [0, 1, 5, 20, 100])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_tokens_come_out_as_they_were_packed(count: int, top: int) -> None:
    tokens = random_tokens(count, top)
    assert packed(tokens, top).unpack() == tokens


@pytest.mark.parametrize("top", [0, 3])
def test_a_part(top: int) -> None:
    tokens = random_tokens(7, top)
    assert packed(tokens, top).part(2, 5).unpack() == tokens[2:5]
    assert packed(tokens, top).part(3, 3).unpack() == []


def test_the_operators_words() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    targets = logits.argmax(-1)
    targets[1] = 3
    words = ops.target_logprobs(logits, targets, 2)
    told, found = PackedLogprobs(2, words.numpy().tobytes()).unpack(), ops.read_reports(words)
    assert [one.logprob for one in told] == found.chosen.tolist()
    assert [one.is_greedy for one in told] == found.is_greedy.tolist() == [True, False, True, True]
    assert [one.top_ids for one in told] == found.top_ids.tolist()
    assert [one.top_logprobs for one in told] == found.top_logprobs.tolist()


def test_the_device_reports_as_many_best_as_sequences_count_on() -> None:
    logits, targets = torch.zeros(1, 50), torch.zeros(1, dtype=torch.int64)
    assert ops.target_logprobs(logits, targets, MOST_TOP).shape == (1, words_of_report(MOST_TOP))
    with pytest.raises(RuntimeError, match=f"top must be 0 to {MOST_TOP}"):
        ops.target_logprobs(logits, targets, MOST_TOP + 1)
