"""What may not change one bit of a sequence's result: splits, neighbours, order, threads, NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from engine import ops
from engine.config import SCAN_CHUNK
from engine.ops import linear_scan
from tests.ops.helpers import CELLS, DEVICES, SERVING_DTYPES, close, exact, int32, same_bits

CELL_NAMES = list(CELLS)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _alone(cell: str, pre: Tensor, start: Tensor, *, aligned: bool = True) -> tuple[Tensor, Tensor]:
    """(h, last state) of one sequence by itself. On a GPU one whose state is not aligned is scanned
    by tiles, however short it is."""
    state = start.clone()[None]
    if not aligned:
        state = torch.cat([start[:1], start])[None, 1:]
    edges, slot = (int32(*v, device=str(pre.device)) for v in ((0, pre.shape[0]), (0,)))
    return getattr(ops, f"{cell}_scan")(pre, edges, state, slot), state[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("channels", [5, 37, 300])
def test_split_at_chunk_multiples(
    device: str, dtype: torch.dtype, cell: str, channels: int
) -> None:
    length = 9 * SCAN_CHUNK + 17
    pre = exact(length, CELLS[cell] * channels, seed=1, scale=2.0).to(device, dtype)
    start = exact(channels, seed=2).float().to(device)
    h, last = _alone(cell, pre, start)
    for cuts in ([1], [4, 5], [8], [2, 4, 9]):
        edges = [0, *(SCAN_CHUNK * c for c in cuts), length]
        state, pieces = start, []
        for begin, end in itertools.pairwise(edges):
            piece, state = _alone(cell, pre[begin:end], state)
            pieces.append(piece)
        same_bits(torch.cat(pieces), h)
        same_bits(state, last)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELL_NAMES)
@settings(max_examples=15, deadline=None)
@examples(cuts=st.lists(st.integers(0, 400), max_size=5))
def test_split_anywhere(device: str, cell: str, cuts: list[int]) -> None:
    """To rounding, wherever the cut; zero-length pieces included."""
    length, channels = 400, 19
    pre = exact(length, CELLS[cell] * channels, seed=3, scale=2.0).float().to(device)
    start = exact(channels, seed=4).float().to(device)
    h, last = _alone(cell, pre, start)
    edges = [0, *sorted(cuts), length]
    state, pieces = start, []
    for begin, end in itertools.pairwise(edges):
        piece, state = _alone(cell, pre[begin:end], state)
        pieces.append(piece)
    close(torch.cat(pieces), h.cpu().double(), torch.float32)
    close(state, last.cpu().double(), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize(
    ("channels", "copies"),
    [(5, 1), (37, 1), (37, 40), pytest.param(1024, 17, marks=pytest.mark.slow)],
)
def test_neighbours_order_and_nan_in_free_slots(
    device: str, dtype: torch.dtype, cell: str, channels: int, copies: int
) -> None:
    """A sequence in a batch of 6 to 240 has the bits it has alone, in any order, with NaN around.

    Alone and in a batch the tiles of a sequence come in another order and beside other tiles, and
    on the CPU threads share the work out in other ways.
    """
    lengths = [700, 1, 64, 0, 129, 65] * copies
    padding = {len(lengths) - 2}
    pre = exact(sum(lengths) + 3, CELLS[cell] * channels, seed=5, scale=2.0).to(device, dtype)
    start = exact(len(lengths), channels, seed=6).float().to(device)
    spans, begin = [], 0
    for length in lengths:
        spans.append((begin, begin + length))
        begin += length
    for s in padding:
        pre[slice(*spans[s])] = float("nan")
    pre[begin:] = float("nan")
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(7)).tolist()
    for sequence_order in (range(len(lengths)), order):
        state = torch.full((len(lengths) + 2, channels), float("nan"), device=device)
        edges, slots, rows = [0], [], []
        for s in sequence_order:
            rows.append(pre[slice(*spans[s])])
            edges.append(edges[-1] + lengths[s])
            slots.append(-1 if s in padding else s + 1)
            state[s + 1] = float("nan") if s in padding else start[s]
        packed = torch.cat([*rows, pre[begin:]])
        h = getattr(ops, f"{cell}_scan")(
            packed, int32(*edges, device=device), state, int32(*slots, device=device)
        )
        assert state[0].isnan().all() and state[-1].isnan().all(), "free slots are not touched"
        for at, s in enumerate(list(sequence_order)[:12]):
            found = h[edges[at] : edges[at + 1]]
            if s in padding:
                assert not found.any() and state[s + 1].isnan().all()
                continue
            wanted, last = _alone(cell, pre[slice(*spans[s])], start[s])
            same_bits(found, wanted)
            same_bits(state[s + 1], last)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("channels", [8, 37, 328, 1152])
@pytest.mark.parametrize(
    "lengths",
    [
        [(7 * s) % 23 for s in range(46)],
        [*((7 * s) % 23 for s in range(40)), 127, 16, 128, 16, 129, 33, 64, 200, 0, 100],
        [1, 31, 32, 0, 33, 5, 20, 64, 300],
        [17, 2],
    ],
    ids=["many short", "many", "few", "two short"],
)
def test_short_sequences(
    device: str, dtype: torch.dtype, cell: str, channels: int, lengths: list[int]
) -> None:
    """Which a GPU scans without tiles, but for those that are long, have the bits that each has
    alone and by tiles, whether or not some are long. Rows of no sequence follow."""
    padding = {1, max(len(lengths) - 3, 1)}
    edges = [0, *itertools.accumulate(lengths)]
    pre = exact(edges[-1] + 300, CELLS[cell] * channels, seed=12, scale=2.0).to(device, dtype)
    pre[edges[-1] :] = float("nan")
    start = exact(len(lengths), channels, seed=13).float().to(device)
    start[0] = -0.0
    state = start.clone()
    slots = [-1 if s in padding else s for s in range(len(lengths))]
    h = getattr(ops, f"{cell}_scan")(
        pre, int32(*edges, device=device), state, int32(*slots, device=device)
    )
    assert not h[edges[-1] :].any()
    for s, (begin, end) in enumerate(itertools.pairwise(edges)):
        if s in padding:
            assert not h[begin:end].any()
            same_bits(state[s], start[s])
            continue
        for aligned in (True, False):
            wanted, last = _alone(cell, pre[begin:end], start[s], aligned=aligned)
            same_bits(h[begin:end], wanted)
            same_bits(state[s], last)


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("channels", [1, 16, 37, 300])
def test_thread_count(threads: Callable[[int], None], cell: str, channels: int) -> None:
    """Few channels make the CPU cut time between threads, many make it cut channels."""
    length = 40 * SCAN_CHUNK + 5
    pre = exact(length, CELLS[cell] * channels, seed=8, scale=2.0).float()
    start = exact(channels, seed=9).float()
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(_alone(cell, pre, start))
    for h, last in results[1:]:
        same_bits(h, results[0][0])
        same_bits(last, results[0][1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("channels", [3, 50])
def test_thread_count_of_linear_scan_and_its_backward(
    threads: Callable[[int], None], reverse: bool, channels: int
) -> None:
    length = 40 * SCAN_CHUNK + 5
    a = exact(1, length, channels, seed=10).sigmoid().float()
    b, seen = (
        exact(1, length, channels, seed=11).float(),
        exact(1, length, channels, seed=12).float(),
    )
    results = []
    for count in (1, 2, 8):
        threads(count)
        h = linear_scan(a, b, None, reverse)
        grads = torch.ops.minserve.linear_scan_backward(seen, a, h, None, reverse)
        results.append((h, *grads))
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=True):
            same_bits(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("channels", [5, 1024])
def test_batch_size_of_linear_scan(device: str, reverse: bool, channels: int) -> None:
    batch, length = 70, 300
    a = exact(batch, length, channels, seed=13).sigmoid().float().to(device)
    b = exact(batch, length, channels, seed=14).float().to(device)
    h0 = exact(batch, channels, seed=15).float().to(device)
    together = linear_scan(a, b, h0, reverse)
    for row in (0, 33, 69):
        alone = linear_scan(a[row : row + 1], b[row : row + 1], h0[row : row + 1], reverse)
        same_bits(together[row : row + 1], alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_channel_position(device: str, dtype: torch.dtype, cell: str) -> None:
    """A channel in a vector's body and in its tail gives the same bits."""
    gates, length = CELLS[cell], 150
    pre = exact(length, gates, 37, seed=16, scale=2.0).to(device, dtype)
    start = exact(37, seed=17).float().to(device)
    h, last = _alone(cell, pre.reshape(length, -1), start)
    for first, width in ((0, 1), (3, 20), (36, 1), (5, 32)):
        part = slice(first, first + width)
        found, state = _alone(cell, pre[:, :, part].reshape(length, -1), start[part])
        same_bits(found, h[:, part])
        same_bits(state, last[part])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_step_neighbours_and_padding(device: str, cell: str) -> None:
    channels = 37
    pre = exact(50, CELLS[cell] * channels, seed=18, scale=2.0).float().to(device)
    state = exact(60, channels, seed=19).float().to(device)
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:50].int().to(device)
    slots[[3, 20]] = -1
    pre[[3, 20]] = float("nan")
    together, step = state.clone(), getattr(ops, f"{cell}_step")
    h = step(pre, together, slots)
    for row in (0, 3, 19, 49):
        alone = state.clone()
        same_bits(step(pre[row : row + 1], alone, slots[row : row + 1]), h[row : row + 1])
        if row != 3:
            same_bits(alone[slots[row]], together[slots[row]])
    free = sorted(set(range(60)) - set(slots.tolist()))
    same_bits(together[free], state[free])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [2, 4])
@settings(max_examples=15, deadline=None)
@examples(cuts=st.lists(st.integers(0, 60), max_size=6))
def test_convolution_split_anywhere(device: str, taps: int, cuts: list[int]) -> None:
    """The convolution has no order of sums to disturb: any split keeps every bit."""
    x = exact(60, 19, seed=20).float().to(device)
    weight, bias = exact(19, taps, seed=21).float().to(device), None
    whole = exact(1, taps - 1, 19, seed=22).float().to(device)
    cut, slot = whole.clone(), int32(0, device=device)
    y = ops.conv_scan(x, weight, bias, int32(0, 60, device=device), whole, slot)
    pieces, edges = [], [0, *sorted(cuts), 60]
    for begin, end in itertools.pairwise(edges):
        local = int32(0, end - begin, device=device)
        pieces.append(ops.conv_scan(x[begin:end], weight, bias, local, cut, slot))
    same_bits(torch.cat(pieces), y)
    same_bits(cut, whole)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_a_sequence_stays_there(device: str) -> None:
    pre = exact(30, 2 * 5, seed=23).float().to(device)
    pre[4, 2] = float("nan")  # sequence 0, channel 2
    state = torch.zeros(2, 5, device=device)
    edges, slots = int32(0, 10, 30, device=device), int32(0, 1, device=device)
    h = ops.mingru_scan(pre, edges, state, slots)
    assert h[:4].isfinite().all() and h[10:].isfinite().all()
    assert h[4:10, 2].isnan().all() and h[4:10, [0, 1, 3, 4]].isfinite().all()
