"""The mathematics of sampling against plain float64 references written out token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine import distribution

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def logits_with_ties(rows: int, vocab: int, device: str) -> Tensor:
    """Rounded to halves, so that every row holds many equal logits."""
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator) * 6).round().div(2).to(device)


def column(values: list[float], device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)


def octaves(logits: Tensor) -> Tensor:
    """At temperature 1."""
    ones = torch.ones(len(logits), 1, device=logits.device)
    return distribution.octaves(logits, logits.amax(dim=-1), ones)


def order(row: list[float]) -> list[int]:
    """Ids, best first, equal ones by lowest id."""
    return sorted(range(len(row)), key=lambda id: (-row[id], id))


def kept_ids(logits: Tensor) -> list[set[int]]:
    return [{id for id, value in enumerate(row) if value > -math.inf} for row in logits.tolist()]


def probabilities(row: list[float]) -> list[float]:
    best = max(row)
    weights = [math.exp(value - best) for value in row]
    return [weight / sum(weights) for weight in weights]


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


@pytest.mark.parametrize("vocab", [1, 2, 66, 1500])
def test_top_k_keeps_exactly_the_k_best(device: str, vocab: int) -> None:
    logits = logits_with_ties(6, vocab, device)
    top_k = [1, 2, 3, vocab, 5, 40]
    given = octaves(logits)
    out = distribution.keep_top(
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
    out = distribution.keep_top(
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
    out = distribution.octaves(logits, logits.amax(dim=-1), column(temperatures, device))
    for row, temperature in zip(out.tolist(), temperatures, strict=True):
        expected = [0.0, -3.5, 0.0, -math.inf, -1.0]
        assert row == pytest.approx([x / temperature / math.log(2) for x in expected], rel=2e-7)


def test_min_p_is_relative_to_the_best(device: str) -> None:
    min_p = [0.0, 0.01, 0.2, 0.5, 1.0]
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(len(min_p), 80, generator=generator) * 2).to(device)
    out = distribution.keep_min_p(octaves(logits), column(min_p, device))
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
    numbers = distribution.uniform(distribution.stream_ids(seeds, choices), positions)
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
        numbers = distribution.uniform(distribution.stream_ids(seeds, choices), positions).cpu()
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
    assert distribution.draw(given.expand(len(edges), -1), numbers).tolist() == list(edges.values())


def test_the_impossible_is_never_drawn(device: str) -> None:
    """Not at the ends of the uniform numbers' range either."""
    given = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]], device=device)
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64, device=device)
    assert distribution.draw(given.expand(2, -1), numbers).tolist() == [1, 3]


def test_draws_follow_the_distribution(device: str) -> None:
    """Chi-square of 50,000 draws; the bound is the 99.9 % point of 19 degrees of freedom."""
    n, vocab = 50_000, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    counter = torch.arange(n, device=device)
    streams = distribution.stream_ids(torch.full_like(counter, 11), torch.zeros_like(counter))
    numbers = distribution.uniform(streams, counter)
    ids = distribution.draw(octaves(logits.to(device).unsqueeze(0)).expand(n, -1), numbers)
    counts = torch.bincount(ids.cpu(), minlength=vocab).double()
    expected = torch.tensor(probabilities(logits.tolist()), dtype=torch.float64) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 43.8


def test_a_row_is_drawn_alike_alone_and_among_others(device: str) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(64, 5000, generator=generator) * 3).to(device)
    streams = distribution.stream_ids(*torch.arange(128, device=device).view(2, 64))
    numbers = distribution.uniform(streams, torch.arange(64, device=device))

    def whole(rows: slice) -> Tensor:
        count = len(range(64)[rows])
        kept = distribution.keep_top(
            octaves(logits[rows]),
            column([900] * count, device, torch.int64),
            column([0.97] * count, device, torch.float64),
            900,
        )
        return distribution.draw(kept, numbers[rows])

    together = whole(slice(0, 64))
    assert len(set(together.tolist())) > 30
    assert torch.equal(together, torch.cat([whole(slice(row, row + 1)) for row in range(64)]))


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
