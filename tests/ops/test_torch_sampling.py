"""What draws are compared with, against plain float64 references written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.runner.sampling.random_streams import stream_ids
from tests.logits import column, logits_with_ties, order, probabilities
from tests.ops import torch_sampling

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def octaves(logits: Tensor) -> Tensor:
    """At temperature 1."""
    ones = torch.ones(len(logits), 1, device=logits.device)
    return torch_sampling.octaves(logits, logits.amax(dim=-1), ones)


def kept_ids(logits: Tensor) -> list[set[int]]:
    return [{id for id, value in enumerate(row) if value > -math.inf} for row in logits.tolist()]


@pytest.mark.parametrize("vocab", [1, 2, 66, 1500])
def test_top_k_keeps_exactly_the_k_best(device: str, vocab: int) -> None:
    logits = logits_with_ties(6, vocab, device)
    top_k = [1, 2, 3, vocab, 5, 40]
    given = octaves(logits)
    out = torch_sampling.keep_top(
        given,
        column(top_k, device, torch.int64),
        column([1.0] * 6, device, torch.float64),
        max(top_k),
    )
    expected = [set(order(row)[:k]) for row, k in zip(logits.tolist(), top_k, strict=True)]
    assert kept_ids(out) == expected
    assert torch.equal(out[out > -math.inf], given[out > -math.inf])


def test_top_p_keeps_the_smallest_nucleus_of_what_top_k_left(device: str) -> None:
    """Every pair of the two, in one batch: rows with a small top_k stand beside wide ones."""
    cases = [
        (top_k, top_p)
        for top_k in (1, 4, 30, 100)
        for top_p in (0.0, 1e-9, 0.1, 0.35, 0.5, 0.9, 0.99, 0.999999)
    ]
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(len(cases), 100, generator=generator) * 2).to(device)
    out = torch_sampling.keep_top(
        octaves(logits),
        column([top_k for top_k, _ in cases], device, torch.int64),
        column([top_p for _, top_p in cases], device, torch.float64),
        width=100,
    )
    expected = []
    for row, (top_k, p) in zip(logits.tolist(), cases, strict=True):
        best = order(row)[:top_k]
        shares = probabilities([row[id] for id in best])
        size = next(n for n in range(1, top_k + 1) if sum(shares[:n]) >= p or n == top_k)
        expected.append(set(best[:size]))
    assert kept_ids(out) == expected
    assert len({len(ids) for ids in expected}) > 8


def test_octaves_are_the_logarithm_of_how_likely_a_token_is(device: str) -> None:
    temperatures = [1e-30, 0.3, 1.0, 7.5, 1e35]
    logits = torch.tensor([[2.0, -1.5, 2.0, -math.inf, 1.0]] * 5, device=device)
    out = torch_sampling.octaves(logits, logits.amax(dim=-1), column(temperatures, device))
    for row, temperature in zip(out.tolist(), temperatures, strict=True):
        expected = [0.0, -3.5, 0.0, -math.inf, -1.0]
        assert row == pytest.approx([x / temperature / math.log(2) for x in expected], rel=2e-7)


def test_min_p_is_relative_to_the_best(device: str) -> None:
    min_p = [0.0, 0.01, 0.2, 0.5, 1.0]
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(len(min_p), 80, generator=generator) * 2).to(device)
    out = torch_sampling.keep_min_p(octaves(logits), column(min_p, device))
    expected = []
    for row, p in zip(logits.tolist(), min_p, strict=True):
        shares = probabilities(row)
        expected.append({id for id, share in enumerate(shares) if share >= p * max(shares)})
    assert kept_ids(out) == expected
    assert [len(ids) for ids in (expected[0], expected[-1])] == [80, 1]


def test_uniform_numbers_are_splitmix64(device: str) -> None:
    """Against the generator's published definition in unbounded integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    cases = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63 - 1, 7, 10**6), (12345, 127, 2**40)]
    expected = []
    for seed, choice, position in cases:
        stream = mix((mix(seed) + (choice + 1) * golden) % 2**64)
        expected.append((mix((stream + (position + 1) * golden) % 2**64) >> 11) / 2**53)
    seeds, choices, positions = torch.tensor(cases, device=device).T
    numbers = torch_sampling.uniform(stream_ids(seeds, choices), positions)
    assert numbers.tolist() == expected


def test_uniform_numbers_are_uniform_and_uncorrelated(device: str) -> None:
    """Kolmogorov-Smirnov along each of the three counters, and lag-1 correlation."""
    n = 20_000
    counter, zero = torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    for seeds, choices, positions in (
        (counter, zero, zero),
        (zero, counter, zero),
        (zero, zero, counter),
    ):
        numbers = torch_sampling.uniform(stream_ids(seeds, choices), positions).cpu()
        assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
        steps = torch.arange(1, n + 1) / n
        distance = float((numbers.sort().values - steps).abs().max())
        assert distance < 1.95 / math.sqrt(n)  # p = 0.001
        correlation = float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(n)


def test_draws_invert_the_cumulative_distribution(device: str) -> None:
    given = torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.4]], device=device).log2()
    edges = {
        0.0: 0,
        0.0999: 0,
        0.1001: 1,
        0.2999: 1,
        0.3001: 3,
        0.5999: 3,
        0.6001: 4,
        1 - 2**-53: 4,
    }
    numbers = torch.tensor(list(edges), dtype=torch.float64, device=device)
    assert torch_sampling.sample(given.expand(len(edges), -1), numbers).tolist() == list(
        edges.values()
    )


def test_the_impossible_is_never_drawn(device: str) -> None:
    """Not at the ends of the uniform numbers' range either."""
    given = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]], device=device)
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64, device=device)
    assert torch_sampling.sample(given.expand(2, -1), numbers).tolist() == [1, 3]


def test_draws_follow_the_distribution(device: str) -> None:
    """Chi-square of 50,000 draws; the bound is the 99.9 % point of 19 degrees of freedom."""
    n, vocab = 50_000, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    counter = torch.arange(n, device=device)
    streams = stream_ids(torch.full_like(counter, 11), torch.zeros_like(counter))
    numbers = torch_sampling.uniform(streams, counter)
    ids = torch_sampling.sample(octaves(logits.to(device).unsqueeze(0)).expand(n, -1), numbers)
    counts = torch.bincount(ids.cpu(), minlength=vocab).double()
    expected = torch.tensor(probabilities(logits.tolist()), dtype=torch.float64) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 43.8


def test_a_row_is_drawn_alike_alone_and_among_others(device: str) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(64, 5000, generator=generator) * 3).to(device)
    streams = stream_ids(*torch.arange(128, device=device).view(2, 64))
    numbers = torch_sampling.uniform(streams, torch.arange(64, device=device))

    def whole(rows: slice) -> Tensor:
        count = len(range(64)[rows])
        kept = torch_sampling.keep_top(
            octaves(logits[rows]),
            column([900] * count, device, torch.int64),
            column([0.97] * count, device, torch.float64),
            900,
        )
        return torch_sampling.sample(kept, numbers[rows])

    together = whole(slice(0, 64))
    assert len(set(together.tolist())) > 30
    assert torch.equal(together, torch.cat([whole(slice(row, row + 1)) for row in range(64)]))
