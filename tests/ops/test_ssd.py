"""The recurrence of Mamba-2: scan, step and training scan against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import ops
from engine.ops import ssd
from tests.ops.helpers import (
    DEVICES,
    SERVING_DTYPES,
    close,
    exact,
    int32,
    same_bits,
)

HEADS, WIDTH, STATES = 6, 3, 5
CU_SEQLENS, SLOTS = int32(0, 5, 5, 305, 370, 501), int32(3, 0, 5, -1, 1)  # empty, padding, tail
TOKENS, ROWS = 510, 6
NO_LIMIT = (0.0, float("inf"))
LIMITED = (0.25, 1.5)

all_groups = pytest.mark.parametrize("groups", [1, 2, 6])


def case(tokens: int = TOKENS, seed: int = 0, *, groups: int = 2) -> list[Tensor]:
    """x, dt, A, B, C, D and dt_bias, float64."""
    a = -exact(HEADS, seed=seed + 1).abs().clamp(0.01, 16)
    a[0], a[1] = -0.001, -16  # one remembers for long, one forgets at once
    return [
        exact(tokens, HEADS, WIDTH, seed=seed + 2),
        exact(tokens, HEADS, seed=seed + 3, scale=3.0),
        a,
        exact(tokens, groups, STATES, seed=seed + 4),
        exact(tokens, groups, STATES, seed=seed + 5),
        exact(HEADS, seed=seed + 6),
        exact(HEADS, seed=seed + 7),
    ]


def rows_of(given: list[Tensor], part: slice) -> list[Tensor]:
    """The case for some of its tokens."""
    return [tensor if at in (2, 5, 6) else tensor[part] for at, tensor in enumerate(given)]


def served(given: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    return [
        tensor.to(device, torch.float32 if at == 2 else dtype) for at, tensor in enumerate(given)
    ]


def state_of(rows: int, seed: int) -> Tensor:
    return exact(rows, HEADS, WIDTH, STATES, seed=seed)


def near(given: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums of several hundred products may be much smaller than these."""
    close(given, wanted, dtype, factor=10)


@pytest.mark.parametrize("most_bytes", [2**30, 70_000, 1])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize(("groups", "limit"), [(1, NO_LIMIT), (2, LIMITED), (6, NO_LIMIT)])
def test_ragged_batches(
    device: str,
    dtype: torch.dtype,
    groups: int,
    limit: tuple[float, float],
    most_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one piece, in some and in one for each chunk."""
    monkeypatch.setattr(ssd, "_MOST_PIECE_BYTES", {device: most_bytes})
    given, state = case(groups=groups), state_of(ROWS, 20)
    y, new_state = ssd.ssd_scan_reference(*given, limit, CU_SEQLENS, state, SLOTS)
    held = state.float().to(device)
    got = ops.ssd_scan(
        *served(given, device, dtype), limit, CU_SEQLENS.to(device), held, SLOTS.to(device)
    )
    assert got.dtype == dtype
    near(got, y, dtype)
    near(held, new_state, torch.float32)
    assert not got[305:370].any() and not got[501:].any(), "padding rows must be zero"
    same_bits(held[[0, 2, 4]], state[[0, 2, 4]].float())  # empty, free and free: untouched


@pytest.mark.parametrize("lengths", [[128], [129], [1] * 40, [1, 300, 1, 1], [16, 17, 15]])
def test_chunks_cover_every_token_once(lengths: list[int]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens, count = sum(lengths) + 2, len(lengths)
    length = ssd._chunk_length(tokens, count)
    valid = torch.ones(count, dtype=torch.bool)
    sequence, at, inside = ssd._chunks_of(bounds, valid, tokens, length)
    assert at[inside].tolist() == list(range(sum(lengths)))
    assert len(at) == len(sequence) <= tokens // length + count
    assert at.numel() <= tokens + count * max(16, 2 * tokens // count)


def test_pieces_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = ssd._read_chunks

    def spy(added: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        seen.append(added.shape[1])
        return real(added, *others)

    monkeypatch.setattr(ssd, "_read_chunks", spy)
    chunk_bytes = 4 * (6 * HEADS * WIDTH * STATES + 4 * HEADS * 128 * (128 + WIDTH))
    monkeypatch.setattr(ssd, "_MOST_PIECE_BYTES", {"cpu": 2 * chunk_bytes + 1})
    ops.ssd_scan(
        *served(case(), "cpu", torch.float32), NO_LIMIT, int32(0, TOKENS),
        torch.zeros(1, HEADS, WIDTH, STATES), int32(0),
    )  # fmt: skip
    assert seen == [2, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@all_groups
def test_a_step_is_a_scan_of_length_one(device: str, dtype: torch.dtype, groups: int) -> None:
    slots = int32(-1, 4, 0, 11, 7, 3, -5, 2, 9, 12)  # the last one is no row
    batch = len(slots)
    given, state = case(batch, groups=groups), state_of(12, 4)
    bounds = torch.arange(batch + 1, dtype=torch.int32)
    y, new_state = ssd.ssd_scan_reference(*given, LIMITED, bounds, state, slots)
    args, rows = served(given, device, dtype), slots.to(device)
    stepped, scanned = state.float().to(device), state.float().to(device)
    got = ops.ssd_step(*args, LIMITED, stepped, rows)
    assert got.dtype == dtype
    near(got, y, dtype)
    near(stepped, new_state, torch.float32)
    assert not got[[0, 6, 9]].any()
    same_bits(stepped[[1, 5, 6, 8, 10]], state[[1, 5, 6, 8, 10]].float())
    near(ops.ssd_scan(*args, LIMITED, bounds.to(device), scanned, rows), y, dtype)
    near(scanned, stepped.cpu().double(), torch.float32)


@pytest.mark.parametrize("slots", [(-1, -1), ()])
def test_nothing_is_written_without_a_sequence(slots: tuple[int, ...]) -> None:
    state = state_of(3, 4).float()
    before, rows = state.clone(), int32(*slots)
    given = served(case(len(slots)), "cpu", torch.float32)
    assert not ops.ssd_step(*given, LIMITED, state, rows).any()
    given = served(case(9), "cpu", torch.float32)
    bounds = int32(*([0, 4, 9] if slots else [0]))
    assert not ops.ssd_scan(*given, LIMITED, bounds, state, rows).any()
    same_bits(state, before)


def test_values_that_are_not_finite_stay_in_their_sequence() -> None:
    """Of a state, of a sequence's tokens, and of padding."""
    given, state = case(60), state_of(4, 9)
    bounds, slots = int32(0, 20, 40, 50), int32(2, 0, -1)
    y, new_state = ssd.ssd_scan_reference(*given, NO_LIMIT, bounds, state, slots)
    args, held = served(given, "cpu", torch.float32), state.float()
    held[2] = torch.nan
    for at in (0, 1, 3, 4):
        args[at][10:20] = torch.nan
        args[at][40:] = torch.inf
    stepped = held.clone()
    got = ops.ssd_scan(*args, NO_LIMIT, bounds, held, slots)
    near(got[20:40], y[20:40], torch.float32)
    assert not got[40:].any() and got[:20].isnan().all()
    near(held[[0, 1, 3]], new_state[[0, 1, 3]], torch.float32)
    rows, one = int32(2, 0, -1), [19, 20, 45]
    y, new_state = ssd.ssd_scan_reference(
        *rows_of(given, one),
        NO_LIMIT,
        int32(0, 1, 2, 3),
        state,
        rows,  # type: ignore[arg-type]
    )
    got = ops.ssd_step(*rows_of(args, one), NO_LIMIT, stepped, rows)  # type: ignore[arg-type]
    near(got[1:], y[1:], torch.float32)
    near(stepped[[0, 1, 3]], new_state[[0, 1, 3]], torch.float32)
    before = stepped.clone()
    ops.ssd_step(*rows_of(args, [45]), NO_LIMIT, stepped, int32(-1))  # type: ignore[arg-type]
    same_bits(stepped, before)


@all_groups
def test_a_split_sequence_is_the_whole(groups: int) -> None:
    given, state = case(150, groups=groups), state_of(1, 9)
    y, new_state = ssd.ssd_scan_reference(*given, NO_LIMIT, int32(0, 150), state, int32(0))
    for at in (1, 2, 17, 128, 149):
        held, parts = state.float(), []
        for part in (slice(0, at), slice(at, 150)):
            args = served(rows_of(given, part), "cpu", torch.float32)
            parts.append(ops.ssd_scan(*args, NO_LIMIT, int32(0, len(args[0])), held, int32(0)))
        near(torch.cat(parts), y, torch.float32)
        near(held, new_state, torch.float32)


def test_float64_is_float64_throughout() -> None:
    given, state = case(300), state_of(1, 9)
    y, new_state = ssd.ssd_scan_reference(*given, LIMITED, int32(0, 300), state, int32(0))
    got = ops.ssd_scan(*given, LIMITED, int32(0, 300), state, int32(0))
    close(got, y, torch.float64, factor=10)
    close(state, new_state, torch.float64, factor=10)


@all_groups
def test_training_computes_the_scan_and_its_gradients(groups: int) -> None:
    given = case(36, groups=groups)
    batch = [
        tensor if at in (2, 5, 6) else tensor.unflatten(0, (2, 18))
        for at, tensor in enumerate(given)
    ]
    got = ops.ssd_scan_train(*batch, LIMITED)
    state = torch.zeros(2, HEADS, WIDTH, STATES)
    y, _ = ssd.ssd_scan_reference(*given, LIMITED, int32(0, 18, 36), state, int32(0, 1))
    close(got.flatten(0, 1), y, torch.float64, factor=10)
    inputs = [one.clone().requires_grad_() for one in batch]
    assert torch.autograd.gradcheck(ops.ssd_scan_train, [*inputs, NO_LIMIT], fast_mode=True)
    low = served(batch, "cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        under = ops.ssd_scan_train(*low, LIMITED)
    assert under.dtype == torch.bfloat16
    near(under.flatten(0, 1), y, torch.bfloat16)


def test_training_passes_states_from_chunk_to_chunk() -> None:
    given = case(300)
    got = ops.ssd_scan_train(
        *(one if at in (2, 5, 6) else one[None] for at, one in enumerate(given)), NO_LIMIT
    )
    state = torch.zeros(1, HEADS, WIDTH, STATES)
    y, _ = ssd.ssd_scan_reference(*given, NO_LIMIT, int32(0, 300), state, int32(0))
    close(got[0], y, torch.float64, factor=10)


def test_the_host_reads_no_value_of_a_tensor() -> None:
    """Fake tensors have none, so reading one raises; a CUDA graph could not be captured."""
    with FakeTensorMode():
        state = torch.empty(ROWS, HEADS, WIDTH, STATES)

        def arguments(tokens: int) -> list[Tensor]:
            steps, narrow = torch.empty(tokens, HEADS), torch.empty(tokens, 2, STATES)
            vector = torch.empty(HEADS)
            return [
                *(torch.empty(tokens, HEADS, WIDTH), steps, vector),
                *(narrow, narrow, vector, vector),
            ]

        def indices(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32)

        scanned = ops.ssd_scan(*arguments(40), LIMITED, indices(4), state, indices(3))
        assert scanned.shape == (40, HEADS, WIDTH)
        stepped = ops.ssd_step(*arguments(3), LIMITED, state, indices(3))
        assert stepped.shape == (3, HEADS, WIDTH)


@pytest.mark.gpu
def test_graphs_replay_scans_and_steps_of_other_sequences() -> None:
    given = served(case(), "cuda", torch.bfloat16)
    state = state_of(ROWS, 20).float().cuda()
    bounds, slots = CU_SEQLENS.cuda(), SLOTS.cuda()
    few = served(rows_of(case(), slice(0, 5)), "cuda", torch.bfloat16)

    def run() -> tuple[Tensor, Tensor]:
        return (
            ops.ssd_scan(*given, LIMITED, bounds, state, slots),
            ops.ssd_step(*few, LIMITED, state, slots),
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    bounds.copy_(int32(0, 1, 200, 200, 400, 510))
    slots.copy_(int32(2, -1, 4, 0, 5))
    before = state.clone()
    graph.replay()
    replayed, after = [one.clone() for one in captured], state.clone()
    state.copy_(before)
    for got, expected in zip(replayed, run(), strict=True):
        same_bits(got, expected.cpu())
    same_bits(after, state.cpu())
