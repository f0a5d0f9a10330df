"""How the CPU deals a scan out to threads, and writes past the caches, changes no bit of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine import ops
from tests.ops.helpers import CELLS, SERVING_DTYPES, exact, int32, same_bits

# Traffic of a scan that does not stay in the caches of most machines; an eighth of it does.
PAST_CACHES = 96 * 2**20


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _scan(cell: str, pre: Tensor, start: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    state = start.clone()
    edges = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    slots = int32(*range(len(lengths)))
    return getattr(ops, f"{cell}_scan")(pre, edges, state, slots), state


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("channels", [5, 300])
@pytest.mark.parametrize(
    "lengths",
    [[400, 400, 400, 400], [1500, 3, 0, 90], [0, 0, 900], [1] * 700, [7] * 301, [200, 0] * 5],
)
def test_every_share_of_sequences_and_channels(
    threads: Callable[[int], None], cell: str, channels: int, lengths: list[int]
) -> None:
    """Even, uneven, empty and many sequences, with a padding tail: rows stay whole or are cut."""
    tokens = sum(lengths) + 40
    pre = exact(tokens, CELLS[cell] * channels, seed=30, scale=2.0).float()
    start = exact(len(lengths), channels, seed=31).float()
    threads(1)
    wanted, last = _scan(cell, pre, start, lengths)
    assert not wanted[-40:].any()
    for count in (2, 3, 4, 6, 16):
        threads(count)
        found, state = _scan(cell, pre, start, lengths)
        same_bits(found, wanted)
        same_bits(state, last)


@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("channels", [1024, 1000, 2080])
def test_outputs_past_the_caches(dtype: torch.dtype, cell: str, channels: int) -> None:
    """A scan too large for the caches gives the bits of its sequences one by one, which are not;
    whole lines and partial ones, channels in one run and in two."""
    gates = CELLS[cell]
    sequences = 8
    length = PAST_CACHES // (sequences * (gates + 1) * channels * dtype.itemsize)
    pre = torch.randn(sequences * length, gates * channels).mul_(2).to(dtype)
    start = exact(sequences, channels, seed=32).float()
    together, last = _scan(cell, pre, start, [length] * sequences)
    for s in (0, 3, 7):
        rows = slice(s * length, (s + 1) * length)
        alone, state = _scan(cell, pre[rows], start[s : s + 1], [length])
        same_bits(together[rows], alone)
        same_bits(last[s], state[0])


def _by_time(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 5000, 3), (2, 3001, 50), (7, 200, 33), (40, 10, 2)])
def test_every_share_of_rows_of_time(
    threads: Callable[[int], None], shape: tuple[int, int, int], reverse: bool
) -> None:
    """Time contiguous: rows dealt out, or cut into chunks where there are too few of them."""
    batch, _, channels = shape
    a, b = exact(*shape, seed=1).sigmoid().float(), exact(*shape, seed=2).float()
    h0 = exact(batch, channels, seed=3).float()
    threads(1)
    h = ops.linear_scan(a, b, h0, reverse)
    wanted = [h, *torch.ops.minserve.linear_scan_backward(b, a, h, h0, reverse)]
    a, b = _by_time(a), _by_time(b)
    for count in (1, 2, 3, 16):
        threads(count)
        h = ops.linear_scan(a, b, h0, reverse)
        found = [h, *torch.ops.minserve.linear_scan_backward(b, a, h, h0, reverse)]
        for x, y in zip(found, wanted, strict=True):
            same_bits(x, y)


@pytest.mark.parametrize("channels", [512, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "tail"),
    [
        pytest.param(dtype, tail, marks=[] if n == m else pytest.mark.slow)
        for n, dtype in enumerate(SERVING_DTYPES)
        for m, tail in enumerate((0, 64, 5))
    ],
)
def test_rows_of_time_past_the_caches(dtype: torch.dtype, channels: int, tail: int) -> None:
    """The bits of channels contiguous, where rows start on lines of the caches and where not."""
    length = PAST_CACHES // (3 * channels * dtype.itemsize) // 128 * 128 + tail
    a = torch.rand(1, length, channels).to(dtype)
    b = torch.randn(1, length, channels).to(dtype)
    h = ops.linear_scan(a, b)
    same_bits(ops.linear_scan(_by_time(a), _by_time(b)), h)
    same_bits(
        ops.linear_scan(_by_time(a), _by_time(b), None, True), ops.linear_scan(a, b, None, True)
    )
    wanted = torch.ops.minserve.linear_scan_backward(b, a, h, None, False)
    given = (_by_time(x) for x in (b, a, h))
    found = torch.ops.minserve.linear_scan_backward(*given, None, False)
    for x, y in zip(found, wanted, strict=True):
        same_bits(x, y)
