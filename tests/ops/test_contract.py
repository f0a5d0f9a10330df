"""The contracts with torch: opcheck, torch.compile, CUDA graphs, layouts, empty inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ops
from tests.ops.helpers import (
    BOUND,
    CELLS,
    DEVICES,
    exact,
    given_options,
    int32,
    ragged,
    same_bits,
)

Call = tuple[Callable[..., Any], tuple[Any, ...]]
NAMES = [
    "linear_scan",
    "linear_scan_backward",
    "mingru_scan",
    "mingru_step",
    "mingru_scan_train",
    "mingru_scan_train_backward",
    "minlstm_scan",
    "minlstm_step",
    "minlstm_scan_train",
    "minlstm_scan_train_backward",
    "hgrn_scan",
    "hgrn_step",
    "conv_scan",
    "conv_step",
    "selective_scan",
    "selective_step",
    "ssd_scan",
    "ssd_step",
    "sru_scan",
    "sru_step",
    "sru_scan_train",
    "sru_scan_train_backward",
    "target_logprobs",
]

# Where the state stands among the arguments of the operators that change it.
STATE_AT = {
    "mingru_scan": 2,
    "mingru_step": 1,
    "minlstm_scan": 2,
    "minlstm_step": 1,
    "hgrn_scan": 2,
    "hgrn_step": 1,
    "conv_scan": 4,
    "conv_step": 3,
    "selective_scan": 9,
    "selective_step": 8,
    "ssd_scan": 9,
    "ssd_step": 8,
    "sru_scan": 5,
    "sru_step": 4,
}


def arguments(name: str, device: str, grad: bool = False) -> tuple[Any, ...]:
    """Float32 arguments of an operator, all optional tensors given."""
    raw = _arguments(name)
    moved = tuple(x.to(device) if isinstance(x, Tensor) else x for x in raw)
    if not grad:
        return moved
    return tuple(
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in moved
    )


def _arguments(name: str) -> tuple[Any, ...]:
    if name.startswith("linear"):
        a, b = exact(2, 70, 5, seed=1).sigmoid().float(), exact(2, 70, 5, seed=2).float()
        h0 = exact(2, 5, seed=3).float()
        return (b, a, b, h0, False) if name.endswith("backward") else (a, b, h0, False)
    if name == "target_logprobs":
        return exact(3, 70, seed=11, scale=3.0).float(), torch.tensor([69, 7, 31]), 3
    if name.startswith("conv"):
        weight, bias = exact(5, 4, seed=4).float(), exact(5, seed=5).float()
        state, slots = exact(4, 3, 5, seed=6).float(), int32(2, -1, 0)
        if name == "conv_step":
            return exact(3, 5, seed=7).float(), weight, bias, state, slots
        return exact(12, 5, seed=7).float(), weight, bias, int32(0, 2, 7, 10), state, slots
    if name.startswith("selective"):
        return _selective_arguments(name)
    if name.startswith("ssd"):
        return _ssd_arguments(name)
    if name.startswith("sru"):
        return _sru_arguments(name)
    cell = name.split("_")[0]
    options = given_options(
        {"mingru": (False,), "minlstm": (False, True), "hgrn": (BOUND,)}[cell], channels=5
    )
    pre, cu_seqlens, state, slots = ragged(cell, channels=5)
    if name.endswith("step"):
        return pre[:5].float(), state.float(), slots, *options
    if name.endswith("scan"):
        return pre.float(), cu_seqlens, state.float(), slots, *options
    h0 = exact(5, 5, seed=8).float()
    if name.endswith("train"):
        return pre.float(), cu_seqlens, h0, *options
    h, seen = exact(340, 5, seed=9).float(), exact(340, 5, seed=10).float()
    return seen, h0 * 0.5, pre.float(), h, cu_seqlens, h0, *options


def _selective_arguments(name: str) -> tuple[Any, ...]:
    def rows(columns: int, seed: int) -> Tensor:
        return exact(12 if name.endswith("scan") else 3, columns, seed=seed).float()

    vectors = [exact(5, seed=seed).float() for seed in (15, 16)]
    state, slots = exact(4, 5, 16, seed=17).float(), int32(2, -1, 0)
    a = -exact(5, 16, seed=14).float().abs()
    inputs = rows(5, 12), rows(5, 13), a, rows(16, 18), rows(16, 19), *vectors, rows(5, 20)
    if name.endswith("step"):
        return *inputs, state, slots
    return *inputs, int32(0, 2, 7, 10), state, slots


def _ssd_arguments(name: str) -> tuple[Any, ...]:
    def rows(*sizes: int, seed: int) -> Tensor:
        return exact(12 if name.endswith("scan") else 3, *sizes, seed=seed).float()

    d, bias = (exact(4, seed=seed).float() for seed in (15, 16))
    state, slots = exact(4, 4, 5, 16, seed=17).float(), int32(2, -1, 0)
    a, shared = -exact(4, seed=14).float().abs(), [rows(2, 16, seed=seed) for seed in (18, 19)]
    inputs = rows(4, 5, seed=12), rows(4, seed=13), a, *shared, d, bias, (0.1, 2.0)
    if name.endswith("step"):
        return *inputs, state, slots
    return *inputs, int32(0, 2, 7, 10), state, slots


def _sru_arguments(name: str) -> tuple[Any, ...]:
    def rows(columns: int, seed: int) -> Tensor:
        return exact(3 if name.endswith("step") else 12, columns, seed=seed).float()

    weight_c, bias = (exact(10, seed=seed, scale=0.5).float() for seed in (12, 13))
    inputs = rows(15, 14), rows(5, 15), weight_c, bias
    state, slots, bounds = exact(4, 5, seed=16).float(), int32(2, -1, 0), int32(0, 2, 7, 10)
    if name == "sru_step":
        return *inputs, state, slots, 1.5, True
    if name == "sru_scan":
        return *inputs, bounds, state, slots, 1.5, True
    c0 = exact(3, 5, seed=17).float()
    if name == "sru_scan_train":
        return *inputs, bounds, c0, 1.5, True
    return rows(5, 18), c0 * 0.5, *inputs, bounds, rows(5, 19), c0, 1.5, True


def call(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.minserve, name)


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in args)


def assert_same(given: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for x, y in zip(given, wanted, strict=True):
        if isinstance(x, Tensor):
            same_bits(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device: str, name: str) -> None:
    differentiable = name == "linear_scan" or name.endswith("train")
    overload = call(name).default
    torch.library.opcheck(overload, arguments(name, device))
    if differentiable:
        torch.library.opcheck(overload, arguments(name, device, grad=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("backward")])
def test_compiled_equals_eager(device: str, name: str) -> None:
    torch.compiler.reset()
    wrapper = getattr(ops, name)

    def function(*args: Any) -> list[Tensor]:
        return [x * 2.0 for x in flat(wrapper(*args))]

    given, wanted = arguments(name, device), arguments(name, device)
    compiled = torch.compile(function, fullgraph=True)
    for _ in range(2):  # the second call meets a changed state
        assert_same(tuple(compiled(*given)), tuple(function(*wanted)))
    assert_same(given, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["linear_scan", "mingru_scan_train", "minlstm_scan_train", "sru_scan_train"]
)
def test_compiled_gradients_equal_eager(device: str, name: str) -> None:
    torch.compiler.reset()
    wrapper = getattr(ops, name)

    def loss(*args: Any) -> Tensor:
        return torch.stack([(x * x).sum() for x in flat(wrapper(*args))]).sum()

    given, wanted = (arguments(name, device, grad=True) for _ in range(2))
    torch.compile(loss, fullgraph=True)(*given).backward()
    loss(*wanted).backward()
    for x, y in zip(given, wanted, strict=True):
        if isinstance(x, Tensor) and x.requires_grad:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_graph_replay_equals_eager(name: str) -> None:
    """Captured on one set of inputs, replayed on others: indices are read at replay."""
    captured, fresh = arguments(name, "cuda"), arguments(name, "cuda")
    for x in fresh:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.copy_(x.flip(0) * 0.5)
        elif isinstance(x, Tensor) and name.endswith("step"):
            x.copy_(x.flip(0))  # slots
        elif isinstance(x, Tensor) and x.numel() and int(x[0]) == 0:
            x[1] -= 1  # cu_seqlens: another first border
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(name)(*copied(captured))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(name)(*captured)
    for _ in range(2):
        for slot, value in zip(captured, fresh, strict=True):
            if isinstance(slot, Tensor):
                slot.copy_(value)
        for x in flat(result):
            x.fill_(float("nan") if x.is_floating_point() else -7)
        graph.replay()
        wanted = copied(fresh)
        assert_same(tuple(flat(result)), tuple(flat(call(name)(*wanted))))
        assert_same(captured, wanted)


def spread(x: Tensor) -> Tensor:
    """The same values, no dimension contiguous."""
    wide = torch.full([2 * n for n in x.shape], float("nan") if x.is_floating_point() else 7)
    wide = wide.to(x.device, x.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def shifted(x: Tensor) -> Tensor:
    """The same values one element past an aligned address."""
    room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [spread, shifted])
def test_strided_and_misaligned_inputs(
    device: str, name: str, layout: Callable[[Tensor], Tensor]
) -> None:
    plain = arguments(name, device)
    # The state alone is changed in place and has its own rule, tested below.
    state = STATE_AT.get(name)
    given = tuple(
        layout(x) if isinstance(x, Tensor) and (i != state or layout is shifted) else x
        for i, x in enumerate(copied(plain))
    )
    assert_same(tuple(flat(call(name)(*given))), tuple(flat(call(name)(*plain))))
    assert_same(given, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [name for name in STATE_AT if not name.startswith(("selective", "ssd"))]
)
def test_state_rows_may_be_apart(device: str, name: str) -> None:
    plain, index = arguments(name, device), STATE_AT[name]
    state = plain[index]
    room = torch.full((*state.shape[:-1], state.shape[-1] + 3), 9.0, device=device)
    room[..., : state.shape[-1]] = state
    given = list(copied(plain))
    given[index] = room[..., : state.shape[-1]]
    assert_same(tuple(flat(call(name)(*given))), tuple(flat(call(name)(*plain))))
    assert_same(tuple(given), plain)
    assert (room[..., state.shape[-1] :] == 9.0).all(), "nothing beside the rows is written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_linear_scan(device: str, shape: tuple[int, ...]) -> None:
    a, b = (torch.ones(shape, device=device, requires_grad=True) for _ in range(2))
    h0 = torch.ones(shape[0], shape[2], device=device, requires_grad=True)
    h = ops.linear_scan(a, b, h0)
    assert h.shape == shape
    h.sum().backward()
    assert a.grad is not None and a.grad.shape == shape
    # No step: the output does not depend on h0.
    assert h0.grad is not None and not h0.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", list(CELLS))
def test_empty_packed_batches(device: str, cell: str) -> None:
    gates = CELLS[cell]
    scan, step = getattr(ops, f"{cell}_scan"), getattr(ops, f"{cell}_step")
    train = getattr(ops, f"{cell}_scan_train")
    state, none = torch.ones(3, 5, device=device), int32(device=device)
    before = state.clone()
    # No sequences: every token is padding.
    h = scan(torch.ones(4, 5 * gates, device=device), int32(0, device=device), state, none)
    assert h.shape == (4, 5) and not h.any()
    # Sequences without tokens.
    empty = torch.ones(0, 5 * gates, device=device)
    edges, slots = int32(0, 0, 0, device=device), int32(0, 2, device=device)
    assert scan(empty, edges, state, slots).shape == (0, 5)
    assert step(empty, state, none).shape == (0, 5)
    same_bits(state, before)
    h0 = exact(2, 5, seed=1).float().to(device).requires_grad_()
    h, last = train(empty, edges, h0)
    same_bits(last, h0.detach())
    last.sum().backward()
    assert h.shape == (0, 5) and h0.grad is not None and (h0.grad == 1).all()
    # No channels.
    assert scan(
        torch.ones(4, 0, device=device), int32(0, 4, device=device),
        torch.ones(3, 0, device=device), int32(1, device=device),
    ).shape == (4, 0)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_empty_convolutions(device: str) -> None:
    weight, state = torch.ones(5, 4, device=device), torch.ones(3, 3, 5, device=device)
    before, none = state.clone(), int32(device=device)
    y = ops.conv_scan(torch.ones(4, 5, device=device), weight, None, none.new_zeros(1), state, none)
    assert y.shape == (4, 5) and not y.any()
    empty = torch.ones(0, 5, device=device)
    edges, slots = int32(0, 0, 0, device=device), int32(0, 2, device=device)
    assert ops.conv_scan(empty, weight, None, edges, state, slots).shape == (0, 5)
    assert ops.conv_step(empty, weight, None, state, none).shape == (0, 5)
    same_bits(state, before)
