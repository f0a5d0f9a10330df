"""Linear maps of many tokens against float64: every wide form (csrc/gemm/persistent_kernel.cuh)
with every epilogue that it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.gemm import (
    linear_map,
    linear_map_reference,
    linear_residual_,
    linear_residual_reference,
    linear_step,
    linear_step_reference,
    linear_swiglu,
    linear_swiglu_reference,
    norm_inputs,
)
from tests.ops.helpers import CELL_OF, exact
from tests.ops.test_gemm import EPS, close, lower_bound_of, normed, on_gpu
from tests.ops.wide_forms import GATED, SHAPES

pytestmark = pytest.mark.gpu

Shape = tuple[int, int, int, int]
MAPS = [shape for shape in SHAPES if shape[2] == 1]
STEPS = [shape for shape in SHAPES if shape[2] > 1]


def weights_of(shape: Shape) -> tuple[Tensor, Tensor]:
    channels, inputs, gates, _ = shape
    weight = on_gpu(exact(gates * channels, inputs, seed=1, scale=inputs**-0.5))
    return weight, on_gpu(exact(gates * channels, seed=3))


@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_linear_map(shape: Shape) -> None:
    _, inputs, _, tokens = shape
    x, squares = normed(tokens, inputs)
    weight, bias = weights_of(shape)
    for with_bias, gelu, logits in ((None, False, False), (bias, True, False), (bias, False, True)):
        given = x, squares, EPS, weight, with_bias, gelu
        got = linear_map(*given, logits)
        close(got, linear_map_reference(*given))
        assert torch.equal(got, linear_map(*given, logits))


@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_linear_residual(shape: Shape) -> None:
    channels, inputs, _, tokens = shape
    y = on_gpu(exact(tokens, inputs, seed=5))
    weight, bias = weights_of(shape)
    before = on_gpu(exact(tokens, channels, seed=6))
    norm = on_gpu(1 + 0.2 * exact(channels, seed=7))
    x, alone = before.clone(), before.clone()
    scaled, squares = linear_residual_(y, weight, bias, x, norm)
    close(x, linear_residual_reference(y, weight, bias, before))
    expected_scaled, expected_squares = norm_inputs(x, norm)
    assert torch.equal(scaled, expected_scaled)
    torch.testing.assert_close(squares, expected_squares, rtol=1e-5, atol=1e-5)
    linear_residual_(y, weight, bias, alone, None)
    assert torch.equal(alone, x)
    unit = before.clone()
    nothing, beside_x = linear_residual_(y, weight, bias, unit, None, squares=True)
    assert torch.equal(unit, x) and nothing.numel() == 0 and torch.equal(beside_x, squares)
    ahead = on_gpu(exact(channels, seed=8))
    more, alone = before.clone(), before.clone()
    beside = linear_residual_(y, weight, bias, more, norm, ahead=ahead)
    assert torch.equal(beside[0], scaled) and torch.equal(beside[1], squares)
    linear_residual_(y, weight, bias, alone, None, ahead=ahead)
    assert torch.equal(more, x + ahead) and torch.equal(alone, more)
    of_y = exact(-(-inputs // 64), tokens, seed=9).square().to("cuda", torch.float32)
    more = before.clone()
    linear_residual_(y, weight, bias, more, None, y_squares=of_y, eps=0.5)
    close(more, linear_residual_reference(y, weight, bias, before, of_y, 0.5))


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_linear_step(shape: Shape) -> None:
    channels, inputs, gates, tokens = shape
    cell = CELL_OF[gates]
    x, squares = normed(tokens, inputs)
    weight, bias = weights_of(shape)
    rows = tokens + 5
    pool = exact(rows, channels, seed=4).to("cuda", torch.float32)
    slots = torch.randperm(rows)[:tokens].to("cuda", torch.int32)
    slots[tokens // 2] = -1
    named = torch.zeros(rows, dtype=torch.bool, device="cuda")
    named[slots[slots >= 0].long()] = True
    for linear_candidate, normalize_gates in ((False, True), (True, cell == "mingru")):
        options = linear_candidate, normalize_gates
        state = pool.clone()
        h, _ = linear_step(x, squares, EPS, weight, bias, state, slots, cell, *options)
        expected, _, after = linear_step_reference(
            x, squares, EPS, weight, bias, pool, slots, cell, *options
        )
        # Pre-activations, of up to 8 or so, are rounded by 0.016 before the gates.
        torch.testing.assert_close(h.double(), expected, rtol=0.03, atol=0.05)
        torch.testing.assert_close(state.double(), after, rtol=0.03, atol=0.05)
        assert torch.equal(state[~named], pool[~named])
        assert not h[slots < 0].any()


@pytest.mark.parametrize("shape", GATED, ids=str)
def test_step_with_an_output_gate(shape: Shape) -> None:
    channels, inputs, _, tokens = shape
    x, squares = normed(tokens, inputs)
    weight, bias = weights_of(shape)
    bound = lower_bound_of(channels)
    pool = exact(tokens, channels, seed=4).to("cuda", torch.float32)
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda").flip(0)
    slots[tokens // 2] = -1
    state = pool.clone()
    out, sums = linear_step(x, squares, EPS, weight, bias, state, slots, "hgrn", lower_bound=bound)
    expected, _, after = linear_step_reference(
        x, squares, EPS, weight, bias, pool, slots, "hgrn", lower_bound=bound
    )
    torch.testing.assert_close(out.double(), expected, rtol=0.04, atol=0.15)
    torch.testing.assert_close(state.double(), after, rtol=0.03, atol=0.05)
    h = state[slots.clamp(min=0).long()].masked_fill((slots < 0).unsqueeze(1), 0)
    torch.testing.assert_close(sums, norm_inputs(h, bound)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [shape for shape in STEPS if shape[2] == 2], ids=str)
def test_linear_swiglu(shape: Shape) -> None:
    _, inputs, _, tokens = shape
    x, squares = normed(tokens, inputs)
    weight, bias = weights_of(shape)
    got = linear_swiglu(x, squares, EPS, weight, bias)
    expected = linear_swiglu_reference(x, squares, EPS, weight, bias)
    torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=2e-3)


@pytest.mark.parametrize("shape", [shape for shape in MAPS if shape[1] % 64 == 0], ids=str)
def test_replays_are_the_eager_chain(shape: Shape) -> None:
    """Kernels that start before the one ahead of them has ended, in a graph."""
    channels, inputs, _, tokens = shape
    weight, _ = weights_of(shape)
    down = on_gpu(exact(inputs, channels, seed=2, scale=0.02))
    start = on_gpu(exact(tokens, inputs, seed=3))
    norm = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    x = start.clone()

    def chain() -> Tensor:
        scaled, squares = norm_inputs(x, norm)
        for _ in range(3):
            y = linear_map(scaled, squares, EPS, weight, gelu=True)
            scaled, squares = linear_residual_(y, down, None, x, norm)
        return scaled

    expected = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for _ in range(5):
        x.copy_(start)
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, expected)
