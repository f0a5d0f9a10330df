"""The operators of `engine.ops` against the memory limit.

    python -m loadtest.kernels                                     # on a GPU if there is one
    python -m loadtest.kernels --device cpu --quick
    python -m loadtest.kernels --cases fused steps --dtype bfloat16 --shapes 1x65536x768 16x768
    python -m loadtest.kernels --cases draws --shapes 1024x32000   # rows x vocabulary
    python -m loadtest.kernels --cases heads --shapes 1024x768     # rows x width; Hopper only
    python -m loadtest.kernels --cases selective --shapes 1x16384x4096 64x4096
    python -m loadtest.kernels --cases gated_rnn --shapes 64x512x1024 64x1024
    python -m loadtest.kernels --cases sru                         # beside the sru package and LSTM
    python -m loadtest.kernels --json kernels.json --png kernels.png

Each row counts an operator's ideal bytes: every input once, every output once. The limits are
measured in the same run: a large copy (the copy ceiling), and element-wise kernels of the same
bytes (`torch.add`: two reads and a write, `torch.addcmul`: three reads and a write).

Inputs are random and rotate so that caches do not answer. Times are medians, on a GPU of CUDA
graphs of many calls. Outputs are filled with NaN before a last call, and must be finite after it. A
row that cannot run says why and ends nothing else.

The error is against a float64 recurrence from the same inputs, over all tokens of 16 channels: the
relative 2-norm, of everything or of the last 1,024 tokens, whichever is larger. For draws and heads
it is the share of tokens that differ from the reference's.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine import device as machine
from loadtest.extra import exit_without
from loadtest.operators.draws import measure_draws
from loadtest.operators.fused import measure_fused
from loadtest.operators.fused_cpu import measure_fused_cpu
from loadtest.operators.gated_rnn import measure_gated_rnn
from loadtest.operators.heads import measure_heads
from loadtest.operators.limits import Limits
from loadtest.operators.linear import measure_backward, measure_linear
from loadtest.operators.rows import Row, print_rows
from loadtest.operators.selective import measure_selective
from loadtest.operators.shapes import Selection, select
from loadtest.operators.sru import measure_sru
from loadtest.operators.ssd import measure_ssd
from loadtest.operators.steps import measure_steps
from loadtest.operators.versus import measure_peers
from loadtest.report import command_line, environment, print_environment, roofline_png, save_json
from loadtest.timing import (
    keeps_freed_memory,
    last_level_cache,
    release_memory,
    restart_keeping_memory,
)

TITLES = {
    "fused": "serving scans, gates fused (prefill)",
    "linear": "linear_scan forward (element-wise: torch.add)",
    "backward": "backward passes",
    "steps": "decode steps beside a copy of the same bytes",
    "selective": "Mamba's recurrence, beside its bytes and its exponentials",
    "ssd": "Mamba-2's recurrence, beside its bytes",
    "gated_rnn": "layers of GRU and LSTM, beside torch.nn's",
    "sru": "SRU, its recurrence and a layer, beside its bytes and others' layers",
    "draws": "draws, a token for each row of logits",
    "heads": "heads of greedy steps with 32,000 tokens, their draws included",
    "peers": "linear recurrences by others at the same shapes",
}


def _options() -> argparse.ArgumentParser:
    options = command_line("kernels", __doc__)
    options.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N",
    )
    options.add_argument(
        "--cases",
        nargs="+",
        choices=list(TITLES),
        default=list(TITLES),
        help="cases to measure (default: all)",
    )
    options.add_argument(
        "--shapes",
        nargs="+",
        help="shapes: of scans, as in 8x4096x2048, varlen128x8192x2048 or "
        "127x16in2048x1152; of others, as in 16x768",
    )
    options.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        help="types to measure (default: float32 and bfloat16, for steps and Mamba bfloat16)",
    )
    options.add_argument("--quick", action="store_true", help="use smaller shapes on the CPU")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    options.add_argument("--png", type=Path, help="draw the roofline picture to this file")
    return options


def main(argv: list[str] | None = None) -> int:
    options = _options()
    args = options.parse_args(argv)
    if args.png is not None:
        exit_without("matplotlib")
    device = torch.device(args.device)
    try:
        shapes = select(args.shapes, device, args.quick)
    except ValueError as error:
        options.error(str(error))
    if device.type == "cpu" and argv is None:  # a command of its own, not a function in a process
        restart_keeping_memory()
    with torch.no_grad():
        return _measure(args, device, shapes)


def _measure(args: argparse.Namespace, device: torch.device, shapes: Selection) -> int:
    """Measure and print what the options name; return the exit code."""
    dtypes = [getattr(torch, name) for name in args.dtype or ["float32", "bfloat16"]]
    step_dtypes = [getattr(torch, name) for name in args.dtype or ["bfloat16"]]
    torch.manual_seed(0)
    gc.freeze()  # what is imported lives for the whole run; each case ends with a collection
    start = time.perf_counter()
    print_environment()
    small = args.quick or args.shapes is not None
    if device.type == "cuda":
        limits = Limits(device, copy_bytes=2**30)
    else:
        kept = keeps_freed_memory()
        limits = Limits(device, copy_bytes=2**26 if small else 2**28)
        print(
            f"last-level cache {last_level_cache() / 2**20:.0f} MiB, {torch.get_num_threads()} "
            "threads; freed memory " + ("stays with the process" if kept else "goes back")
        )
    release_memory(device)
    print(f"copy ceiling {limits.ceiling / 1e9:,.1f} GB/s, read and written bytes")
    measures: dict[str, Callable[[], list[Row]]] = {
        "fused": lambda: (measure_fused if device.type == "cuda" else measure_fused_cpu)(
            shapes.scans, dtypes, limits
        ),
        "linear": lambda: measure_linear(shapes.scans, shapes.time_scans, dtypes, limits),
        "backward": lambda: measure_backward(shapes.scans, dtypes, limits),
        "steps": lambda: measure_steps(shapes.steps, step_dtypes, limits),
        "selective": lambda: measure_selective(
            shapes.selective_scans, shapes.selective_steps, step_dtypes, limits
        ),
        "ssd": lambda: measure_ssd(
            shapes.selective_scans, shapes.selective_steps, step_dtypes, limits
        ),
        "gated_rnn": lambda: measure_gated_rnn(
            shapes.gated_scans, shapes.gated_steps, dtypes, limits
        ),
        "sru": lambda: measure_sru(shapes.gated_scans, shapes.gated_steps, dtypes, limits),
        "draws": lambda: measure_draws(shapes.draws, limits),
        "heads": lambda: measure_heads(shapes.heads, limits),
        "peers": lambda: measure_peers(shapes.scans, dtypes, limits),
    }
    data: dict[str, Any] = {
        "environment": environment(),
        "device": machine.describe(device),
        "copy_bytes_per_second": limits.ceiling,
        "rows": [],
    }
    for case in args.cases:
        rows = measures[case]()
        if rows:
            print_rows(TITLES[case], rows)
        data["rows"] += [row.as_json() for row in rows]
        save_json(args.json, data)  # after every case: what follows may take the process down
    passed, short = (
        sum(row["verdict"] == verdict for row in data["rows"]) for verdict in ("pass", "short")
    )
    failed = sum(row["timing"] is None for row in data["rows"])
    print(
        f"{passed} rows pass their bar, {short} fall short, {failed} without a figure; "
        f"{time.perf_counter() - start:.0f} s"
    )
    if args.png is not None:
        roofline_png(args.png, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
