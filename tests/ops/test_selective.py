"""The selective recurrence of Mamba: scan, step and training scan against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import ops
from engine.ops import selective
from tests.ops.helpers import (
    DEVICES,
    SERVING_DTYPES,
    close,
    exact,
    int32,
    same_bits,
)

CHANNELS, STATES = 11, 5
CU_SEQLENS, SLOTS = int32(0, 5, 5, 135, 200, 331), int32(3, 0, 5, -1, 1)  # empty, padding, tail
TOKENS, ROWS = 340, 6

gates = pytest.mark.parametrize("gated", [True, False])


def case(tokens: int = TOKENS, seed: int = 0, *, gated: bool = True) -> list[Tensor | None]:
    """x, dt, A, B, C, D, dt_bias and z, float64."""
    a = -exact(CHANNELS, STATES, seed=seed + 1).abs().clamp(0.01, 16)
    a[0] = -0.001  # remembers for long
    return [
        exact(tokens, CHANNELS, seed=seed + 2),
        exact(tokens, CHANNELS, seed=seed + 3),
        a,
        exact(tokens, STATES, seed=seed + 4),
        exact(tokens, STATES, seed=seed + 5),
        exact(CHANNELS, seed=seed + 6),
        exact(CHANNELS, seed=seed + 7),
        exact(tokens, CHANNELS, seed=seed + 8) if gated else None,
    ]


def rows_of(given: list[Tensor | None], part: slice) -> list[Tensor | None]:
    """The case for some of its tokens."""
    return [
        tensor if at in (2, 5, 6) or tensor is None else tensor[part]
        for at, tensor in enumerate(given)
    ]


def served(given: list[Tensor | None], device: str, dtype: torch.dtype) -> list[Any]:
    return [
        None if tensor is None else tensor.to(device, torch.float32 if at == 2 else dtype)
        for at, tensor in enumerate(given)
    ]


def wanted_of(given: list[Any], cu_seqlens: Tensor, state: Tensor, slots: Tensor) -> Any:
    return selective.selective_scan_reference(*given, cu_seqlens, state, slots)


@pytest.mark.parametrize("most_tokens", [10**6, 128, 7, 1])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@gates
def test_ragged_batches(
    device: str,
    dtype: torch.dtype,
    gated: bool,
    most_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read in pieces of so many tokens."""
    most_bytes = {device: most_tokens * 3 * CHANNELS * STATES * 4}
    monkeypatch.setattr(selective, "_MOST_PIECE_BYTES", most_bytes)
    given, state = case(gated=gated), exact(ROWS, CHANNELS, STATES, seed=20)
    y, new_state = wanted_of(given, CU_SEQLENS, state, SLOTS)
    held = state.float().to(device)
    got = ops.selective_scan(
        *served(given, device, dtype), CU_SEQLENS.to(device), held, SLOTS.to(device)
    )
    assert got.dtype == dtype
    close(got, y, dtype, factor=4)
    close(held, new_state, torch.float32, factor=4)
    assert not got[135:200].any() and not got[331:].any(), "padding rows must be zero"
    same_bits(held[[0, 2, 4]], state[[0, 2, 4]].float())  # empty, free and free: untouched


def test_pieces_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def spy(a: Tensor, *others: Any) -> Tensor:
        lengths.append(a.shape[1])
        return ops.linear_scan(a, *others)

    monkeypatch.setattr(selective, "linear_scan", spy)
    most_bytes = {"cpu": 100 * 3 * CHANNELS * STATES * 4 + 1}
    monkeypatch.setattr(selective, "_MOST_PIECE_BYTES", most_bytes)
    given, state = served(case(), "cpu", torch.float32), torch.zeros(ROWS, CHANNELS, STATES)
    ops.selective_scan(*given, CU_SEQLENS, state, SLOTS)
    assert lengths == [100, 100, 100, 40]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@gates
def test_a_step_is_a_scan_of_length_one(device: str, dtype: torch.dtype, gated: bool) -> None:
    slots = int32(4, 0, -1, 11, 7, 3, -5, 2, 9, 12)  # the last one is no row
    batch = len(slots)
    given, state = case(batch, gated=gated), exact(12, CHANNELS, STATES, seed=4)
    bounds = torch.arange(batch + 1, dtype=torch.int32)
    y, new_state = wanted_of(given, bounds, state, slots)
    args, rows = served(given, device, dtype), slots.to(device)
    stepped, scanned = state.float().to(device), state.float().to(device)
    got = ops.selective_step(*args, stepped, rows)
    assert got.dtype == dtype
    close(got, y, dtype, factor=4)
    close(stepped, new_state, torch.float32, factor=4)
    assert not got[[2, 6, 9]].any()
    same_bits(stepped[[1, 5, 6, 8, 10]], state[[1, 5, 6, 8, 10]].float())
    close(ops.selective_scan(*args, bounds.to(device), scanned, rows), y, dtype, factor=4)
    close(scanned, stepped.cpu().double(), torch.float32)


@pytest.mark.parametrize("slots", [(-1, -1), ()])
def test_nothing_is_written_without_a_sequence(slots: tuple[int, ...]) -> None:
    state = exact(3, CHANNELS, STATES, seed=4).float()
    before, rows = state.clone(), int32(*slots)
    given = served(case(len(slots)), "cpu", torch.float32)
    assert not ops.selective_step(*given, state, rows).any()
    given = served(case(9), "cpu", torch.float32)
    bounds = int32(*([0, 4, 9] if slots else [0]))
    assert not ops.selective_scan(*given, bounds, state, rows).any()
    same_bits(state, before)


def test_a_split_sequence_is_the_whole() -> None:
    given, state = case(40), exact(1, CHANNELS, STATES, seed=9)
    y, new_state = wanted_of(given, int32(0, 40), state, int32(0))
    for at in (1, 2, 17, 39):
        held, parts = state.float(), []
        for part in (slice(0, at), slice(at, 40)):
            args = served(rows_of(given, part), "cpu", torch.float32)
            parts.append(ops.selective_scan(*args, int32(0, len(args[0])), held, int32(0)))
        close(torch.cat(parts), y, torch.float32, factor=4)
        close(held, new_state, torch.float32, factor=4)


@gates
def test_training_computes_the_scan_and_its_gradients(gated: bool) -> None:
    given = case(12, gated=gated)
    batch: list[Any] = [
        tensor if at in (2, 5, 6) or tensor is None else tensor.view(2, 6, -1)
        for at, tensor in enumerate(given)
    ]
    got = ops.selective_scan_train(*batch)
    state = torch.zeros(2, CHANNELS, STATES)
    y, _ = wanted_of(given, int32(0, 6, 12), state, int32(0, 1))
    close(got.flatten(0, 1), y, torch.float64)
    inputs = [None if one is None else one.clone().requires_grad_() for one in batch]
    assert torch.autograd.gradcheck(ops.selective_scan_train, inputs, fast_mode=True)
    low = ops.selective_scan_train(*served(batch, "cpu", torch.bfloat16))
    assert low.dtype == torch.bfloat16
    close(low.flatten(0, 1), y, torch.bfloat16, factor=4)


def test_the_host_reads_no_value_of_a_tensor() -> None:
    """Fake tensors have none, so reading one raises; a CUDA graph could not be captured."""
    with FakeTensorMode():
        state = torch.empty(ROWS, CHANNELS, STATES)

        def arguments(tokens: int) -> list[Tensor]:
            wide, narrow = torch.empty(tokens, CHANNELS), torch.empty(tokens, STATES)
            vector = torch.empty(CHANNELS)
            return [wide, wide, state[0], narrow, narrow, vector, vector, wide]

        def indices(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32)

        scanned = ops.selective_scan(*arguments(40), indices(4), state, indices(3))
        assert scanned.shape == (40, CHANNELS)
        assert ops.selective_step(*arguments(3), state, indices(3)).shape == (3, CHANNELS)


@pytest.mark.gpu
def test_graphs_replay_scans_and_steps_of_other_sequences() -> None:
    given = served(case(), "cuda", torch.bfloat16)
    state = exact(ROWS, CHANNELS, STATES, seed=20).float().cuda()
    bounds, slots = CU_SEQLENS.cuda(), SLOTS.cuda()
    few = served(rows_of(case(), slice(0, 5)), "cuda", torch.bfloat16)

    def run() -> tuple[Tensor, Tensor]:
        return (
            ops.selective_scan(*given, bounds, state, slots),
            ops.selective_step(*few, state, slots),
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    bounds.copy_(int32(0, 1, 100, 100, 330, 340))
    slots.copy_(int32(2, -1, 4, 0, 5))
    before = state.clone()
    graph.replay()
    replayed, after = [one.clone() for one in captured], state.clone()
    state.copy_(before)
    for got, expected in zip(replayed, run(), strict=True):
        same_bits(got, expected.cpu())
    same_bits(after, state.cpu())
