"""The limits of a model on a device, measured in the run that uses them.

- Read bandwidth: the best of several kernels that read a large buffer and write next to nothing. A
  decode step reads its weights, so a copy, which writes as much as it reads, is no limit for it.
- The bare GEMM sequence: every matrix product of the model for so many rows, with the model's own
  weights and nothing between, as fast as the libraries under torch compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.language_model import LanguageModel
from loadtest.lm_models import head_matrix, layer_matrices
from loadtest.timing import (
    Call,
    graph_seconds_per_call,
    last_level_cache,
    release_memory,
    seconds_per_call,
)

Linear = Callable[[Tensor], Tensor]


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of the quickest kernel that only reads, from memory."""
    # Float32 numbers, on a CPU eight times the bytes of one of its caches: there may be several.
    count = 2**28 if device.type == "cuda" else _whole_rows(2 * last_level_cache())
    # What a GPU reads costs it power as weights do; a CPU has no quick way to make so many.
    make = torch.randn if device.type == "cuda" else torch.ones
    buffers = [make(count, device=device) for _ in range(2)]
    vector = torch.randn(2**12, device=device)
    readers: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.amax,
        lambda buffer: torch.dot(buffer, buffer),
        lambda buffer: torch.mv(buffer.view(-1, len(vector)), vector),
        lambda buffer: buffer.view(-1, 2**14).sum(1),
        lambda buffer: buffer.view(2**11, -1).sum(1),
    )
    best = min(
        _seconds([partial(reader, buffer) for buffer in buffers], device) for reader in readers
    )
    del buffers
    release_memory(device)
    return 4 * count / best


def _whole_rows(count: int) -> int:
    return max(1, count // 2**14) * 2**14


def gemm_sequence(
    model: LanguageModel, rows: int, head_rows: int, device: torch.device, seconds: float = 0.15
) -> float:
    """Return the seconds of all matrix products of `model` for `rows` tokens.

    The head is computed for `head_rows` of them: for all in a decode step, for one in a prompt. On
    a GPU the sequence is repeated for about `seconds`, as long as the figures that it is compared
    with, because a busy GPU soon reaches its power limit and slows down.
    """
    dtype = model.embedding.weight.dtype
    matrices = layer_matrices(model)
    inputs = {
        width: torch.randn(rows, width, device=device, dtype=dtype)
        for width in {matrix.shape[1] for matrix in matrices}
    }
    last = torch.randn(head_rows, model.config.d_model, device=device, dtype=dtype)
    sequences = [[*(_plain(matrix) for matrix in matrices), _head(model)]]
    if device.type == "cpu" and dtype == torch.bfloat16 and packs_bf16():
        packed = [_packed(matrix, rows) for matrix in matrices]
        sequences.append([*packed, _packed(head_matrix(model), head_rows)])
    operands = [*(inputs[matrix.shape[1]] for matrix in matrices), last]
    return min(
        _seconds([partial(_run, linears, operands)], device, seconds) for linears in sequences
    )


def _run(linears: list[Linear], operands: list[Tensor]) -> Tensor:
    """Compute every product; return the result of the last one."""
    for linear, operand in zip(linears, operands, strict=True):
        result = linear(operand)
    return result


def _plain(matrix: Tensor) -> Linear:
    return lambda x: functional.linear(x, matrix)


def _head(model: LanguageModel) -> Linear:
    matrix = head_matrix(model)
    if matrix.is_cuda and matrix.dtype != torch.float32:  # logits are fp32, whatever the weights
        return lambda x: torch.mm(x, matrix.t(), out_dtype=torch.float32)
    return _plain(matrix)


def packs_bf16() -> bool:
    """Whether oneDNN accepts packed bf16 weights on this processor."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(matrix: Tensor, rows: int) -> Linear:
    """Return the product with weights in the blocked order that oneDNN prefers for `rows` rows.

    torch's compiler does the same with weights that it may treat as constants.
    """
    reordered = torch.ops.mkldnn._reorder_linear_weight(matrix.detach(), rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


def _seconds(calls: list[Call], device: torch.device, seconds: float | None = None) -> float:
    if device.type == "cuda":
        repeat, budget = (10, 0.5) if seconds is None else (1000, seconds)
        return graph_seconds_per_call(calls, device, repeat=repeat, budget=budget).seconds
    once = seconds_per_call(calls, device, repeat=1, warm=1)
    repeat = max(2, min(20, int(0.5 / once)))
    return min(once, seconds_per_call(calls, device, repeat=repeat, warm=0))
