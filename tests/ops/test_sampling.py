"""sample_ gives the tokens of engine.runner.sampling.sampler, whatever logits and parameters, and
moves rows on."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch import Tensor

from engine.ops import sampling
from engine.protocol.sampling_params import SamplingParams
from tests.ops.helpers import DEVICES, int32, same_bits
from tests.ops.sampling_rows import PARAMETERS, STEPS, rows_of, sampled

pytestmark = pytest.mark.parametrize("device", DEVICES)
SAMPLED = SamplingParams(temperature=1.0, seed=5)
VOCABULARIES = [1, 2, 5, 66, 200, 257, 288, 289, 512, 1000, 1024, 1025, 3000, 32_000]
KINDS = ["normal", "ties", "narrow", "peaky", "equal", "geometric", "few", "holes", "outlier"]


def logits_of(kind: str, rows: int, vocab: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        x = (x * 6).round() / 2
    elif kind == "narrow":
        x = x * 1e-3 + 5
    elif kind == "peaky":
        x = x * 8
    elif kind == "equal":
        x = torch.zeros(rows, vocab)
        x[:, ::2] = -0.0
    elif kind == "geometric":  # distances over all magnitudes, down to subnormal ones
        x = -torch.exp2(-149 * torch.rand(rows, vocab, generator=generator) + 3)
    elif kind == "few":  # most tokens impossible
        x[torch.rand(rows, vocab, generator=generator) < 0.9] = -math.inf
        x[:, vocab // 2] = 0.0
    elif kind == "holes":  # whole sections of tokens none of which is possible
        x[:, : vocab // 3] = x[:, vocab - vocab // 4 :] = -math.inf
    elif kind == "outlier":  # one good token, one bad one, and all others close together
        x = x * 1e-4
        x[:, vocab // 3], x[:, vocab - 1] = 6.0, -1e30
    return x.to(device)


def parameters() -> list[SamplingParams]:
    return [
        msgspec.structs.replace(one, seed=3 * i + 1, choice=i % 3)
        for i, one in enumerate(PARAMETERS)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_are_those_of_a_sort(device: str, vocab: int, kind: str) -> None:
    """Every set of parameters in one batch: a row is not touched by its neighbours' filters."""
    params = parameters()
    positions = [i % 11 for i in range(len(params))]
    logits = logits_of(kind, len(params), vocab, device)
    wanted, finite = sampled(params, positions, logits)
    assert finite.all()
    same_bits(rows_of(params, device, positions).sample(logits), wanted)


@pytest.mark.parametrize("vocab", [65_537, 200_000, 262_144, 262_145])
def test_large_vocabularies(device: str, vocab: int) -> None:
    """Weights that sum to more than 2**53, and rows that fit no cache."""
    params = [SAMPLED] + [
        msgspec.structs.replace(SAMPLED, top_k=k, top_p=p)
        for k, p in ((0, 0.9), (50_000, 1.0), (100, 0.7), (0, 0.999999))
    ]
    for kind in ("normal", "narrow", "equal"):
        logits = logits_of(kind, len(params), vocab, device)
        wanted, _ = sampled(params, [0] * len(params), logits)
        same_bits(rows_of(params, device).sample(logits), wanted)


@pytest.mark.parametrize("vocab", [66, 5003])
def test_many_rows(device: str, vocab: int) -> None:
    """More than a GPU has multiprocessors; with a small vocabulary several rows share a block."""
    params = (parameters() * 4)[:200]
    positions = list(range(200))
    logits = logits_of("normal", 200, vocab, device)
    wanted, _ = sampled(params, positions, logits)
    together = rows_of(params, device, positions).sample(logits)
    same_bits(together, wanted)
    for first in range(0, 200, 50):
        part = slice(first, first + 50)
        few = rows_of(params[part], device, positions[part]).sample(logits[part])
        same_bits(few, together[part])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(140, 5003), (140, 32_000), pytest.param(140, 100_001, marks=pytest.mark.slow)],
)
def test_more_rows_than_multiprocessors(device: str, rows: int, vocab: int, kind: str) -> None:
    """On a GPU one block has a row then, small or large; the tokens are the same."""
    params = parameters()
    rows = rows if device == "cuda" else len(params)
    params = (params * -(-rows // len(params)))[:rows]
    positions = [i % 17 for i in range(rows)]
    logits = logits_of(kind, rows, vocab, device)
    wanted, _ = sampled(params, positions, logits)
    same_bits(rows_of(params, device, positions).sample(logits), wanted)


@pytest.mark.parametrize(
    ("vocab", "kind"),
    [
        pytest.param(vocab, kind, marks=pytest.mark.slow if vocab > 5003 and n else [])
        for vocab in (1026, 5003, 32_000)
        for n, kind in enumerate(KINDS)
    ],
)
def test_few_rows_at_a_time(device: str, vocab: int, kind: str) -> None:
    """On a GPU the fewer the rows, the more blocks share one: the tokens are the same."""
    params = parameters()
    positions = list(range(len(params)))
    logits = logits_of(kind, len(params), vocab, device)
    wanted, _ = sampled(params, positions, logits)
    for rows in (8, 24, 36):  # of which a GPU with 132 multiprocessors has 8, 4 and 2 blocks a row
        for first in range(0, len(params), rows):
            part = slice(first, first + rows)
            drawn = rows_of(params[part], device, positions[part]).sample(logits[part])
            same_bits(drawn, wanted[part])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [97, 1025, 1600])
def test_reference_agrees(device: str, vocab: int, kind: str) -> None:
    params = parameters()
    logits = logits_of(kind, len(params), vocab, device)
    logits[4] = math.nan
    rows = rows_of(params, device)
    wanted = rows.copy()
    rows.sample(logits)
    sampling.reference(logits, *wanted.all())
    for given, expected in zip(rows.all(), wanted.all(), strict=True):
        same_bits(given, expected)


def test_a_nucleus_ends_where_it_reaches_its_share(device: str) -> None:
    """Of equal tokens the first half, and none of the others, however often one is tried."""
    rows, vocab = 3000, 1030
    params = [SamplingParams(temperature=1.0, top_p=0.5, seed=1)] * rows
    logits = torch.zeros(1, vocab, device=device).expand(rows, vocab)
    drawn = rows_of(params, device, range(rows)).sample(logits)
    assert int(drawn.max()) < vocab // 2
    assert len(drawn.unique()) > vocab // 3


def test_a_row_moves_on(device: str) -> None:
    logits = logits_of("normal", 3, 66, device)
    rows = rows_of([SAMPLED] * 3, device)
    drawn = []
    for step in range(STEPS):
        wanted, _ = sampled([SAMPLED] * 3, [step] * 3, logits)
        rows.sample(logits)
        same_bits(rows.tokens, wanted)
        drawn.append(wanted)
    same_bits(rows.out, torch.stack(drawn))
    assert len({tuple(row.tolist()) for row in drawn}) > 1  # the position matters
    assert rows.positions.tolist() == rows.cursor.tolist() == [STEPS] * 3
    assert rows.remaining.tolist() == [1000 - STEPS] * 3
    assert rows.slots.tolist() == [0, 1, 2]


def test_rows_end(device: str) -> None:
    """By the count, by either of two stop ids; others go on, ended ones stay as they are."""
    greedy = SamplingParams(temperature=0)
    logits = torch.zeros(5, 66, device=device)
    logits[range(5), [3, 4, 5, 6, 7]] = 1.0
    rows = rows_of([greedy] * 5, device)
    rows.remaining[:] = int32(1, 2, 9, 9, 9)
    rows.stop_ids[:] = int32(-1, -1, -1, -1, 5, -1, 1, 6, 8, 9).view(5, 2)
    rows.sample(logits)
    assert rows.out.tolist() == [[3, 4, 5, 6, 7], [-9] * 5, [-9] * 5]
    assert rows.slots.tolist() == [-1, 1, -1, -1, 4]
    assert rows.remaining.tolist() == [0, 1, 8, 8, 8]
    rows.sample(logits)
    assert rows.out.tolist() == [[3, 4, 5, 6, 7], [-9, 4, -9, -9, 7], [-9] * 5]
    assert rows.slots.tolist() == [-1, -1, -1, -1, 4]
    assert rows.cursor.tolist() == rows.positions.tolist() == [1, 2, 1, 1, 2]
    assert rows.tokens.tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize(
    ("vocab", "at"), [(300, 0), (300, 17), (300, 299), (1500, 0), (1500, 512), (1500, 1499)]
)
def test_logits_that_are_not_finite_end_the_row(
    device: str, bad: float | str, vocab: int, at: int
) -> None:
    params = [SAMPLED, SamplingParams(temperature=0), msgspec.structs.replace(SAMPLED, top_p=0.9)]
    logits = logits_of("normal", 6, vocab, device)
    wanted, _ = sampled(params * 2, [0] * 6, logits)
    if bad == "all -inf":
        logits[3:] = -math.inf
    else:
        logits[3:, at] = bad
    rows = rows_of(params * 2, device)
    rows.sample(logits)
    assert rows.out[0].tolist() == [*wanted[:3].tolist(), -1, -1, -1]
    assert rows.slots.tolist() == [0, 1, 2, -1, -1, -1]
    assert rows.cursor.tolist() == [1] * 6
    assert rows.positions.tolist() == [1, 1, 1, 0, 0, 0]
    assert rows.remaining.tolist() == [999] * 3 + [1000] * 3
    assert rows.tokens[3:].tolist() == [-7] * 3


def test_padding_is_left_as_it_is(device: str) -> None:
    logits = logits_of("normal", 4, 66, device)
    logits[[0, 2]] = math.nan
    rows = rows_of([SAMPLED] * 4, device)
    rows.slots[:] = int32(-1, 3, -5, 0)
    rows.cursor[0] = 1000  # not looked at
    before = rows.copy()
    wanted, _ = sampled([SAMPLED] * 4, [0] * 4, logits)
    rows.sample(logits)
    assert rows.out[0].tolist() == [-9, int(wanted[1]), -9, int(wanted[3])]
    for given, old in zip(rows.all(), before.all(), strict=True):
        if given is not rows.out:
            same_bits(given[[0, 2]], old[[0, 2]])


@pytest.mark.parametrize("kind", ["normal", "ties", "peaky"])
@pytest.mark.parametrize("vocab", [66, 5000])
def test_a_row_does_not_depend_on_the_batch(device: str, vocab: int, kind: str) -> None:
    params = parameters()
    logits = logits_of(kind, len(params), vocab, device)
    together = rows_of(params, device).sample(logits)
    alone = [rows_of([one], device).sample(logits[i : i + 1]) for i, one in enumerate(params)]
    same_bits(together, torch.cat(alone))
    flipped = rows_of(params[::-1], device).sample(logits.flip(0))
    same_bits(together, flipped.flip(0))


@pytest.mark.parametrize(
    ("vocab", "params"),
    [
        (vocab, msgspec.structs.replace(SAMPLED, **given))
        for vocab, those in (
            (12, [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.5, "top_k": 6}]),
            (1500, [{"top_p": 0.6}, {"temperature": 1.5, "top_k": 6}]),
            # Of these most rows have all of their tries refused.
            (
                1500,
                [{"top_p": 0.05}, {"min_p": 0.4}, {"top_p": 0.1, "min_p": 0.4, "temperature": 2.0}],
            ),
        )
        for given in ({}, {"min_p": 0.2}, *those)
    ],
)
def test_draws_follow_the_distribution(device: str, params: SamplingParams, vocab: int) -> None:
    """Chi-square of 20,000 draws against probabilities formed in float64, at one in 100,000; tokens
    that are rarely drawn count together."""
    rows = 20_000
    logits = logits_of("normal", 1, vocab, "cpu").double()[0]
    shares = (logits / params.temperature).softmax(0)
    order = shares.argsort(descending=True)
    kept = order[: params.top_k or vocab]
    sums = shares[kept].cumsum(0) - shares[kept]
    kept = kept[
        (sums < params.top_p * shares[kept].sum()) & (shares[kept] >= params.min_p * shares.max())
    ]
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[kept] = shares[kept] / shares[kept].sum() * rows
    many = rows_of([params] * rows, device, positions=range(rows))
    drawn = many.sample(logits.float().to(device).expand(rows, vocab))
    counts = torch.bincount(drawn.cpu(), minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 20)
    often = expected >= 20
    groups = torch.stack([counts, expected]).T
    groups = torch.cat([groups[often], groups[rare].sum(0, keepdim=True)])
    groups = groups[groups[:, 1] > 0]
    statistic = ((groups[:, 0] - groups[:, 1]) ** 2 / groups[:, 1]).sum()
    freedom = len(groups) - 1
    # Wilson and Hilferty's approximation of the quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom >= 3 and statistic < bound
