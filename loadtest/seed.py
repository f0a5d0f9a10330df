"""One minGRU layer with its projection, 512 -> 768 -> 512, forward over one long sequence.

Uses the serving operator. cuRNN (https://github.com/dhruvmsheth/cuRNN) published this layer's times
on an RTX 4090 and, in PyTorch, on an i9-12900K. The limit is measured in the same run: the two
matrix products alone, and the scan's ideal bytes (gates read once, h written once) at the rate of a
copy. `python -m loadtest.layers` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.models.minrnn.cell import Cell
from engine.models.minrnn.config import MinRnnConfig
from loadtest.layers_timing import Budget, step_seconds
from loadtest.measuring import PRECISIONS, Figures, Precision, in_force, reported
from loadtest.report import print_table
from loadtest.timing import copy_bandwidth

# tokens -> published milliseconds of the seed benchmark's layer.
CURNN_RTX_4090 = {65536: 5330, 524288: 56150}
PYTORCH_I9_12900K = {65536: 10989, 524288: 90705}


@dataclass(frozen=True)
class SeedSizes:
    """Widths around and inside the layer, the sequence's lengths, bytes of the copy."""

    outer: int
    inner: int
    tokens: tuple[int, ...]
    copy_bytes: int


GPU = SeedSizes(512, 768, (65536, 524288), 2**30)
CPU = SeedSizes(512, 768, (65536,), 2**28)
QUICK = SeedSizes(32, 48, (256,), 2**16)


def measure_seed(
    sizes: SeedSizes, tokens: int, precision: Precision, ceiling: float, device: torch.device
) -> Figures:
    """Return the seconds of the seed layer, and of its matrix products and bytes alone.

    `ceiling` is the copy rate in bytes per second. Raises RuntimeError if the layer cannot run or
    its output is not finite.
    """
    torch.manual_seed(0)
    config = MinRnnConfig(
        cell="mingru",
        vocab_size=1,
        d_model=sizes.outer,
        n_layers=1,
        expansion=sizes.inner / sizes.outer,
    )
    layer = Cell(config).to(device, precision.dtype)
    x = torch.randn(tokens, sizes.outer, device=device, dtype=precision.dtype)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    state = torch.zeros(1, config.inner, device=device)
    assert isinstance(layer.out, nn.Linear)
    to_gates, to_output = layer.gates.weight.t(), layer.out.weight.t()

    with torch.inference_mode(), in_force(precision):
        if not bool(layer.scan(x, state, cu_seqlens, slots).isfinite().all()):
            raise RuntimeError("the output is not finite")
        seconds = step_seconds(lambda: layer.scan(x, state, cu_seqlens, slots), device)
        hidden = torch.randn(tokens, config.inner, device=device, dtype=precision.dtype)

        def products() -> None:
            torch.matmul(x, to_gates)
            torch.matmul(hidden, to_output)

        products()
        gemm_seconds = step_seconds(products, device)
    scan_bytes = (layer.operators.gates + 1) * tokens * config.inner * precision.dtype.itemsize
    copy_seconds = scan_bytes / ceiling
    return {
        "seconds": seconds,
        "gemm_seconds": gemm_seconds,
        "copy_seconds": copy_seconds,
        "over_limit": seconds / (gemm_seconds + copy_seconds),
    }


def seed_row(figures: Figures) -> list[str]:
    """Return a row of the seed benchmark's table."""
    tokens = figures["tokens"]
    head = [f"{tokens:,}", figures["precision"]]
    published = [
        f"{table[tokens]:,}" if tokens in table else "-"
        for table in (CURNN_RTX_4090, PYTORCH_I9_12900K)
    ]
    if "seconds" not in figures:
        return [*head, figures.get("failed") or figures["skipped"], *["-"] * 4, *published]
    parts = (figures["seconds"], figures["gemm_seconds"], figures["copy_seconds"])
    limit = figures["gemm_seconds"] + figures["copy_seconds"]
    times = [f"{seconds * 1e3:,.3f}" for seconds in (*parts, limit)]
    return [*head, *times, f"{figures['over_limit']:.2f}x", *published]


def run_seed(
    sizes: SeedSizes, names: list[str], device: torch.device, budget: Budget
) -> list[Figures]:
    """Measure and print the seed benchmark; the first entry of the result is the copy rate."""
    ceiling = reported(lambda: {"rate": copy_bandwidth(device, sizes.copy_bytes)}, device)
    rows: list[Figures] = []
    for name in names:
        for tokens in sizes.tokens:

            def measure(name: str = name, tokens: int = tokens) -> Figures:
                if "failed" in ceiling:
                    raise RuntimeError(f"no copy rate: {ceiling['failed']}")
                return measure_seed(sizes, tokens, PRECISIONS[name], ceiling["rate"], device)

            found = (
                {"skipped": "not measured, the time was up"}
                if budget.spent()
                else reported(measure, device)
            )
            rows.append({"tokens": tokens, "precision": name, **found})
    rate = ceiling.get("rate")
    heading = ["T", "dtype", "ours", "GEMMs", "scan's bytes", "limit", "ours / limit"]
    print_table(
        f"minGRU layer {sizes.outer} -> {sizes.inner} -> {sizes.outer}, forward, "
        f"one sequence; ms (copy ceiling {'-' if rate is None else f'{rate / 1e9:,.0f} GB/s'})",
        [*heading, "cuRNN, RTX 4090", "PyTorch, i9-12900K"],
        [seed_row(figures) for figures in rows],
    )
    return [{"copy_bytes_per_second": rate}, *rows]
