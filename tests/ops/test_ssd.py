"""The recurrence of Mamba-2: scan, step and training scan against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
library = pytest.mark.skipif(not ssd._IN_LIBRARY, reason="the library lacks the operators")


@pytest.fixture(params=["library", "composed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with the library's operators and with the composed ones."""
    if request.param == "library" and not ssd._IN_LIBRARY:
        pytest.skip("the library lacks the operators")
    monkeypatch.setattr(ssd, "_IN_LIBRARY", request.param == "library")
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
    groups: int = 2,
    width: int = WIDTH,
    states: int = STATES,
) -> list[Tensor]:
    """x, dt, A, B, C, D and dt_bias, float64."""
    a = -exact(HEADS, seed=seed + 1).abs().clamp(0.01, 16)
    a[0], a[1] = -0.001, -16  # one remembers for long, one forgets at once
    return [
        exact(tokens, HEADS, width, seed=seed + 2),
        exact(tokens, HEADS, seed=seed + 3, scale=3.0),
        a,
        exact(tokens, groups, states, seed=seed + 4),
        exact(tokens, groups, states, seed=seed + 5),
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
    """Sums of several hundred products may be much smaller than these.

    In float32 they are added one by one on a GPU.
    """
    close(given, wanted, dtype, factor=40 if dtype == torch.float32 else 10)


groups_and_limits = pytest.mark.parametrize(
    ("groups", "limit"), [(1, NO_LIMIT), (2, LIMITED), (6, NO_LIMIT)]
)


@library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@groups_and_limits
def test_ragged_batches(
    device: str, dtype: torch.dtype, groups: int, limit: tuple[float, float]
) -> None:
    check_ragged_batch(device, dtype, groups, limit)


@pytest.mark.parametrize("most_bytes", [2**30, 70_000, 1])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@groups_and_limits
def test_ragged_batches_read_in_pieces(
    device: str,
    dtype: torch.dtype,
    groups: int,
    limit: tuple[float, float],
    most_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Composed, in one piece, in some and in one for each chunk."""
    monkeypatch.setattr(ssd, "_IN_LIBRARY", False)
    monkeypatch.setattr(ssd, "_MOST_PIECE_BYTES", {device: most_bytes})
    check_ragged_batch(device, dtype, groups, limit)


def check_ragged_batch(
    device: str, dtype: torch.dtype, groups: int, limit: tuple[float, float]
) -> None:
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


@pytest.mark.parametrize("states", [1, 16, 17, 64, 128])
@pytest.mark.parametrize("width", [1, 8, 64])
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_sizes(form: str, dtype: torch.dtype, width: int, states: int) -> None:
    check_sizes(dtype, width, states, groups=3)


@library
@pytest.mark.parametrize(("width", "states"), [(70, 128), (130, 256), (37, 1024), (5, 4), (3, 3)])
@pytest.mark.parametrize("half_state", [False, True])
def test_heads_of_several_runs_of_rows(width: int, states: int, half_state: bool) -> None:
    check_sizes(torch.float32, width, states, groups=1, half_state=half_state)


def check_sizes(
    dtype: torch.dtype, width: int, states: int, *, groups: int, half_state: bool = False
) -> None:
    given = case(40, groups=groups, width=width, states=states)
    state = exact(4, HEADS, width, states, seed=20)
    bounds, slots = int32(0, 1, 4, 39), int32(2, 0, 3)  # lengths 1, 3 and 35, and a tail
    y, new_state = ssd.ssd_scan_reference(*given, LIMITED, bounds, state, slots)
    held = state.to(torch.bfloat16 if half_state else torch.float32)
    got = ops.ssd_scan(*served(given, "cpu", dtype), LIMITED, bounds, held, slots)
    scale = float(y.abs().max())  # sums over the states of either sign
    near(got / scale, y / scale, dtype)
    scale = float(new_state.abs().max())
    near(held / scale, new_state / scale, held.dtype)


def test_more_states_than_the_library_takes() -> None:
    """They are composed."""
    check_sizes(torch.float32, 2, ssd._MOST_STATES + 1, groups=1)


@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_long_sequences(form: str, dtype: torch.dtype) -> None:
    """Rounding does not add up, also where a state remembers for thousands of tokens."""
    given, state = case(4000), state_of(1, 20)
    y, new_state = ssd.ssd_scan_reference(*given, NO_LIMIT, int32(0, 4000), state, int32(0))
    held = state.float()
    args = served(given, "cpu", dtype)
    got = ops.ssd_scan(*args, NO_LIMIT, int32(0, 4000), held, int32(0))
    scale = float(y.abs().max())
    close(got / scale, y / scale, dtype, factor=4)
    scale = float(new_state.abs().max())
    close(held / scale, new_state / scale, torch.float32, factor=4)


@library
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_rows_may_be_columns_of_a_product(dtype: torch.dtype) -> None:
    """Of one matrix [tokens, x | dt | B | C], which begins at any element."""
    plain = served(case(), "cpu", dtype)
    flat = [plain[at].flatten(1) for at in (0, 1, 3, 4)]
    widths = [one.shape[1] for one in flat]
    room = torch.full((TOKENS, sum(widths) + 1), float("nan"), dtype=dtype)
    room[:, 1:] = torch.cat(flat, dim=1)
    x, dt, b, c = room[:, 1:].split(widths, dim=1)
    shared = (2, STATES)
    apart = [
        *(x.unflatten(1, (HEADS, WIDTH)), dt, plain[2]),
        *(b.unflatten(1, shared), c.unflatten(1, shared), *plain[5:7]),
    ]
    states = [state_of(ROWS, 20).float() for _ in range(4)]
    same_bits(
        ops.ssd_scan(*apart, LIMITED, CU_SEQLENS, states[0], SLOTS),
        ops.ssd_scan(*plain, LIMITED, CU_SEQLENS, states[1], SLOTS),
    )
    first = slice(0, 5)
    same_bits(
        ops.ssd_step(*rows_of(apart, first), LIMITED, states[2], SLOTS),
        ops.ssd_step(*rows_of(plain, first), LIMITED, states[3], SLOTS),
    )
    same_bits(states[0], states[1])
    same_bits(states[2], states[3])


@library
def test_state_rows_may_be_apart() -> None:
    """As those of one layer in a tensor of all; nothing beside them is written."""
    given, plain = served(case(), "cpu", torch.float32), state_of(ROWS, 20).float()
    room = torch.full((ROWS, 2, *plain.shape[1:]), 9.0)
    room[:, 0] = plain
    same_bits(
        ops.ssd_scan(*given, LIMITED, CU_SEQLENS, room[:, 0], SLOTS),
        ops.ssd_scan(*given, LIMITED, CU_SEQLENS, plain, SLOTS),
    )
    same_bits(room[:, 0], plain)
    assert (room[:, 1] == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_vectors_beside_inputs_of_two_bytes(form: str, dtype: torch.dtype) -> None:
    """D and the bias of dt, in either type, are the same numbers."""
    given = served(case(), "cpu", dtype)
    mixed = [one.float() if at in (5, 6) else one for at, one in enumerate(given)]
    states = [state_of(ROWS, 20).float() for _ in range(2)]
    same_bits(
        ops.ssd_scan(*mixed, LIMITED, CU_SEQLENS, states[0], SLOTS),
        ops.ssd_scan(*given, LIMITED, CU_SEQLENS, states[1], SLOTS),
    )
    same_bits(states[0], states[1])


@library
@pytest.mark.parametrize("states", [5, 128])
def test_bfloat16_states_are_rounded_once(states: int) -> None:
    given = served(case(states=states), "cpu", torch.bfloat16)
    narrow = exact(ROWS, HEADS, WIDTH, states, seed=20).bfloat16()
    wide = narrow.float()
    same_bits(
        ops.ssd_scan(*given, LIMITED, CU_SEQLENS, narrow, SLOTS),
        ops.ssd_scan(*given, LIMITED, CU_SEQLENS, wide, SLOTS),
    )
    same_bits(narrow, wide.bfloat16())
    few, wide = rows_of(given, slice(0, 5)), narrow.float()
    same_bits(ops.ssd_step(*few, LIMITED, narrow, SLOTS), ops.ssd_step(*few, LIMITED, wide, SLOTS))
    same_bits(narrow, wide.bfloat16())


def test_bfloat16_states(form: str) -> None:
    given, state = case(), state_of(ROWS, 20)
    y, new_state = ssd.ssd_scan_reference(*given, LIMITED, CU_SEQLENS, state, SLOTS)
    held = state.bfloat16()
    got = ops.ssd_scan(*served(given, "cpu", torch.float32), LIMITED, CU_SEQLENS, held, SLOTS)
    near(got, y, torch.float32)
    close(held, new_state, torch.bfloat16)


def test_extreme_time_steps(form: str) -> None:
    """softplus is exact to fp32 on both sides; a large decay leaves nothing of the state."""
    given = case(40)
    given[1][:] = torch.linspace(-80, 60, 40, dtype=torch.float64)[:, None]
    given[2][2], given[2][3] = -1e5, -1e-6
    inputs = [one.float().double() for one in given]
    state = state_of(1, 20)
    y, new_state = ssd.ssd_scan_reference(*inputs, NO_LIMIT, int32(0, 40), state, int32(0))
    held = state.float()
    args = served(inputs, "cpu", torch.float32)
    got = ops.ssd_scan(*args, NO_LIMIT, int32(0, 40), held, int32(0))
    near(got, y, torch.float32)
    near(held, new_state, torch.float32)


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

    monkeypatch.setattr(ssd, "_IN_LIBRARY", False)
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
def test_a_step_is_a_scan_of_length_one(
    form: str, device: str, dtype: torch.dtype, groups: int
) -> None:
    slots = int32(-1, 4, 0, 11, 7, 3, -5, 2, 9, -12)
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
    by_scan = ops.ssd_scan(*args, LIMITED, bounds.to(device), scanned, rows)
    near(by_scan, y, dtype)
    near(scanned, stepped.cpu().double(), torch.float32)
    if form == "library":
        same_bits(by_scan, got.cpu())
        same_bits(scanned, stepped.cpu())


@pytest.mark.parametrize("slots", [(12, 12), (7, 6)])
def test_the_composed_form_skips_slots_that_are_no_row(slots: tuple[int, ...]) -> None:
    """In float64, too; the library's operators refuse them."""
    state = state_of(6, 4)
    before, rows = state.clone(), int32(*slots)
    given = case(len(slots))
    assert not ops.ssd_step(*given, LIMITED, state, rows).any()
    assert not ops.ssd_scan(*given, LIMITED, int32(0, 1, 2), state, rows).any()
    same_bits(state, before)


@pytest.mark.parametrize("slots", [(-1, -1), ()])
def test_nothing_is_written_without_a_sequence(form: str, slots: tuple[int, ...]) -> None:
    state = state_of(3, 4).float()
    before, rows = state.clone(), int32(*slots)
    given = served(case(len(slots)), "cpu", torch.float32)
    assert not ops.ssd_step(*given, LIMITED, state, rows).any()
    given = served(case(9), "cpu", torch.float32)
    bounds = int32(*([0, 4, 9] if slots else [0]))
    assert not ops.ssd_scan(*given, LIMITED, bounds, state, rows).any()
    none = served(case(0), "cpu", torch.float32)
    assert ops.ssd_scan(*none, LIMITED, bounds * 0, state, rows).shape == (0, HEADS, WIDTH)
    same_bits(state, before)


@library
def test_a_value_that_is_not_finite_changes_nothing_before_it() -> None:
    """Nor in other heads, if it is in x or dt."""
    given = served(case(150), "cpu", torch.float32)
    states = [state_of(1, 9).float() for _ in range(3)]
    clean = ops.ssd_scan(*given, LIMITED, int32(0, 150), states[0], int32(0))
    for at, state in ((0, states[1]), (1, states[2])):
        bad = [one.clone() for one in given]
        bad[at][71, 4] = torch.nan
        got = ops.ssd_scan(*bad, LIMITED, int32(0, 150), state, int32(0))
        assert got[71:, 4].isnan().all() and state[0, 4].isnan().all()
        got[71:, 4], state[0, 4] = clean[71:, 4], states[0][0, 4]
        same_bits(got, clean)
        same_bits(state, states[0])


def test_values_that_are_not_finite_stay_in_their_sequence(form: str) -> None:
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


@library
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("states", [5, 128])
def test_no_split_at_blocks_changes_a_bit(dtype: torch.dtype, states: int) -> None:
    """Of 16 tokens, which divide those at which the engine cuts prompts."""
    given = served(case(300, states=states), "cpu", dtype)
    start = exact(1, HEADS, WIDTH, states, seed=9).float()

    def read(cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, results = start.clone(), []
        for edge in itertools.pairwise([0, *cuts, 300]):
            bounds = int32(0, edge[1] - edge[0])
            args = rows_of(given, slice(*edge))
            results.append(ops.ssd_scan(*args, LIMITED, bounds, state, int32(0)))
        return torch.cat(results), state

    y, state = read([])
    for cuts in ([16], [128], [128, 256], [16, 32, 112], [*range(16, 300, 16)]):
        other, last = read(cuts)
        same_bits(other, y)
        same_bits(last, state)


@library
@pytest.mark.parametrize("width", [3, 100])
def test_a_sequence_has_the_same_bits_in_every_company(
    threads: Callable[[int], None], width: int
) -> None:
    lengths, slots = [1, 0, 200, 7, 64, 3], int32(8, 0, 3, -1, 2, 5)
    bounds = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    given = served(case(sum(lengths), width=width, states=64), "cpu", torch.float32)
    start = exact(9, HEADS, width, 64, seed=9).float()
    first = rows_of(given, slice(0, 6))
    for count in (1, 2, 3):
        threads(count)
        state, stepped = start.clone(), start.clone()
        got = ops.ssd_scan(*given, LIMITED, bounds, state, slots)
        y = ops.ssd_step(*first, LIMITED, stepped, slots)
        threads(1)
        for s, (length, slot) in enumerate(zip(lengths, slots.tolist(), strict=True)):
            part = slice(int(bounds[s]), int(bounds[s]) + length)
            if slot < 0:
                assert not got[part].any() and not y[s].any()
                continue
            alone, once = start[slot].clone()[None], start[slot].clone()[None]
            own = rows_of(given, part)
            same_bits(got[part], ops.ssd_scan(*own, LIMITED, int32(0, length), alone, int32(0)))
            same_bits(state[slot], alone[0])
            own = rows_of(given, slice(s, s + 1))
            same_bits(y[s : s + 1], ops.ssd_step(*own, LIMITED, once, int32(0)))
            same_bits(stepped[slot], once[0])


@all_groups
def test_a_split_sequence_is_the_whole(form: str, groups: int) -> None:
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


def test_the_host_reads_no_value_of_a_tensor(form: str) -> None:
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
