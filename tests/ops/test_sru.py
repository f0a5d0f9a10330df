"""The simple recurrent unit: scan, step and training scan against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import sru
from tests.ops.helpers import DEVICES, SERVING_DTYPES, close, exact, int32, same_bits

CHANNELS = 37
CU_SEQLENS, SLOTS = int32(0, 5, 5, 135, 200, 331), int32(3, 0, 5, -1, 1)  # empty, padding, tail
TOKENS, ROWS = 340, 6
SCALE = 1.5

forms = pytest.mark.parametrize("highway", ["x", "part", "none"])
activations = pytest.mark.parametrize("tanh", [False, True])
gates = pytest.mark.parametrize("seen", [True, False])

Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
Served = tuple[Any, Any, Any, Any]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def case(
    tokens: int = TOKENS,
    seed: int = 0,
    *,
    highway: str = "x",
    seen: bool = True,
    channels: int = CHANNELS,
) -> Given:
    """u, x, weight_c and bias, float64. Errors of c do not grow from token to token."""
    parts = 4 if highway == "part" else 3
    return (
        exact(tokens, parts * channels, seed=seed + 1),
        exact(tokens, channels, seed=seed + 2) if highway == "x" else None,
        exact(2 * channels, seed=seed + 3, scale=0.5) if seen else None,
        exact(2 * channels, seed=seed + 4),
    )


def served(given: Given, device: str, dtype: torch.dtype) -> Served:
    """In the dtypes of the operators."""
    u, x, weight_c, bias = given
    return (
        u.to(device, dtype),
        None if x is None else x.to(device, dtype),
        None if weight_c is None else weight_c.to(device, torch.float32),
        bias.to(device, torch.float32),
    )


def rows_of(given: Served, part: slice) -> Served:
    u, x, weight_c, bias = given
    return u[part], None if x is None else x[part], weight_c, bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@forms
@activations
@gates
def test_ragged_batches(
    device: str, dtype: torch.dtype, highway: str, tanh: bool, seen: bool
) -> None:
    given, state = case(highway=highway, seen=seen), exact(ROWS, CHANNELS, seed=20)
    h, new_state = sru.sru_scan_reference(*given, CU_SEQLENS, state, SLOTS, SCALE, tanh)
    held = state.float().to(device)
    args = served(given, device, dtype)
    got = ops.sru_scan(*args, CU_SEQLENS.to(device), held, SLOTS.to(device), SCALE, tanh)
    assert got.dtype == dtype
    close(got, h, dtype, factor=4)
    close(held, new_state, torch.float32, factor=4)
    assert not got[135:200].any() and not got[331:].any(), "padding rows must be zero"
    same_bits(held[[0, 2, 4]], state[[0, 2, 4]].float())  # empty, free and free: untouched


@pytest.mark.parametrize("device", DEVICES)
@gates
def test_without_sequences_there_is_nothing_to_do(device: str, seen: bool) -> None:
    held = exact(ROWS, CHANNELS, seed=20).float().to(device)
    before = held.clone()
    args = served(case(300, seen=seen), device, torch.bfloat16)
    got = ops.sru_scan(*args, int32(0, device=device), held, int32(device=device))
    assert not got.any()
    same_bits(held, before)


@pytest.mark.parametrize("device", DEVICES)
@forms
@gates
def test_a_step_is_a_scan_of_one_token(device: str, highway: str, seen: bool) -> None:
    args = served(case(5, highway=highway, seen=seen), device, torch.bfloat16)
    slots, bounds = SLOTS.to(device), int32(0, 1, 2, 3, 4, 5, device=device)
    states = [exact(ROWS, CHANNELS, seed=20).float().to(device) for _ in range(2)]
    same_bits(
        ops.sru_step(*args, states[0], slots, SCALE),
        ops.sru_scan(*args, bounds, states[1], slots, SCALE),
    )
    same_bits(*states)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 64, 100])
@pytest.mark.parametrize("seen", [True, False])
def test_a_split_changes_no_bit(device: str, channels: int, seen: bool) -> None:
    """Anywhere; on a GPU at whole chunks where chunks are read side by side."""
    args = served(case(700, channels=channels, seen=seen), device, torch.float32)
    slots = int32(0, device=device)
    whole = exact(1, channels, seed=20).float().to(device)
    start = whole.clone()
    expected = ops.sru_scan(*args, int32(0, 700, device=device), whole, slots)
    for cut in (1, 128, 300, 640):
        if not seen and device == "cuda" and cut % 128:
            continue
        state = start.clone()
        parts = [
            ops.sru_scan(
                *rows_of(args, part), int32(0, len(args[0][part]), device=device), state, slots
            )
            for part in (slice(0, cut), slice(cut, None))
        ]
        same_bits(torch.cat(parts), expected)
        same_bits(state, whole)


@pytest.mark.parametrize("device", DEVICES)
@gates
def test_neighbours_change_no_bit(device: str, seen: bool, threads: Callable[[int], None]) -> None:
    """Nor do padding, the order of the batch, or the number of threads."""
    args = served(case(seen=seen), device, torch.bfloat16)
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    states = [exact(ROWS, CHANNELS, seed=20).float().to(device) for _ in range(3)]
    together = ops.sru_scan(*args, bounds, states[0], slots)
    threads(3)
    same_bits(ops.sru_scan(*args, bounds, states[1], slots), together)
    threads(1)
    for sequence, (begin, end) in enumerate(itertools.pairwise(CU_SEQLENS)):
        part = slice(int(begin), int(end))
        own = slots[sequence : sequence + 1]
        edges = int32(0, int(end - begin), device=device)
        same_bits(ops.sru_scan(*rows_of(args, part), edges, states[2], own), together[part])
    same_bits(states[1], states[0])
    same_bits(states[2], states[0])


@pytest.mark.parametrize("device", DEVICES)
def test_many_and_few_sequences_give_the_same_bits(device: str) -> None:
    """On a GPU many are read whole, a few by chunks side by side."""
    channels, length = 1000, 400
    args = served(case(length, channels=channels, seen=False), device, torch.float32)
    few = torch.zeros(1, channels, device=device)
    expected = ops.sru_scan(*args, int32(0, length, device=device), few, int32(0, device=device))
    copies = 40
    u, x, weight_c, bias = args
    many = torch.zeros(copies, channels, device=device)
    bounds = torch.arange(copies + 1, dtype=torch.int32, device=device) * length
    slots = torch.arange(copies, dtype=torch.int32, device=device)
    got = ops.sru_scan(
        u.repeat(copies, 1), x.repeat(copies, 1), weight_c, bias, bounds, many, slots
    )
    for copy in (0, 17, copies - 1):
        same_bits(got[copy * length : (copy + 1) * length], expected)
        same_bits(many[copy], few[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 257, 4096])
@gates
def test_lengths(device: str, length: int, seen: bool) -> None:
    given = case(length, channels=5, seen=seen)
    state = exact(1, 5, seed=20)
    h, new_state = sru.sru_scan_reference(*given, int32(0, length), state, int32(0))
    held = state.float().to(device)
    args = served(given, device, torch.float32)
    got = ops.sru_scan(*args, int32(0, length, device=device), held, int32(0, device=device))
    close(got, h, torch.float32, factor=4)
    close(held, new_state, torch.float32, factor=4)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_columns_of_a_product(device: str) -> None:
    """u and x of one matrix, which begins at any element."""
    u, x, weight_c, bias = served(case(), device, torch.bfloat16)
    room = torch.full((TOKENS, 4 * CHANNELS + 1), float("nan"), device=device, dtype=u.dtype)
    room[:, 1:] = torch.cat([x, u], dim=1)
    of_x, of_u = room[:, 1:].split([CHANNELS, 3 * CHANNELS], dim=1)
    bounds, slots = CU_SEQLENS.to(device), SLOTS.to(device)
    states = [exact(ROWS, CHANNELS, seed=20).float().to(device) for _ in range(2)]
    same_bits(
        ops.sru_scan(of_u, of_x, weight_c, bias, bounds, states[0], slots),
        ops.sru_scan(u, x, weight_c, bias, bounds, states[1], slots),
    )
    same_bits(*states)


@pytest.mark.parametrize("device", DEVICES)
@activations
def test_gates_that_are_shut_or_open_to_the_end(device: str, tanh: bool) -> None:
    """What a gate passes is exact, whatever the size of its pre-activation."""
    size = 1e4
    u = torch.zeros(4, 3, 2)
    u[:, 0], u[:, 1] = 7.0, torch.tensor([[-size, size]])
    u[:, 2] = torch.tensor([[size], [-size], [0.0], [size]]).expand(4, 2)
    x, bias = torch.full((4, 2), 3.0), torch.zeros(4)
    state = torch.full((1, 2), 0.125)
    given = (u.flatten(1), x, None, bias)
    held = state.to(device)
    args = served(given, device, torch.float32)
    got = ops.sru_scan(*args, int32(0, 4, device=device), held, int32(0, device=device), 1.0, tanh)
    want, new = sru.sru_scan_reference(*given, int32(0, 4), state, int32(0), 1.0, tanh)
    close(got, want, torch.float32)
    close(held, torch.tensor([[7.0, 0.125]]).double(), torch.float32, factor=0.1)
    close(new, torch.tensor([[7.0, 0.125]]).double(), torch.float64)


@pytest.mark.parametrize("device", DEVICES)
def test_tanh_is_accurate_relative_to_itself(device: str) -> None:
    c = torch.cat([torch.logspace(-6, 2, 400), -torch.logspace(-6, 2, 400), torch.zeros(1)])
    u = torch.zeros(1, 3, len(c))
    u[0, 1], u[0, 2] = 1e4, 1e4  # the state stays, and is the output
    held = c[None].clone().to(device)
    got = ops.sru_step(
        *(u.flatten(1).to(device), None, None, torch.zeros(2 * len(c), device=device)),
        *(held, int32(0, device=device), 1.0, True),
    )
    torch.testing.assert_close(got[0].cpu().double(), c.double().tanh(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@gates
def test_what_is_not_finite_stays_in_its_channel(device: str, seen: bool) -> None:
    u, x, weight_c, bias = served(case(20, channels=5, seen=seen), device, torch.float32)
    u[7, 2] = float("nan")
    state = torch.zeros(1, 5, device=device)
    h = ops.sru_scan(
        *(u, x, weight_c, bias, int32(0, 20, device=device), state, int32(0, device=device))
    )
    assert h[7:, 2].isnan().all() and state[0, 2].isnan()
    assert h[:7].isfinite().all() and h[:, [0, 1, 3, 4]].isfinite().all()


def gradients_of(args: list[Any], highway: str, tanh: bool, outputs: list[Tensor]) -> list[Tensor]:
    leaves = [
        one.requires_grad_() if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in args
    ]
    h, last = ops.sru_scan_train(*leaves, SCALE, tanh)
    torch.autograd.backward([h, last], [outputs[0].to(h.dtype), outputs[1].to(last.dtype)])
    return [h, last, *(one.grad for one in leaves if getattr(one, "grad", None) is not None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@forms
@activations
@gates
def test_gradients(device: str, dtype: torch.dtype, highway: str, tanh: bool, seen: bool) -> None:
    given, c0 = case(highway=highway, seen=seen), exact(5, CHANNELS, seed=21)
    outputs = [exact(TOKENS, CHANNELS, seed=22), exact(5, CHANNELS, seed=23)]
    wanted = gradients_of(
        [*(None if one is None else one.clone() for one in given), CU_SEQLENS, c0.clone()],
        *(highway, tanh, outputs),
    )
    got = gradients_of(
        [*served(given, device, dtype), CU_SEQLENS.to(device), c0.float().to(device)],
        *(highway, tanh, [one.to(device) for one in outputs]),
    )
    assert len(got) == len(wanted) == 5 + (highway == "x") + seen
    for ours, theirs in zip(got, wanted, strict=True):
        scale = float(theirs.detach().abs().max())
        close(ours / scale, theirs / scale, ours.dtype, factor=8)
    assert not got[2][331:].any(), "the gradient of the padding tail is zero"


@activations
@forms
def test_gradcheck(highway: str, tanh: bool) -> None:
    """Composed, in float64."""
    u, x, weight_c, bias = case(9, channels=2, highway=highway)
    bounds, c0 = int32(0, 4, 4, 8), exact(3, 2, seed=21)

    def function(*leaves: Any) -> Any:
        *given, first = leaves
        return ops.sru_scan_train(*given, bounds, first, SCALE, tanh)

    leaves = [None if one is None else one.requires_grad_() for one in (u, x, weight_c, bias, c0)]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_batches(device: str) -> None:
    weight_c, bias = torch.ones(10, device=device), torch.ones(10, device=device)
    state, none = torch.ones(3, 5, device=device), int32(device=device)
    before = state.clone()
    alone = torch.ones(4, 15, device=device)
    h = ops.sru_scan(alone, None, weight_c, bias, int32(0, device=device), state, none)
    assert h.shape == (4, 5) and not h.any()
    empty, edges = torch.ones(0, 15, device=device), int32(0, 0, 0, device=device)
    slots = int32(0, 2, device=device)
    assert ops.sru_scan(empty, None, None, bias, edges, state, slots).shape == (0, 5)
    assert ops.sru_step(empty, None, weight_c, bias, state, none).shape == (0, 5)
    same_bits(state, before)
    c0 = exact(2, 5, seed=1).float().to(device).requires_grad_()
    h, last = ops.sru_scan_train(empty, None, weight_c, bias, edges, c0)
    same_bits(last, c0.detach())
    last.sum().backward()
    assert h.shape == (0, 5) and c0.grad is not None and (c0.grad == 1).all()


def test_columns_of_the_package_become_planes() -> None:
    weight, x = exact(7, 5 * 4, seed=1), exact(3, 7, seed=2)
    theirs = (x @ weight).view(3, 5, 4)
    ours = torch.nn.functional.linear(x, sru.planes_of(weight, 4)).view(3, 4, 5)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
