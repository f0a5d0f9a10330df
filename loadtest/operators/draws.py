"""sample_, which draws a token for each row of logits, by filter, beside PyTorch's operators.

The ideal bytes are the logits, read once. Slots, counters and parameters of the rows, some hundred
bytes each, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.ops import sampling
from loadtest.operators.limits import Limits
from loadtest.operators.rows import Row, reported
from loadtest.timing import graph_seconds_per_call, rotation, seconds_per_call

# temperature, top_k, top_p of each filter
FILTERS = {
    "greedy": (0.0, 0, 1.0),
    "temperature 1": (1.0, 0, 1.0),
    "temperature 0.8, top-p 0.9": (0.8, 0, 0.9),
    "temperature 1, top-k 40": (1.0, 40, 1.0),
    "temperature 0.8, top-k 40, top-p 0.9": (0.8, 40, 0.9),
}
STEPS = 1 << 14  # that a row may take
CHECKED_ROWS = 16
TOKENS, OUT = 1, 6  # of sample_'s arguments


def arguments(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[Tensor]:
    """Return the arguments of `sample_`, for rows with equal parameters."""
    rows, device = len(logits), logits.device

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return [
        logits,
        column(0, torch.int32),
        torch.arange(rows, dtype=torch.int32, device=device),
        column(0, torch.int64),
        column(STEPS, torch.int32),
        column(0, torch.int32),
        torch.zeros(STEPS, rows, dtype=torch.int32, device=device),
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float64),
        column(0.0, torch.float32),
        torch.randint(-(2**62), 2**62, (rows,), device=device),
        torch.full((rows, 1), -1, dtype=torch.int32, device=device),
    ]


def torch_draw(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Sample tokens by PyTorch's operators, which sort each row for top_p."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    ids = None
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.shape[1]), dim=-1)
    weights = logits.softmax(dim=-1)
    if top_p < 1:
        if ids is None:
            weights, ids = weights.sort(dim=-1, descending=True)
        weights = weights.masked_fill(weights.cumsum(dim=-1) - weights >= top_p, 0.0)
    drawn = torch.multinomial(weights, 1)
    return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)


def measure_draws(shapes: tuple[tuple[int, int], ...], limits: Limits) -> list[Row]:
    """Return one row per shape [rows, vocabulary] and filter, without a bar.

    The error is the share of the first rows whose token is not the reference's.
    """
    rows = []
    for count, vocab in shapes:
        for name, asked in FILTERS.items():
            rows.append(Row("draws", name, f"{count}x{vocab}", "float32", 4 * count * vocab))
            with reported(rows[-1], limits.device):
                _fill(rows[-1], (count, vocab), asked, limits)
    return rows


def _fill(
    row: Row, shape: tuple[int, int], asked: tuple[float, int, float], limits: Limits
) -> None:
    device = limits.device
    row.copy_seconds = limits.copy_seconds(row.bytes, 16)
    some = [torch.randn(shape, device=device) for _ in range(rotation(row.bytes, device, most=16))]
    row.error = _share_wrong(arguments(some[0], *asked))

    def call(given: list[Tensor]) -> None:
        sampling.sample_(*given)

    calls: list[Callable[[], object]] = [partial(call, arguments(x, *asked)) for x in some]
    row.timing = graph_seconds_per_call(calls, device, launches=max(16, len(calls)), repeat=10)
    peers = [partial(torch_draw, x, *asked) for x in some]
    row.times["torch"] = seconds_per_call(peers, device, repeat=10, warm=1) / row.timing.seconds


def _share_wrong(given: list[Tensor]) -> float:
    """Return the share of wrong tokens: all rows are sampled, the first ones are compared."""
    parts = [
        tensor[:, :CHECKED_ROWS] if at == OUT else tensor[:CHECKED_ROWS]
        for at, tensor in enumerate(given)
    ]
    wanted = [part.clone() for part in parts]
    sampling.sample_(*given)
    sampling.reference(*wanted)
    return float((parts[TOKENS] != wanted[TOKENS]).double().mean())
