"""The mathematics of sampling against plain float64 references written out token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from engine.ops import read_reports
from engine.protocol.logprobs import MOST_TOP
from engine.runner.sampling import random_streams as distribution
from tests.logits import logits_with_ties, order

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


@pytest.mark.parametrize("top", [0, 1, 5, 20, 21, 60, 257])
def test_log_probabilities_are_the_log_softmax(device: str, top: int) -> None:
    """However many of the best are wanted."""
    logits = logits_with_ties(30, 257, device)
    tokens = torch.arange(30, device=device) * 8
    tokens[0] = logits[0].argmax()
    out = read_reports(distribution.token_reports(logits, tokens, top))
    reference = logits.double().cpu().log_softmax(-1)
    best = [order(row)[:top] for row in logits.tolist()]
    assert out.top_ids.tolist() == best
    chosen = reference.gather(-1, tokens.cpu().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out.chosen.cpu().double(), chosen, atol=1e-5, rtol=0)
    if top:
        expected = reference.gather(-1, torch.tensor(best))
        got = out.top_logprobs.cpu().double()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    first = [order(row)[0] for row in logits.tolist()]
    is_greedy = [one == token for one, token in zip(first, tokens.tolist(), strict=True)]
    assert out.is_greedy.tolist() == is_greedy and is_greedy[0] and not all(is_greedy)


def test_many_best_begin_with_the_bits_of_a_few(device: str) -> None:
    logits = logits_with_ties(30, 257, device)
    tokens = torch.arange(30, device=device) * 8
    few = distribution.token_reports(logits, tokens, MOST_TOP)
    many = distribution.token_reports(logits, tokens, 100)
    assert torch.equal(many[:, : few.shape[1]], few)
