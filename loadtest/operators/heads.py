"""The head of a greedy decode step: logits of a batch, and each row's best token.

On Hopper a kernel does this without logits in memory. Beside it stands a product that writes them,
followed by a draw or by PyTorch's argmax. The ideal bytes are the weights and the hidden states,
read once. With many rows arithmetic is the limit, so the rate of the products is shown as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.ops import library, sampling
from engine.ops.gemm import ids_of, linear_best
from loadtest.operators.draws import arguments
from loadtest.operators.limits import Limits
from loadtest.operators.rows import Row, reported
from loadtest.timing import graph_seconds_per_call, rotation

VOCABULARY = 32_000
GREEDY = (0.0, 0, 1.0)
_OF_LOGITS = slice(7, 12)  # of sample_'s arguments, those that sample_best_ does not take


def supported(device: torch.device) -> bool:
    """Whether there are kernels for it on this device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and "90a" in library.cuda_archs()
    )


def measure_heads(shapes: tuple[tuple[int, int], ...], limits: Limits) -> list[Row]:
    """Return one row per shape [rows, width], without a bar.

    The error is the share of rows whose token is not the best of the product's logits, where sums
    may be in another order.
    """
    rows = []
    for count, width in shapes if supported(limits.device) else ():
        size = 2 * width * (VOCABULARY + count)
        rows.append(Row("heads", "greedy", f"{count}x{width}", "bfloat16", size))
        with reported(rows[-1], limits.device):
            _fill(rows[-1], count, width, limits)
    return rows


def _fill(row: Row, count: int, width: int, limits: Limits) -> None:
    device = limits.device
    row.copy_seconds = limits.copy_seconds(row.bytes, 16)
    x = torch.randn(count, width, device=device).bfloat16()
    weights = [
        torch.randn(VOCABULARY, width, device=device).mul_(width**-0.5).bfloat16()
        for _ in range(rotation(row.bytes, device, most=8))
    ]
    drawn = arguments(torch.empty(count, VOCABULARY, device=device), *GREEDY)

    def with_logits(weight: Tensor) -> None:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        sampling.sample_(logits, *drawn[1:])

    def with_argmax(weight: Tensor) -> Tensor:
        return torch.mm(x, weight.t(), out_dtype=torch.float32).argmax(1)

    def of_bests(weight: Tensor) -> None:
        rest = [*drawn[1 : _OF_LOGITS.start], *drawn[_OF_LOGITS.stop :]]
        sampling.sample_best_(linear_best(x, None, 0.0, weight, None, VOCABULARY), *rest)

    best = ids_of(linear_best(x, None, 0.0, weights[0], None, VOCABULARY))
    row.error = float((best != with_argmax(weights[0])).double().mean())
    launches = max(16, len(weights))
    calls = [partial(of_bests, weight) for weight in weights]
    row.timing = graph_seconds_per_call(calls, device, launches=launches, repeat=10)
    peers: dict[str, Callable[[Tensor], object]] = {
        "product and draw": with_logits,
        "torch": with_argmax,
    }
    for name, peer in peers.items():
        others = [partial(peer, weight) for weight in weights]
        timing = graph_seconds_per_call(others, device, launches=launches, repeat=10)
        row.times[name] = timing.seconds / row.timing.seconds
    row.note = f"{2e-12 * count * width * VOCABULARY / row.timing.seconds:,.0f} TFLOP/s"
