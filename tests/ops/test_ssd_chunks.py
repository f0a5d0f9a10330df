"""Mamba-2's scan of bfloat16 on a GPU, which reads 128 tokens at a time, and the step."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import ssd
from tests.ops.helpers import exact, int32, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd._IN_LIBRARY, reason="the library lacks the operators"),
]

HEADS, WIDTH = 6, 64
NO_LIMIT = (0.0, float("inf"))
LENGTHS, SLOTS = (1, 0, 129, 300, 17, 64, 128), (8, 2, 0, 3, -1, 7, 5)
TAIL = 9
ROWS = 10

Case = tuple[list[Tensor], Tensor]  # x, dt, A, B, C, D and dt_bias; states


def bounds_of(*lengths: int) -> Tensor:
    return int32(0, *itertools.accumulate(lengths))


def case(tokens: int, *, states: int = 128, groups: int = 2, width: int = WIDTH) -> Case:
    """On the GPU, as a layer has it: x, B and C are columns of the convolution's outputs."""
    parts = [HEADS * width, groups * states, groups * states]
    columns = exact(tokens, sum(parts), seed=1).bfloat16().cuda().split(parts, dim=1)
    dt = exact(tokens, 3 * HEADS, seed=2, scale=2.0).bfloat16().cuda()[:, HEADS : 2 * HEADS]
    a = -exact(HEADS, seed=3).abs().clamp(0.01, 16)
    a[0], a[1] = -0.001, -16  # one remembers for long, one forgets at once
    vectors = [exact(HEADS, seed=seed).float().cuda() for seed in (4, 5)]
    x, b, c = columns
    shared = (groups, states)
    given = [
        *(x.unflatten(1, (HEADS, width)), dt, a.float().cuda()),
        *(b.unflatten(1, shared), c.unflatten(1, shared), *vectors),
    ]
    return given, exact(ROWS, HEADS, width, states, seed=6).float().cuda()


def rows_of(given: list[Tensor], part: slice) -> list[Tensor]:
    return [one if at in (2, 5, 6) else one[part] for at, one in enumerate(given)]


def scan(given: list[Tensor], lengths: tuple[int, ...], state: Tensor, *slots: int) -> Tensor:
    return ops.ssd_scan(*given, NO_LIMIT, bounds_of(*lengths).cuda(), state, int32(*slots).cuda())


def errors(got: Tensor, wanted: Tensor) -> Tensor:
    """Root mean square errors by head, relative to what they are errors of."""
    lost = (got.double().cpu() - wanted).square()
    return (lost.mean((0, 2)) / wanted.square().mean((0, 2))).sqrt()


@pytest.mark.parametrize("half_state", [False, True])
@pytest.mark.parametrize(("states", "width", "groups"), [(64, 64, 1), (128, 64, 2), (128, 128, 6)])
def test_ragged_batches(states: int, width: int, groups: int, half_state: bool) -> None:
    given, state = case(sum(LENGTHS) + TAIL, states=states, width=width, groups=groups)
    if half_state:
        state = state.bfloat16()
    before = state.clone()
    wide = [one.double().cpu() for one in given]
    y, new_state = ssd.ssd_scan_reference(
        *wide, NO_LIMIT, bounds_of(*LENGTHS), state.double().cpu(), int32(*SLOTS)
    )
    got = scan(given, LENGTHS, state, *SLOTS)
    real = torch.cat([torch.full((n,), s >= 0) for n, s in zip(LENGTHS, SLOTS, strict=True)])
    inside = torch.cat([real, torch.zeros(TAIL, dtype=torch.bool)])
    assert not got[~inside.cuda()].any(), "padding rows must be zero"
    # Of outputs, which are bfloat16, 2^-9 at most is lost in the last rounding.
    assert errors(got[inside.cuda()], y[inside]).max() < 4e-3
    used = [s for n, s in zip(LENGTHS, SLOTS, strict=True) if n and s >= 0]
    assert errors(state[used].flatten(2), new_state[used].flatten(2)).max() < 4e-3
    unused = [row for row in range(ROWS) if row not in used]
    same_bits(state[unused], before[unused].cpu())


def test_no_split_at_chunks_changes_a_bit() -> None:
    given, start = case(700)

    def read(cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, results = start.clone(), []
        for first, last in itertools.pairwise([0, *cuts, 700]):
            part = rows_of(given, slice(first, last))
            results.append(scan(part, (last - first,), state, 4))
        return torch.cat(results), state

    y, state = read([])
    for cuts in ([128], [512], [128, 256, 640], [*range(128, 700, 128)]):
        other, last = read(cuts)
        same_bits(other, y.cpu())
        same_bits(last, state.cpu())


def test_a_sequence_has_the_same_bits_in_every_company() -> None:
    given, start = case(sum(LENGTHS) + TAIL)
    state = start.clone()
    got = scan(given, LENGTHS, state, *SLOTS)
    begin = 0
    for length, slot in zip(LENGTHS, SLOTS, strict=True):
        part = slice(begin, begin + length)
        begin += length
        if slot < 0:
            continue
        alone = start.clone()
        same_bits(scan(rows_of(given, part), (length,), alone, slot), got[part].cpu())
        same_bits(alone[slot], state[slot].cpu())


@pytest.mark.parametrize("states", [64, 128])
@pytest.mark.parametrize("half_state", [False, True])
def test_a_last_token_behind_chunks_is_a_step(states: int, half_state: bool) -> None:
    given, start = case(129 + 1, states=states)
    if half_state:
        start = start.bfloat16()
    whole, parted = start.clone(), start.clone()
    y = scan(given, (129, 1), whole, 3, 1)
    scan(rows_of(given, slice(0, 128)), (128,), parted, 3)
    last = rows_of(given, slice(128, 130))
    stepped = ops.ssd_step(*last, NO_LIMIT, parted, int32(3, 1).cuda())
    same_bits(stepped, y[128:].cpu())
    same_bits(parted, whole.cpu())


@pytest.mark.parametrize("states", [64, 100, 128, 200])
@pytest.mark.parametrize("half_state", [False, True])
def test_steps_of_a_row_have_the_same_bits_in_every_company(states: int, half_state: bool) -> None:
    """Threads take more rows of states where a batch is large."""
    given, _ = case(40, states=states)
    start = exact(40, HEADS, WIDTH, states, seed=7).to(torch.float32).cuda()
    if half_state:
        start = start.bfloat16()
    state = start.clone()
    slots = torch.arange(40, dtype=torch.int32, device="cuda").flip(0)
    y = ops.ssd_step(*given, NO_LIMIT, state, slots)
    for row in (0, 17, 39):
        alone = start.clone()
        one = slice(row, row + 1)
        same_bits(ops.ssd_step(*rows_of(given, one), NO_LIMIT, alone, slots[one]), y[one].cpu())
        same_bits(alone[39 - row], state[39 - row].cpu())


def test_values_that_are_not_finite_stay_in_their_sequence() -> None:
    given, start = case(300)
    clean, state = start.clone(), start.clone()
    y = scan(given, (100, 100, 100), clean, 0, 1, 2)
    bad = [one.clone() if at in (0, 1, 3, 4) else one for at, one in enumerate(given)]
    for at in (0, 1, 3, 4):
        bad[at][90:100] = torch.nan
        bad[at][200:] = torch.inf
    got = scan(bad, (100, 100, 100), state, 0, 1, -1)
    same_bits(got[100:200], y[100:200].cpu())
    same_bits(state[1:], torch.cat([clean[1:2], start[2:]]).cpu())
    assert got[90:100].isnan().all() and not got[200:].any()


def test_memory_between_rows_is_never_written() -> None:
    given, start = case(200)
    room = torch.full((ROWS, 2, *start.shape[1:]), 9.0, device="cuda")
    room[:, 1] = start
    same_bits(scan(given, (130, 70), room[:, 1], 5, 0), scan(given, (130, 70), start, 5, 0).cpu())
    same_bits(room[:, 1], start.cpu())
    assert (room[:, 0] == 9.0).all()
