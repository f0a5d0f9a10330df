"""target_logprobs against the log-softmax in float64, and its edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops.logprobs import reference
from engine.protocol.logprobs import words_of_report
from tests.ops.helpers import DEVICES, same_bits

pytestmark = pytest.mark.parametrize("device", DEVICES)


def reported(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the targets, and whether these are the most likely tokens."""
    reports = ops.read_reports(ops.target_logprobs(logits, targets))
    return reports.chosen, reports.is_greedy


def case(rows: int, vocab: int, scale: float, device: str) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which every other one is the most likely token."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::2] = logits.max(-1).indices[::2]
    return logits.to(device), targets.to(device)


@pytest.mark.parametrize("vocab", [1, 2, 17, 66, 1001, 32_000, 262_144])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_values(device: str, vocab: int, scale: float) -> None:
    logits, targets = case(9, vocab, scale, device)
    logprobs, is_greedy = reported(logits, targets)
    wanted, wanted_greedy, _, _ = reference(logits, targets)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-6, atol=2e-6)
    assert torch.equal(is_greedy, wanted_greedy) and is_greedy[::2].all()


def test_torchs_values_to_rounding(device: str) -> None:
    logits, targets = case(50, 5000, 5.0, device)
    logprobs, _ = reported(logits, targets)
    wanted = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    # torch subtracts numbers of up to 32 in fp32, whose last place is 1.9e-6, two times.
    torch.testing.assert_close(logprobs, wanted, rtol=5e-7, atol=4e-6)


def test_of_equal_logits_the_lowest_id_is_greedy(device: str) -> None:
    logits = torch.zeros(6, 300, device=device)
    logits[:, [7, 130, 131, 299]] = 4.0
    logits[5, 7] = -0.0
    targets = torch.tensor([7, 130, 131, 299, 0, 130], device=device)
    logprobs, is_greedy = reported(logits, targets)
    assert is_greedy.tolist() == [True, False, False, False, False, True]
    assert logprobs[0] == logprobs[1] == logprobs[2] == logprobs[3]
    zeros = torch.zeros(2, 9, device=device)
    zeros[:, 0] = -0.0  # equal to the others
    _, is_greedy = reported(zeros, torch.tensor([0, 1], device=device))
    assert is_greedy.tolist() == [True, False]


def test_impossible_tokens(device: str) -> None:
    """-infinity is a logit like others: before a possible one, after it, and as the target."""
    logits = torch.full((3, 2000), -math.inf, device=device)
    logits[:, 1234] = 3.0
    targets = torch.tensor([1234, 0, 1999], device=device)
    logprobs, is_greedy = reported(logits, targets)
    assert logprobs.tolist() == [0.0, -math.inf, -math.inf]
    assert is_greedy.tolist() == [True, False, False]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 5, 1999])
def test_logits_that_are_not_finite_give_nan(device: str, bad: float, at: int) -> None:
    logits, _ = case(3, 2000, 1.0, device)
    logits[1, at] = bad
    logits[2] = -math.inf
    targets = torch.full((3,), 5, device=device)
    logprobs, is_greedy = reported(logits, targets)
    assert logprobs.isnan().tolist() == [False, True, True]
    assert is_greedy.tolist()[1:] == [False, False]


def test_a_row_does_not_depend_on_the_batch(device: str) -> None:
    logits, targets = case(70, 4001, 2.0, device)
    together, _ = reported(logits, targets)
    alone = [reported(logits[i : i + 1], targets[i : i + 1])[0] for i in range(70)]
    same_bits(together, torch.cat(alone))


def test_no_rows(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    logprobs, is_greedy = reported(torch.empty(0, 66, device=device), none)
    assert logprobs.shape == is_greedy.shape == (0,)
    assert (logprobs.dtype, is_greedy.dtype) == (torch.float32, torch.bool)


@pytest.mark.gpu
def test_targets_out_of_range_on_cuda(device: str) -> None:
    if device == "cpu":
        pytest.skip("the CPU refuses them")
    logits, _ = case(3, 100, 1.0, device)
    targets = torch.tensor([-1, 5, 100], device=device)
    logprobs, is_greedy = reported(logits, targets)
    assert logprobs.isnan().tolist() == [True, False, True]
    assert is_greedy.tolist()[::2] == [False, False]


# Best tokens.

TOPS = [1, 2, 5, 20]


def with_ties(rows: int, vocab: int, device: str) -> Tensor:
    """Half of the rows have few different values."""
    logits, _ = case(rows, vocab, 2.0, device)
    logits[::2] = logits[::2].round()
    return logits


@pytest.mark.parametrize("vocab", [1, 2, 20, 66, 1023, 5001, 32_000, 262_144])
@pytest.mark.parametrize("top", TOPS)
def test_the_best_come_in_order_of_equal_ones_the_lowest_id_first(
    device: str, vocab: int, top: int
) -> None:
    top = min(top, vocab)
    logits, targets = with_ties(6, vocab, device), case(6, vocab, 1.0, device)[1]
    reports = ops.target_logprobs(logits, targets, top)
    assert (reports.shape, reports.dtype) == ((6, words_of_report(top)), torch.int32)
    got, wanted = ops.read_reports(reports), reference(logits, targets, top)
    assert torch.equal(got.top_ids, wanted.top_ids)
    torch.testing.assert_close(got.top_logprobs.double(), wanted.top_logprobs, rtol=1e-6, atol=2e-6)
    alone = ops.target_logprobs(logits, targets)
    same_bits(reports[:, :2].contiguous(), alone)


def unlucky(vocab: int) -> Tensor:
    """Many of the best are where one thread of a GPU looks: tokens 0 to 3 of every 128."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    at = torch.arange(vocab) % 128 < 4
    return torch.where(at, 100 + logits, logits)


def test_rows_whose_best_are_badly_spread(device: str) -> None:
    """One thread's, all equal, rising, falling, and hardly any possible ones."""
    vocab = 100_000
    few = torch.full((vocab,), -math.inf)
    few[[5, 77_777, 99_999]] = torch.tensor([1.0, 2.0, 1.0])
    rising = torch.arange(vocab).float()
    rows = [unlucky(vocab), torch.zeros(vocab), rising, -rising, few]
    logits = torch.stack(rows).to(device)
    targets = torch.zeros(len(rows), dtype=torch.int64, device=device)
    got = ops.read_reports(ops.target_logprobs(logits, targets, 20))
    wanted = reference(logits, targets, 20)
    assert torch.equal(got.top_ids, wanted.top_ids)
    torch.testing.assert_close(got.top_logprobs.double(), wanted.top_logprobs, rtol=1e-6, atol=2e-6)


def test_zeros_of_both_signs_are_equal(device: str) -> None:
    logits = torch.full((1, 300), -1.0, device=device)
    logits[0, [10, 20, 290]] = torch.tensor([-0.0, 0.0, -0.0], device=device)
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    got = ops.read_reports(ops.target_logprobs(logits, targets, 4))
    assert got.top_ids.tolist() == [[10, 20, 290, 0]]
    first, second, third, fourth = got.top_logprobs[0].tolist()
    assert first == second == third > fourth


def test_best_tokens_of_logits_that_are_not_finite(device: str) -> None:
    logits, targets = case(4, 2000, 1.0, device)
    logits[1, 7], logits[2, 7], logits[3] = math.nan, math.inf, -math.inf
    got = ops.read_reports(ops.target_logprobs(logits, targets, 5))
    assert got.top_logprobs.isnan().all(-1).tolist() == [False, True, True, True]
    assert not got.top_logprobs[0].isnan().any()
