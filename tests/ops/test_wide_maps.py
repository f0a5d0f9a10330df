"""Linear maps of many tokens against float64: every wide form (csrc/linear/wide_form.h) that some
shape takes, with every epilogue that it has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.ops import linear_map, linear_residual, linear_step
from tests.csrc.choices import Example, build_chooser, examples
from tests.ops.helpers import exact
from tests.ops.test_linear_maps import DTYPES, EPS, close, normed, on_gpu

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """The examples, and each with a few more tokens, which leave another rest of a tile."""
    program: Path | None = build_chooser(tmp_path_factory.mktemp("choice"))
    if program is None:
        pytest.skip("no C++ compiler to ask which shapes take which form")
    found = examples(program)
    assert found
    return [*found, *(each._replace(tokens=each.tokens + 11) for each in found)]


def weights_of(shape: Example, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, scale = shape.gates * shape.channels, shape.inputs**-0.5
    weight = on_gpu(exact(rows, shape.inputs, seed=1, scale=scale), dtype)
    return weight, on_gpu(exact(rows, seed=3), dtype)


def of_gates(shapes: list[Example], *gates: int) -> Iterator[tuple[Example, torch.dtype]]:
    return product([shape for shape in shapes if shape.gates in gates], DTYPES)


def test_maps(shapes: list[Example]) -> None:
    for shape, dtype in of_gates(shapes, 1):
        x, squares = normed(shape.tokens, shape.inputs, dtype)
        weight, bias = weights_of(shape, dtype)
        for with_bias, gelu, logits in (
            (None, False, False),
            (bias, True, False),
            (bias, False, True),
        ):
            got = linear_map.linear_map(x, squares, EPS, weight, with_bias, gelu, logits)
            close(got, linear_map.reference(x, squares, EPS, weight, with_bias, gelu))
            again = linear_map.linear_map(x, squares, EPS, weight, with_bias, gelu, logits)
            assert torch.equal(got, again), shape


def test_residuals(shapes: list[Example]) -> None:
    for shape, dtype in of_gates(shapes, 1):
        y = on_gpu(exact(shape.tokens, shape.inputs, seed=5), dtype)
        weight, bias = weights_of(shape, dtype)
        before = on_gpu(exact(shape.tokens, shape.channels, seed=6), dtype)
        norm = on_gpu(1 + 0.2 * exact(shape.channels, seed=7), dtype)
        x = before.clone()
        scaled, squares = linear_residual.linear_residual_(y, weight, bias, x, norm)
        close(x, linear_residual.reference(y, weight, bias, before))
        expected_scaled, expected_squares = linear_residual.norm_inputs(x, norm)
        assert torch.equal(scaled, expected_scaled), shape
        torch.testing.assert_close(squares, expected_squares, rtol=1e-5, atol=1e-5)
        alone = before.clone()
        linear_residual.linear_residual_(y, weight, bias, alone, None)
        assert torch.equal(alone, x), shape


def test_steps(shapes: list[Example]) -> None:
    for shape, dtype in of_gates(shapes, 2, 3):
        x, squares = normed(shape.tokens, shape.inputs, dtype)
        weight, bias = weights_of(shape, dtype)
        rows = shape.tokens + 5
        pool = exact(rows, shape.channels, seed=4).to("cuda", torch.float32)
        slots = torch.randperm(rows)[: shape.tokens].to("cuda", torch.int32)
        slots[shape.tokens // 2] = -1
        for options in ((False, True), (True, shape.gates == 2)):
            state = pool.clone()
            h = linear_step.linear_step(x, squares, EPS, weight, bias, state, slots, *options)
            expected, after = linear_step.reference(
                x, squares, EPS, weight, bias, pool, slots, *options
            )
            # Pre-activations are rounded before the gates.
            torch.testing.assert_close(h.double(), expected, rtol=0.03, atol=0.03)
            torch.testing.assert_close(state.double(), after, rtol=0.03, atol=0.03)
            named = torch.zeros(rows, dtype=torch.bool)
            named[slots[slots >= 0].long().cpu()] = True
            assert torch.equal(state[~named], pool[~named]), shape
            assert not h[slots < 0].any(), shape


def test_replays_are_the_eager_chain(shapes: list[Example]) -> None:
    """Kernels that start before the one ahead of them has ended, in a graph."""
    for shape in {each.form: each for each in shapes if each.gates == 1}.values():
        weight, _ = weights_of(shape, torch.bfloat16)
        down = on_gpu(exact(shape.inputs, shape.channels, seed=2, scale=0.02), torch.bfloat16)
        start = on_gpu(exact(shape.tokens, shape.inputs, seed=3), torch.bfloat16)
        if shape.inputs % linear_map.SQUARE_ROWS:
            continue

        x = start.clone()
        norm = torch.ones(shape.inputs, device="cuda", dtype=torch.bfloat16)

        def chain(x: Tensor, norm: Tensor, weight: Tensor, down: Tensor) -> Tensor:
            scaled, squares = linear_residual.norm_inputs(x, norm)
            for _ in range(3):
                y = linear_map.linear_map(scaled, squares, EPS, weight, gelu=True)
                scaled, squares = linear_residual.linear_residual_(y, down, None, x, norm)
            return scaled

        expected = chain(x, norm, weight, down).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = chain(x, norm, weight, down)
        for _ in range(5):
            x.copy_(start)
            replayed.zero_()
            graph.replay()
            assert torch.equal(replayed, expected), shape
