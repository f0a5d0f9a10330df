"""The mathematics of sampling against plain float64 references written out token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from engine import distribution
from tests.logits import column, logits_with_ties, order

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("vocab", [1, 2, 66, 257, 3000])
@pytest.mark.parametrize("width", [1, 5, 10_000])
def test_ranking_is_by_logit_then_by_lowest_id(device: str, vocab: int, width: int) -> None:
    logits = logits_with_ties(7, vocab, device)
    values, ids = distribution.ranked(logits, width)
    for row, row_values, row_ids in zip(
        logits.tolist(), values.tolist(), ids.tolist(), strict=True
    ):
        assert row_ids == order(row)[:width]
        assert row_values == [row[id] for id in row_ids]


def test_ranking_knows_signs_zeros_and_infinities(device: str) -> None:
    row = [-0.0, 0.0, -1e-40, 1e-40, -math.inf, 3.4e38, -3.4e38, 1.0, -1.0]
    _, ids = distribution.ranked(torch.tensor([row], device=device), len(row))
    assert ids.tolist() == [[5, 7, 3, 0, 1, 2, 8, 6, 4]]


def test_greedy_takes_the_lowest_of_equal_ids(device: str) -> None:
    logits = logits_with_ties(50, 300, device)
    best, ids = distribution.greedy(logits)
    assert ids.tolist() == [order(row)[0] for row in logits.tolist()]
    assert best.tolist() == [max(row) for row in logits.tolist()]


def test_penalties_are_as_their_sources_define_them(device: str) -> None:
    logits = logits_with_ties(4, 9, device)
    in_prompt = torch.zeros(4, 9, dtype=torch.bool, device=device)
    in_prompt[:, [0, 3]] = True
    counts = torch.zeros(4, 9, dtype=torch.int32, device=device)
    counts[:, 3], counts[:, 4], counts[:, 5] = 2, 1, 3
    repetition, presence, frequency = [1.0, 1.5, 0.5, 2.0], [0.0, 0.7, -0.3, 0.0], [0.1, 0, 0.4, 2]
    out = distribution.penalise(
        logits,
        in_prompt,
        counts,
        *(column(values, device) for values in (repetition, presence, frequency)),
    )
    expected = []
    for row, penalty, once, each in zip(
        logits.tolist(), repetition, presence, frequency, strict=True
    ):
        new = list(row)
        for id in (0, 3, 4, 5):
            new[id] = new[id] / penalty if new[id] > 0 else new[id] * penalty
        for id, count in ((3, 2), (4, 1), (5, 3)):
            new[id] -= once + each * count
        expected.append(new)
    torch.testing.assert_close(out.cpu(), torch.tensor(expected))


def test_bias_adds_to_the_named_tokens_only(device: str) -> None:
    logits = torch.zeros(2, 4, device=device)
    index = torch.tensor([[0, 0, 1], [1, 3, 0]], device=device)
    values = torch.tensor([2.0, -math.inf, 0.5], device=device)
    out = distribution.add_bias(logits, index[0], index[1], values)
    assert out.tolist() == [[0, 2, 0, -math.inf], [0.5, 0, 0, 0]]


def test_log_probabilities_are_the_log_softmax(device: str) -> None:
    logits = logits_with_ties(30, 257, device)
    tokens = torch.arange(30, device=device) * 8
    tokens[0] = distribution.greedy(logits)[1][0]
    out = distribution.token_logprobs(logits, tokens, top=5)
    reference = logits.double().cpu().log_softmax(-1)
    best = [order(row)[:5] for row in logits.tolist()]
    assert out.top_ids.tolist() == best
    torch.testing.assert_close(
        out.top_logprobs.cpu().double(), reference.gather(-1, torch.tensor(best)), atol=1e-5, rtol=0
    )
    chosen = reference.gather(-1, tokens.cpu().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out.chosen.cpu().double(), chosen, atol=1e-5, rtol=0)
    is_greedy = [ids[0] == token for ids, token in zip(best, tokens.tolist(), strict=True)]
    assert out.is_greedy.tolist() == is_greedy and is_greedy[0] and not all(is_greedy)


def test_no_best_are_listed_unless_asked_for(device: str) -> None:
    out = distribution.token_logprobs(
        logits_with_ties(3, 9, device), torch.zeros(3, dtype=torch.int64, device=device), 0
    )
    assert out.top_ids.shape == out.top_logprobs.shape == (3, 0)
