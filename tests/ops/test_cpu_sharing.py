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
