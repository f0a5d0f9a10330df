"""Other ways to compute h_t = a_t h_{t-1} + b_t, and other ways to run the whole gated scan.

Linear recurrences, for [batch, time, channels] tensors on one device:

- `torch.add`: no recurrence at all, only the same traffic; the practical ceiling.
- Heinsen's log-space scan (arXiv 2311.06281), as minGRU-pytorch computes it: positive a and b only.
- torch's `associative_scan`, compiled anew for each shape (CUDA).
- flash-linear-attention's `chunk_hgrn`, where the package is installed (CUDA).
- accelerated-scan's CUDA and Triton kernels, where installed (CUDA); time contiguous.

Each gets its inputs in the form and layout that it wants, made outside the timing. For the CPU's
fused scans: the gates by torch operators and then the log-space scan, or a loop of steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Scan = Callable[[Tensor, Tensor], Tensor]
Shape = tuple[int, int, int]  # batch, time, channels

# Beyond it a log-space scan takes seconds and associative_scan's compilation minutes.
LONGEST = 65536


def _as_given(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def _same(h: Tensor) -> Tensor:
    return h


def _never(shape: Shape) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """A scan of another project.

    `make` builds it (ImportError if it is not installed), `prepare` turns a and b into its inputs,
    `finish` turns its result into [batch, time, channels], and `refuses` says why a shape is not
    tried.
    """

    name: str
    make: Callable[[], Scan]
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _as_given
    finish: Callable[[Tensor], Tensor] = _same
    refuses: Callable[[Shape], str | None] = _never
    recurrence: bool = True  # False: the result is not the scan's, and no error is taken
    cuda_only: bool = True


def heinsen(a: Tensor, b: Tensor) -> Tensor:
    """Return the log-space scan, with the logarithms of its inputs."""
    a_star = a.log().cumsum(dim=1)
    return (a_star + (b.log() - a_star).logcumsumexp(dim=1)).exp()


def _associative_scan() -> Scan:
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def scan(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = associative_scan(combine, (a, b), dim=1, combine_mode="pointwise")[1]
        return result

    # A second shape in the same cache would be compiled with dynamic sizes, which it refuses.
    torch._dynamo.reset()
    compiled: Scan = torch.compile(scan, dynamic=False, fullgraph=True)
    return compiled


def _chunk_hgrn() -> Scan:
    kernel: Any = importlib.import_module("fla.ops.hgrn").chunk_hgrn

    def scan(log_a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = kernel(b, log_a)[0]
        return result

    return scan


def _accelerated(module: str) -> Callable[[], Scan]:
    def make() -> Scan:
        scan: Scan = importlib.import_module(f"accelerated_scan.{module}").scan
        return scan

    return make


def _log_first(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.log(), b


def _time_contiguous(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()


def _transposed(h: Tensor) -> Tensor:
    return h.transpose(1, 2)


def _too_long(shape: Shape) -> str | None:
    return f"skipped: over {LONGEST:,} tokens" if shape[1] > LONGEST else None


def _power_of_two(shape: Shape) -> str | None:
    if shape[1] & (shape[1] - 1) or shape[1] < 32:
        return "skipped: only lengths that are powers of two from 32"
    return _too_long(shape)


PEERS = [
    Peer("torch.add", lambda: torch.add, recurrence=False, cuda_only=False),
    Peer("Heinsen log-space", lambda: heinsen, refuses=_too_long, cuda_only=False),
    Peer("torch associative_scan", _associative_scan, refuses=_too_long),
    Peer("fla chunk_hgrn", _chunk_hgrn, prepare=_log_first),
    Peer(
        "accelerated-scan warp",
        _accelerated("warp"),
        prepare=_time_contiguous,
        finish=_transposed,
        refuses=_power_of_two,
    ),
    Peer(
        "accelerated-scan triton",
        _accelerated("triton"),
        prepare=_time_contiguous,
        finish=_transposed,
        refuses=_power_of_two,
    ),
]


def available(device: torch.device) -> list[Peer]:
    """Return the peers that `device` could run, installed or not."""
    return [peer for peer in PEERS if device.type == "cuda" or not peer.cuda_only]


Coefficients = Callable[[Tensor], tuple[Tensor, Tensor]]


def fused_log_space(pre: Tensor, coefficients: Coefficients) -> Tensor:
    """Run a gated layer in log space, float32: [batch, time, gates * channels] -> h."""
    return heinsen(*coefficients(pre.float())).to(pre.dtype)


def fused_loop(pre: Tensor, coefficients: Coefficients) -> Tensor:
    """Run a gated layer as a loop of steps with a float32 state; gates are computed at once."""
    a, b = coefficients(pre.float())
    h = torch.empty(pre.shape[0], pre.shape[1], a.shape[2], dtype=pre.dtype, device=pre.device)
    state = torch.zeros_like(a[:, 0])
    for t in range(pre.shape[1]):
        state = torch.addcmul(b[:, t], a[:, t], state)
        h[:, t] = state
    return h
