"""product_ by every algorithm that the library names, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.cublaslt import product_, product_algorithms, reference
from tests.ops.helpers import exact

pytestmark = pytest.mark.gpu


def tensors(tokens: int, rows: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = exact(tokens, inputs, seed=1).to("cuda", dtype)
    return x, (exact(rows, inputs, seed=2) / inputs**0.5).to("cuda", dtype)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 8), (300, 768, 1152), (1024, 264, 72)], ids=str)
def test_every_algorithm(
    shape: tuple[int, int, int], dtype: torch.dtype, single: bool, add: bool
) -> None:
    tokens, rows, _ = shape
    x, weight = tensors(*shape, dtype)
    before = exact(tokens, rows, seed=3).to("cuda", torch.float32 if single else dtype)
    expected = reference(before, x, weight, add=add)
    algorithms = product_algorithms(x, weight, before)
    assert algorithms.dtype == torch.int64 and algorithms.shape[1] == 8 and len(algorithms) > 0
    assert algorithms.device.type == "cpu"
    tolerance = 1e-4 if single else 2.0**-7
    for algorithm in algorithms:
        out = before.clone()
        product_(out, x, weight, algorithm, add=add)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_graph_of_it_replays() -> None:
    x, weight = tensors(64, 128, 256, torch.bfloat16)
    out = torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16)
    algorithm = product_algorithms(x, weight, out)[0]
    product_(out, x, weight, algorithm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product_(out, x, weight, algorithm)
    x *= 2
    graph.replay()
    close = {"rtol": 2.0**-7, "atol": 2.0**-7}
    torch.testing.assert_close(out.double(), reference(out, x, weight), **close)


def test_no_tokens() -> None:
    x, weight = tensors(0, 16, 8, torch.bfloat16)
    out = torch.zeros(0, 16, device="cuda", dtype=torch.bfloat16)
    assert product_algorithms(x, weight, out).shape == (0, 8)
    product_(out, x, weight, torch.zeros(8, dtype=torch.int64))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = tensors(16, 32, 64, torch.bfloat16)
    out = torch.zeros(16, 32, device="cuda", dtype=torch.bfloat16)
    algorithm = product_algorithms(x, weight, out)[0]
    for bad, message in (
        ((out, x.float(), weight), "x must be bfloat16"),
        ((out, x[:, :56], weight), "weight must be"),
        ((out, x, weight.half()), "weight must be bfloat16"),
        ((out[:8], x, weight), "out must be"),
        ((out.double(), x, weight), "out must be"),
        ((out.t().contiguous().t(), x, weight), "out must be contiguous"),
        ((out[:, :30].contiguous(), x, weight[:30]), "multiples of 16"),
        ((out, torch.ones(1025, device="cuda", dtype=x.dtype)[1:].view(16, 64), weight), "x must"),
        ((out[:, :0], x, weight[:0]), "weight must not be empty"),
    ):
        for call in (product_algorithms, lambda *args: product_(*args, algorithm)):
            arguments = (bad[1], bad[2], bad[0]) if call is product_algorithms else bad
            with pytest.raises(RuntimeError, match=message):
                call(*arguments)
    for wrong in (algorithm[:4], algorithm.cuda(), algorithm.double()):
        with pytest.raises(RuntimeError, match="algorithm must be a row of product_algorithms"):
            product_(out, x, weight, wrong)
    square = weight[:, :32].contiguous()
    for shared in (out, x[:, :32].contiguous()):
        with pytest.raises(RuntimeError, match="out must not share memory"):
            product_(shared, shared, square, algorithm)
    with pytest.raises(RuntimeError, match="cuBLASLt"):
        product_(out, x, weight, torch.zeros(8, dtype=torch.int64))
    with pytest.raises(NotImplementedError):
        product_(out.cpu(), x.cpu(), weight.cpu(), algorithm)
    assert not out.any()
