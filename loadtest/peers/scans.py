"""Other ways to compute h_t = a_t h_{t-1} + b_t, and other ways to run the whole gated scan.

Linear recurrences, for [batch, time, channels] tensors on one device:

- `torch.add`: no recurrence at all, only the same traffic; the practical ceiling.
- Heinsen's log-space scan (arXiv 2311.06281), as minGRU-pytorch computes it: positive a and b only.
- torch's `associative_scan`, compiled anew for each shape (CUDA).
- flash-linear-attention's `chunk_hgrn`, where the package is installed (CUDA).
- accelerated-scan's CUDA and Triton kernels, where installed (CUDA); time contiguous.
- REFERENCES: the textbook's scans in plain torch, and two Triton kernels beside them.

Each gets its inputs in the form and layout that it wants, made outside the timing. For the CPU's
fused scans: the gates by torch operators and then the log-space scan, or a loop of steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loadtest.peers import linrec
from loadtest.peers.textbook import brent_kung, chunked, heinsen, kogge_stone, sequential
from loadtest.peers.textbook.work import Work

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
    """Another scan.

    `make` builds it (ImportError if it is not installed), `prepare` turns a and b into its inputs,
    `finish` turns its result into [batch, time, channels], and `refuses` says why a shape is not
    tried. `layout` says which dimension of its inputs is contiguous, and `work` counts what it does
    for a number of tokens, where that is known.
    """

    name: str
    make: Callable[[], Scan]
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _as_given
    finish: Callable[[Tensor], Tensor] = _same
    refuses: Callable[[Shape], str | None] = _never
    recurrence: bool = True  # False: the result is not the scan's, and no error is taken
    cuda_only: bool = True
    positive: bool = False  # whether it takes positive a and b only
    layout: str = "channels"
    work: Callable[[int], Work] | None = None


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


def _accelerated_warp() -> Scan:
    scan: Scan = importlib.import_module("accelerated_scan.warp").scan
    return scan


def _accelerated_triton() -> Scan:
    try:  # since 0.3 under this name, and for any length
        scan: Scan = importlib.import_module("accelerated_scan.scalar").scan
    except ModuleNotFoundError as missing:
        if missing.name != "accelerated_scan.scalar":
            raise
        scan = importlib.import_module("accelerated_scan.triton").scan
    return scan


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


ACCELERATED_TRITON = Peer(
    "accelerated-scan triton",
    _accelerated_triton,
    prepare=_time_contiguous,
    finish=_transposed,
    refuses=_too_long,
    layout="time",
)

PEERS = [
    Peer("torch.add", lambda: torch.add, recurrence=False, cuda_only=False),
    Peer("Heinsen log-space", lambda: heinsen.positive, refuses=_too_long, cuda_only=False),
    Peer("torch associative_scan", _associative_scan, refuses=_too_long),
    Peer("fla chunk_hgrn", _chunk_hgrn, prepare=_log_first),
    Peer(
        "accelerated-scan warp",
        _accelerated_warp,
        prepare=_time_contiguous,
        finish=_transposed,
        refuses=_power_of_two,
        layout="time",
    ),
    ACCELERATED_TRITON,
]


def _textbook(name: str, scan: Scan, work: Callable[[int], Work]) -> Peer:
    return Peer(name, lambda: scan, refuses=_too_long, cuda_only=False, work=work)


def _heinsen(name: str, scan: Scan, work: Callable[[int], Work], *, positive: bool) -> Peer:
    """Time contiguous: on a GPU torch's prefix sums are parallel over the last dimension alone."""
    return Peer(
        name,
        lambda: scan,
        prepare=_time_contiguous,
        finish=_transposed,
        refuses=_too_long,
        cuda_only=False,
        positive=positive,
        layout="time",
        work=work,
    )


REFERENCES = [
    _textbook("sequential", sequential.scan, sequential.work),
    _textbook("chunked", chunked.scan, chunked.work),
    _textbook("Kogge-Stone", kogge_stone.scan, kogge_stone.work),
    _textbook("Brent-Kung", brent_kung.scan, brent_kung.work),
    _heinsen(
        "Heinsen, positive",
        partial(heinsen.positive, dim=-1),
        heinsen.positive_work,
        positive=True,
    ),
    _heinsen(
        "Heinsen, complex",
        partial(heinsen.general, dim=-1),
        heinsen.general_work,
        positive=False,
    ),
    ACCELERATED_TRITON,
    Peer(
        "linrec triton",
        linrec.triton_scan,
        prepare=_time_contiguous,
        finish=_transposed,
        refuses=_too_long,
        layout="time",
    ),
]


def available(device: torch.device, peers: list[Peer] | None = None) -> list[Peer]:
    """Return those of `peers` (PEERS) that `device` could run, installed or not."""
    peers = PEERS if peers is None else peers
    return [peer for peer in peers if device.type == "cuda" or not peer.cuda_only]


Coefficients = Callable[[Tensor], tuple[Tensor, Tensor]]


def fused_log_space(pre: Tensor, coefficients: Coefficients) -> Tensor:
    """Run a gated layer in log space, float32: [batch, time, gates * channels] -> h."""
    return heinsen.positive(*coefficients(pre.float())).to(pre.dtype)


def fused_loop(pre: Tensor, coefficients: Coefficients) -> Tensor:
    """Run a gated layer as a loop of steps with a float32 state; gates are computed at once."""
    a, b = coefficients(pre.float())
    h = torch.empty(pre.shape[0], pre.shape[1], a.shape[2], dtype=pre.dtype, device=pre.device)
    state = torch.zeros_like(a[:, 0])
    for t in range(pre.shape[1]):
        state = torch.addcmul(b[:, t], a[:, t], state)
        h[:, t] = state
    return h
