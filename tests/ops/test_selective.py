"""The selective recurrence of Mamba: scan, step and training scan against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
library = pytest.mark.skipif(
    not hasattr(torch.ops.minserve, "selective_scan"), reason="the library lacks the operators"
)


@pytest.fixture(params=["library", "composed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with the library's operators and with the composed ones."""
    if request.param == "library" and not selective._IN_LIBRARY:
        pytest.skip("the library lacks the operators")
    monkeypatch.setattr(selective, "_IN_LIBRARY", request.param == "library")
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def case(
    tokens: int = TOKENS,
    seed: int = 0,
    *,
    gated: bool = True,
    channels: int = CHANNELS,
    states: int = STATES,
) -> list[Tensor | None]:
    """x, dt, A, B, C, D, dt_bias and z, float64."""
    a = -exact(channels, states, seed=seed + 1).abs().clamp(0.01, 16)
    a[0] = -0.001  # remembers for long
    return [
        exact(tokens, channels, seed=seed + 2),
        exact(tokens, channels, seed=seed + 3),
        a,
        exact(tokens, states, seed=seed + 4),
        exact(tokens, states, seed=seed + 5),
        exact(channels, seed=seed + 6),
        exact(channels, seed=seed + 7),
        exact(tokens, channels, seed=seed + 8) if gated else None,
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


def check_ragged_batch(device: str, dtype: torch.dtype, gated: bool) -> None:
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


@library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@gates
def test_ragged_batches(device: str, dtype: torch.dtype, gated: bool) -> None:
    check_ragged_batch(device, dtype, gated)


@pytest.mark.parametrize("most_tokens", [10**6, 128, 7, 1])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@gates
def test_ragged_batches_read_in_pieces(
    device: str,
    dtype: torch.dtype,
    gated: bool,
    most_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Composed, of so many tokens at once."""
    monkeypatch.setattr(selective, "_IN_LIBRARY", False)
    most_bytes = {device: most_tokens * 6 * CHANNELS * STATES * 4}
    monkeypatch.setattr(selective, "_MOST_PIECE_BYTES", most_bytes)
    check_ragged_batch(device, dtype, gated)


@pytest.mark.parametrize("states", [1, 2, 8, 16, 17, 64, 300])
@pytest.mark.parametrize("channels", [1, 7, 32, 70])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_sizes(form: str, device: str, dtype: torch.dtype, channels: int, states: int) -> None:
    given = case(60, channels=channels, states=states)
    state, bounds, slots = exact(3, channels, states, seed=20), int32(0, 1, 60), int32(2, 0)
    y, new_state = wanted_of(given, bounds, state, slots)
    held = state.float().to(device)
    args = served(given, device, dtype)
    got = ops.selective_scan(*args, bounds.to(device), held, slots.to(device))
    scale = float(y.abs().max())  # sums over the states of either sign
    close(got / scale, y / scale, dtype, factor=4)
    close(held, new_state, torch.float32, factor=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_long_sequences(form: str, device: str, dtype: torch.dtype) -> None:
    """Rounding does not add up, also where a state remembers for thousands of tokens."""
    given = case(4000, channels=5, states=16)
    state = exact(1, 5, 16, seed=20)
    y, new_state = wanted_of(given, int32(0, 4000), state, int32(0))
    held = state.float().to(device)
    bounds, slots = int32(0, 4000, device=device), int32(0, device=device)
    got = ops.selective_scan(*served(given, device, dtype), bounds, held, slots)
    scale = float(y.abs().max())
    close(got / scale, y / scale, dtype, factor=4)
    scale = float(new_state.abs().max())
    close(held / scale, new_state / scale, torch.float32, factor=4)


@library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_rows_may_be_columns_of_a_product(device: str, dtype: torch.dtype) -> None:
    """Of one matrix [tokens, x | dt | B | C | z], which begins at any element."""
    plain = served(case(), device, dtype)
    together = torch.cat([plain[at] for at in (0, 1, 3, 4, 7)], dim=1)
    room = torch.full((TOKENS, together.shape[1] + 1), float("nan"), device=device, dtype=dtype)
    room[:, 1:] = together
    columns = room[:, 1:].split([CHANNELS, CHANNELS, STATES, STATES, CHANNELS], dim=1)
    apart = [*columns[:2], plain[2], *columns[2:4], *plain[5:7], columns[4]]
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    states = [exact(ROWS, CHANNELS, STATES, seed=20).float().to(device) for _ in range(4)]
    same_bits(
        ops.selective_scan(*apart, bounds, states[0], slots),
        ops.selective_scan(*plain, bounds, states[1], slots),
    )
    few = [one[:5] if at not in (2, 5, 6) else one for at, one in enumerate(apart)]
    same_bits(
        ops.selective_step(*few, states[2], slots),
        ops.selective_step(*served(rows_of(case(), slice(0, 5)), device, dtype), states[3], slots),
    )
    same_bits(states[0], states[1])
    same_bits(states[2], states[3])


@library
@pytest.mark.parametrize("device", DEVICES)
def test_state_rows_may_be_apart(device: str) -> None:
    """As those of one layer in a tensor of all; nothing beside them is written."""
    given = served(case(), device, torch.float32)
    plain = exact(ROWS, CHANNELS, STATES, seed=20).float().to(device)
    room = torch.full((ROWS, 2, CHANNELS, STATES), 9.0, device=device)
    room[:, 0] = plain
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    same_bits(
        ops.selective_scan(*given, bounds, room[:, 0], slots),
        ops.selective_scan(*given, bounds, plain, slots),
    )
    same_bits(room[:, 0], plain)
    assert (room[:, 1] == 9.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_vectors_beside_inputs_of_two_bytes(
    form: str, device: str, dtype: torch.dtype
) -> None:
    """D and the bias of dt, in either type, are the same numbers."""
    given = served(case(), device, dtype)
    mixed = [one.float() if at in (5, 6) else one for at, one in enumerate(given)]
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    states = [exact(ROWS, CHANNELS, STATES, seed=20).float().to(device) for _ in range(2)]
    same_bits(
        ops.selective_scan(*mixed, bounds, states[0], slots),
        ops.selective_scan(*given, bounds, states[1], slots),
    )
    same_bits(states[0], states[1])


@library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("states", [5, 16, 300])
def test_bfloat16_states_are_rounded_once(device: str, states: int) -> None:
    given = served(case(states=states), device, torch.bfloat16)
    narrow = exact(ROWS, CHANNELS, states, seed=20).bfloat16().to(device)
    wide = narrow.float()
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    same_bits(
        ops.selective_scan(*given, bounds, narrow, slots),
        ops.selective_scan(*given, bounds, wide, slots),
    )
    same_bits(narrow, wide.bfloat16())
    few = [one[:5] if at not in (2, 5, 6) else one for at, one in enumerate(given)]
    wide = narrow.float()
    same_bits(ops.selective_step(*few, narrow, slots), ops.selective_step(*few, wide, slots))
    same_bits(narrow, wide.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_states(form: str, device: str) -> None:
    given, state = case(), exact(ROWS, CHANNELS, STATES, seed=20)
    y, new_state = wanted_of(given, CU_SEQLENS, state, SLOTS)
    held = state.bfloat16().to(device)
    args = served(given, device, torch.float32)
    got = ops.selective_scan(*args, CU_SEQLENS.to(device), held, SLOTS.to(device))
    close(got, y, torch.float32, factor=4)
    close(held, new_state, torch.bfloat16, factor=1)


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_time_steps_and_gates(form: str, device: str) -> None:
    """softplus is exact to fp32 on both sides; a large decay leaves nothing of the state."""
    given = case(40)
    dt, a, z = given[1], given[2], given[7]
    assert dt is not None and a is not None and z is not None
    dt[:] = torch.linspace(-80, 60, 40, dtype=torch.float64)[:, None]
    z[:] = torch.linspace(-90, 90, 40, dtype=torch.float64)[:, None]
    a[1], a[2] = -1e5, -1e-6
    inputs = [one if one is None else one.float().double() for one in given]
    state = exact(1, CHANNELS, STATES, seed=20)
    y, new_state = wanted_of(inputs, int32(0, 40), state, int32(0))
    held = state.float().to(device)
    bounds, slots = int32(0, 40, device=device), int32(0, device=device)
    got = ops.selective_scan(*served(inputs, device, torch.float32), bounds, held, slots)
    close(got, y, torch.float32, factor=8)
    close(held, new_state, torch.float32, factor=8)


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_stays_in_its_channel_and_sequence(form: str, device: str) -> None:
    given = case()
    clean = served(given, device, torch.float32)
    x = given[0]
    assert x is not None
    x[10, 3] = float("nan")
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    states = [exact(ROWS, CHANNELS, STATES, seed=20).float().to(device) for _ in range(2)]
    got = ops.selective_scan(*served(given, device, torch.float32), bounds, states[0], slots)
    expected = ops.selective_scan(*clean, bounds, states[1], slots)
    assert got[10:135, 3].isnan().all() and states[0][5, 3].isnan().all()
    expected[10:135, 3], states[1][5, 3] = got[10:135, 3], states[0][5, 3]
    same_bits(got, expected)
    same_bits(states[0], states[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [None, 7])
def test_values_that_are_not_finite_stay_in_their_sequence(
    form: str, device: str, piece: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a state, of a sequence's tokens, and of padding; also where pieces of a scan end."""
    if piece is not None:
        most_bytes = piece * 6 * CHANNELS * STATES * 4 + 1
        monkeypatch.setattr(selective, "_MOST_PIECE_BYTES", {"cpu": most_bytes, "cuda": most_bytes})
    given, state = case(60), exact(4, CHANNELS, STATES, seed=9)
    bounds, slots = int32(0, 20, 40, 50), int32(2, 0, -1)
    y, new_state = wanted_of(given, bounds, state, slots)
    args, held = served(given, device, torch.float32), state.float().to(device)
    held[2] = torch.nan
    for at in (0, 1, 3, 4):  # x, dt, B, C
        tensor = args[at]
        assert tensor is not None
        tensor[10:20] = torch.nan
        tensor[40:] = torch.inf
    got = ops.selective_scan(*args, bounds.to(device), held, slots.to(device)).cpu()
    close(got[20:40], y[20:40], torch.float32, factor=4)
    assert got[:20].isnan().all() and not got[40:].any() and held[2].isnan().all()
    rest = [0, 1, 3]
    close(held[rest], new_state[rest], torch.float32, factor=4)


def test_pieces_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def spy(a: Tensor, *others: Any) -> Tensor:
        lengths.append(a.shape[1])
        return ops.linear_scan(a, *others)

    monkeypatch.setattr(selective, "_IN_LIBRARY", False)
    monkeypatch.setattr(selective, "linear_scan", spy)
    most_bytes = {"cpu": 100 * 6 * CHANNELS * STATES * 4 + 1}
    monkeypatch.setattr(selective, "_MOST_PIECE_BYTES", most_bytes)
    given, state = served(case(), "cpu", torch.float32), torch.zeros(ROWS, CHANNELS, STATES)
    ops.selective_scan(*given, CU_SEQLENS, state, SLOTS)
    assert lengths[::2] == lengths[1::2] == [100, 100, 100, 40]  # states, and which are not finite


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@gates
def test_a_step_is_a_scan_of_length_one(
    form: str, device: str, dtype: torch.dtype, gated: bool
) -> None:
    slots = int32(4, 0, -1, 11, 7, 3, -5, 2, 9, -12)
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
    by_scan = ops.selective_scan(*args, bounds.to(device), scanned, rows)
    close(by_scan, y, dtype, factor=4)
    close(scanned, stepped.cpu().double(), torch.float32)
    if form == "library":
        same_bits(by_scan, got.cpu())
        same_bits(scanned, stepped.cpu())


@pytest.mark.parametrize("slots", [(-1, -1), ()])
def test_nothing_is_written_without_a_sequence(form: str, slots: tuple[int, ...]) -> None:
    state = exact(3, CHANNELS, STATES, seed=4).float()
    before, rows = state.clone(), int32(*slots)
    given = served(case(len(slots)), "cpu", torch.float32)
    assert not ops.selective_step(*given, state, rows).any()
    given = served(case(9), "cpu", torch.float32)
    bounds = int32(*([0, 4, 9] if slots else [0]))
    assert not ops.selective_scan(*given, bounds, state, rows).any()
    none = served(case(0), "cpu", torch.float32)
    assert ops.selective_scan(*none, bounds * 0, state, rows).shape == (0, CHANNELS)
    same_bits(state, before)


@library
def test_without_channels() -> None:
    given = served(case(4, channels=1), "cpu", torch.float32)
    empty = [one[:, :0] if one.dim() == 2 else one[:0] for one in given]
    empty[2:5] = given[2][:0], given[3], given[4]
    assert ops.selective_scan(*empty, int32(0, 4), torch.zeros(1, 0, STATES), int32(0)).shape == (
        *(4, 0),
    )


@pytest.mark.parametrize("slots", [(12, 12), (7, 6)])
def test_the_composed_form_skips_slots_that_are_no_row(slots: tuple[int, ...]) -> None:
    """In float64, too; the library's operators refuse them on the CPU."""
    state = exact(6, CHANNELS, STATES, seed=4)
    before, rows = state.clone(), int32(*slots)
    given = [one if one is None else one.double() for one in case(len(slots))]
    assert not ops.selective_step(*given, state, rows).any()
    assert not ops.selective_scan(*given, int32(0, 1, 2), state, rows).any()
    same_bits(state, before)


@library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("states", [5, 16])
def test_no_split_changes_a_bit(device: str, dtype: torch.dtype, states: int) -> None:
    given = served(case(300, channels=37, states=states), device, dtype)
    start = exact(1, 37, states, seed=9).float().to(device)
    slot = int32(0, device=device)

    def read(parts: list[slice]) -> tuple[Tensor, Tensor]:
        state, results = start.clone(), []
        for part in parts:
            args = rows_of(given, part)
            bounds = int32(0, part.stop - part.start, device=device)
            results.append(ops.selective_scan(*args, bounds, state, slot))  # type: ignore[arg-type]
        return torch.cat(results), state.cpu()

    y, state = read([slice(0, 300)])
    for cuts in ([1], [127], [128], [129, 131], [2, 2, 64, 299], [*range(1, 300)]):
        edges = [0, *cuts, 300]
        other, last = read([slice(*edge) for edge in itertools.pairwise(edges)])
        same_bits(other, y.cpu())
        same_bits(last, state)


@library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [5, 100])
def test_a_sequence_has_the_same_bits_in_every_company(
    threads: Callable[[int], None], device: str, channels: int
) -> None:
    lengths = [1, 0, 200, 7, 64, 3]
    bounds = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    tokens = sum(lengths)
    given = served(case(tokens, channels=channels, states=16), device, torch.float32)
    start = exact(9, channels, 16, seed=9).float().to(device)
    slots = int32(8, 0, 3, -1, 2, 5)
    for count in (1, 2, 3) if device == "cpu" else (1,):
        threads(count)
        state = start.clone()
        got = ops.selective_scan(*given, bounds.to(device), state, slots.to(device))
        for s, (first, length, slot) in enumerate(zip(bounds, lengths, slots, strict=False)):
            begin = int(first)
            own = rows_of(given, slice(begin, begin + length))
            alone = start[int(slot)].clone()[None]
            edges = int32(0, length, device=device)
            expected = ops.selective_scan(*own, edges, alone, int32(0, device=device))  # type: ignore[arg-type]
            if int(slot) >= 0:
                same_bits(got[begin : begin + length], expected.cpu())
                same_bits(state[int(slot)], alone[0].cpu())
            else:
                assert not got[begin : begin + length].any(), s


def test_a_split_sequence_is_the_whole(form: str) -> None:
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


def test_the_host_reads_no_value_of_a_tensor(form: str) -> None:
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


def selected_case(
    batch: int, channels: int, rank: int, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    """Arguments of selected_step but for the state and what comes after it."""
    wide = exact(batch, 2 * channels, seed=50).cuda().to(dtype)
    weight = 0.3 * exact(channels, rank, seed=51)
    return [
        wide[:, :channels],
        exact(batch, rank + 32, seed=52).cuda().to(dtype),
        selective.pack_dt_weight(weight.cuda().to(dtype)),
        -exact(channels, 16, seed=53).abs().float().cuda(),
        exact(channels, seed=54).float().cuda(),
        exact(channels, seed=55).cuda().to(dtype),
        wide[:, channels:],
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "channels", "rank"), [(1, 64, 8), (3, 70, 48), (9, 200, 264), (70, 1536, 48)]
)
def test_a_step_that_projects_its_own_time_steps(
    batch: int, channels: int, rank: int, kept: torch.dtype, eps: float | None
) -> None:
    given = selected_case(batch, channels, rank)
    state = exact(batch + 1, channels, 16, seed=56).to("cuda", kept)
    slots = torch.randperm(batch + 1, generator=torch.Generator().manual_seed(57))[:batch].int()
    slots[batch // 2] = -1 if batch > 1 else 1
    on_cpu = [one.cpu() for one in given]
    y, new_state = selective.selected_step_reference(*on_cpu, state.cpu(), slots, eps)
    before, rows = state.clone(), slots.cuda()
    got = selective.selected_step(*given, state, rows, eps)
    close(got, y, torch.bfloat16, factor=4)
    close(state, new_state, kept, factor=4)
    for row in {0, batch // 2, batch - 1}:
        alone = before.clone()
        one = [
            tensor[row : row + 1] if at in (0, 1, 6) else tensor for at, tensor in enumerate(given)
        ]
        same_bits(selective.selected_step(*one, alone, rows[row : row + 1], eps)[0], got[row].cpu())


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
