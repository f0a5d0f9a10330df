"""Whole layers: a training step against cuDNN, and one long sequence against its limit.

    python -m loadtest.layers
    python -m loadtest.layers --quick --device cpu
    python -m loadtest.layers --budget-seconds 60 --json layers.json

A training step is forward and backward: gradients of the input and of every weight, from one fixed
random gradient of the output. Measured are one minGRU and one minLSTM layer as minserve trains
them (gate projection and differentiable scan), `nn.GRU` and `nn.LSTM` of the same width, bias and
precision, and the same minGRU with the scan in log space in plain PyTorch, the formulation of "Were
RNNs All We Needed?" (arXiv 2410.01201, appendix B). Peak memory is what one step allocates above
the weights, the input and the gradient of the output.

The paper's figures stand beside these. Its minGRU and minLSTM train 175 and 235 times faster per
step than its GRU and LSTM at 512 tokens, and 1,324 and 1,361 times at 4,096, for about 88 % more
memory, with a batch of 64 on a T4, a GPU of 2018. The ratios here are to today's cuDNN layers on
the device of the run, a much stronger opponent. cuDNN's layers get their input as [time, batch,
width] in memory, which they take without a copy.

On a GPU torch's layers are measured through cuDNN only: what torch runs token by token instead
takes seconds a step. Where torch keeps bfloat16 from cuDNN, the row says so, and cuDNN's float16
layer, which has as many bytes, takes its place.

The long sequence is `loadtest.seed`. It takes a few seconds and comes first; then come minserve's
layers, torch's, the same in TF32, and the log-space scan, so that a run cut short by
--budget-seconds has what matters most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest import seed
from loadtest.layers_step import (
    LOG_SPACE,
    OURS,
    PEERS,
    Layer,
    Sizes,
    measure_training,
    runs_on_cudnn,
)
from loadtest.layers_timing import Budget
from loadtest.measuring import PRECISIONS, Figures, reported
from loadtest.report import command_line, print_environment, print_table, save_json

# (layer, tokens) -> speed-up of a training step, and the memory's growth, in arXiv 2410.01201.
PAPER_SPEEDUP = {
    ("minGRU", 512): 175,
    ("minLSTM", 512): 235,
    ("minGRU", 4096): 1324,
    ("minLSTM", 4096): 1361,
}
PAPER_MEMORY = 0.88

GPU = Sizes(1024, 64, (512, 4096))
CPU = Sizes(256, 8, (512,))
QUICK = Sizes(32, 2, (16,))


@dataclass(frozen=True)
class Job:
    """One row to measure.

    `beside` is the precision of our rows that a peer is compared with; `skipped` says why the row
    is not measured.
    """

    layer: Layer
    name: str
    length: int
    precision: str
    beside: str
    skipped: str | None = None


def peer_jobs(layer: Layer, length: int, name: str, device: torch.device) -> list[Job]:
    """Return torch's layer beside ours of precision `name`; on a GPU only through cuDNN."""
    without, through = f"{layer.name} (without cuDNN)", f"{layer.name} (cuDNN)"
    if device.type != "cuda":
        return [Job(layer, without, length, name, name)]
    if runs_on_cudnn(PRECISIONS[name], device):
        return [Job(layer, through, length, name, name)]
    jobs = [Job(layer, without, length, name, name, "not through cuDNN in torch, not measured")]
    if name == "bfloat16" and runs_on_cudnn(PRECISIONS["float16"], device):
        jobs.append(Job(layer, through, length, "float16", name))
    return jobs


def plan(sizes: Sizes, names: list[str], device: torch.device) -> list[Job]:
    """Return all rows, the important ones first and, among those, the quick ones first."""
    jobs = []
    for group in ([n for n in names if n != "tf32"], [n for n in names if n == "tf32"]):
        each = [(length, name) for length in sizes.lengths for name in group]
        jobs += [Job(layer, layer.name, *at, at[1]) for at in each for layer in OURS]
        jobs += [job for at in each for layer in PEERS for job in peer_jobs(layer, *at, device)]
    return jobs + [
        Job(LOG_SPACE, LOG_SPACE.name, length, name, name)
        for length in sizes.lengths
        for name in names
    ]


def compare(rows: list[Figures]) -> None:
    """Add to each minimal layer its ratios to torch's layer beside it, if both were measured.

    "over" names the peer of the ratios.
    """
    measured = [row for row in rows if "seconds" in row]
    peers = {(row["family"], row["length"], row["beside"]): row for row in measured if row["peer"]}
    for row in measured:
        peer = peers.get((row["family"], row["length"], row["beside"]))
        if row["peer"] or peer is None:
            continue
        row["over"] = f"{peer['layer']} {peer['precision']}"
        row["speedup"] = peer["seconds"] / row["seconds"]
        if row["peak_bytes"] is not None:
            row["memory_growth"] = row["peak_bytes"] / peer["peak_bytes"] - 1


def training_row(figures: Figures) -> list[str]:
    """Return a row of the training table, with "-" for missing figures and reasons of failures."""
    head = [figures["layer"], f"{figures['length']:,}", figures["precision"]]
    if "seconds" not in figures:
        return [*head, "-", "-", figures.get("failed") or figures["skipped"], *["-"] * 4]
    peak = figures["peak_bytes"]
    minimal = figures["layer"].removesuffix(" log-space")
    paper = PAPER_SPEEDUP.get((minimal, figures["length"]))
    growth = figures.get("memory_growth")
    return [
        *head,
        f"{figures['seconds'] * 1e3:,.3f}",
        "-" if peak is None else f"{peak / 2**20:,.0f}",
        figures.get("over", "-"),
        f"{figures['speedup']:,.1f}x" if "speedup" in figures else "-",
        "-" if paper is None else f"{paper:,}x",
        "-" if growth is None else f"{growth:+.0%}",
        "-" if growth is None or paper is None else f"{PAPER_MEMORY:+.0%}",
    ]


def measure_job(
    job: Job, sizes: Sizes, bias: bool, device: torch.device, budget: Budget
) -> Figures:
    """Return the row of one job: its figures, or why it has none."""
    if job.skipped is not None:
        found: Figures = {"skipped": job.skipped}
    elif budget.spent():
        found = {"skipped": "not measured, the time was up"}
    else:
        precision = PRECISIONS[job.precision]
        found = reported(
            lambda: measure_training(job.layer, sizes, job.length, bias, precision, device), device
        )
    return {
        "layer": job.name,
        "family": job.layer.family,
        "peer": job.layer in PEERS,
        "length": job.length,
        "precision": job.precision,
        "beside": job.beside,
        **found,
    }


def run_training(
    sizes: Sizes,
    bias: bool,
    names: list[str],
    device: torch.device,
    budget: Budget,
    keep: Callable[[list[Figures]], None],
) -> list[Figures]:
    """Measure and print the training table, and return its rows.

    Each row is printed at once, and `keep` is called with the rows so far, so that a killed run
    keeps its figures.
    """
    rows: list[Figures] = []
    for job in plan(sizes, names, device):
        rows.append(measure_job(job, sizes, bias, device, budget))
        compare(rows)
        keep(rows)
        print(f"T {job.length:,}, {job.precision}, {job.name}: {said(rows[-1])}", flush=True)
    heading = ["layer", "T", "dtype", "ms", "peak MiB", "compared with", "faster", "paper"]
    families = [layer.family for layer in OURS]
    in_order = sorted(
        rows,
        key=lambda row: (
            row["length"],
            names.index(row["beside"]),
            families.index(row["family"]),
            not row["peer"],
        ),
    )
    print_table(
        f"training step, d {sizes.width}, batch {sizes.batch}, bias {'on' if bias else 'off'}",
        [*heading, "memory", "paper"],
        [training_row(figures) for figures in in_order],
    )
    print(
        "float32: no TF32 in any layer; tf32: in all. paper: arXiv 2410.01201, a T4 (2018) and "
        "batch 64, against its own GRU and LSTM; ours against torch's on this device."
    )
    return rows


def said(figures: Figures) -> str:
    """Return a row in a few words: its time, or why there is none."""
    if "seconds" in figures:
        return f"{figures['seconds'] * 1e3:,.3f} ms"
    return str(figures.get("failed") or figures["skipped"])


def main(argv: list[str] | None = None) -> int:
    options = command_line("layers", __doc__)
    options.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N",
    )
    options.add_argument(
        "--dtype",
        nargs="+",
        choices=sorted(PRECISIONS),
        help="types to measure (default: float32, bfloat16, on CUDA tf32 too)",
    )
    options.add_argument(
        "--bias",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use biases in all layers",
    )
    options.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to check that it runs"
    )
    options.add_argument(
        "--budget-seconds",
        type=float,
        help="start no measurement after this many seconds, and print what there is "
        "(default: no limit)",
    )
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    budget = Budget(args.budget_seconds)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    sizes = QUICK if args.quick else GPU if on_gpu else CPU
    seed_sizes = seed.QUICK if args.quick else seed.GPU if on_gpu else seed.CPU
    default = ["float32", "bfloat16", "tf32"] if on_gpu else ["float32", "bfloat16"]
    names = list(dict.fromkeys(args.dtype or default))
    print_environment()
    if on_gpu:
        print(f"cuDNN {torch.backends.cudnn.version()}")

    seeded = seed.run_seed(seed_sizes, names, device, budget)

    def keep(training: list[Figures]) -> None:
        save_json(args.json, {"bias": args.bias, "training": training, "seed": seeded})

    keep([])
    run_training(sizes, args.bias, names, device, budget, keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
