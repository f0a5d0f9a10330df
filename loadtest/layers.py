"""Whole layers: a training step against cuDNN, and the seed benchmark against its limit.

Training step: forward and backward (gradients of the input and of every weight, from one fixed
random gradient of the output) of one minGRU and one minLSTM layer as minserve trains them, that is
the gate projection and the differentiable scan, beside `nn.GRU` and `nn.LSTM` of the same width,
bias and precision, and beside the same minGRU with the scan in log space in plain PyTorch, which is
the formulation of "Were RNNs All We Needed?" (arXiv 2410.01201, appendix B). Peak memory is what
one step allocates above the weights, the input and the gradient of the output.

The paper's figures stand beside ours: its minGRU and minLSTM trained 175 and 235 times faster per
step than its GRU and LSTM at 512 tokens, 1,324 and 1,361 times at 4,096, for about 88 % more
memory, with a batch of 64 on a T4, a GPU of 2018. Ours are ratios to today's cuDNN layers on the
device of the run, a much stronger opponent than a GRU that runs token by token.

cuDNN takes bfloat16 only where torch lets it. Where it does not, `nn.GRU` falls back to one token
at a time; then the float16 layer, which cuDNN runs, is measured too and is the one compared with.

The second table is `loadtest.seed`.

    python -m loadtest.layers
    python -m loadtest.layers --quick --device cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import CellName, ModelConfig
from engine.models.cell import Cell
from engine.models.lm import CELLS
from loadtest import seed
from loadtest.measuring import (
    PRECISIONS,
    Figures,
    Precision,
    in_force,
    peak_bytes,
    reported,
    seconds_of,
)
from loadtest.report import print_environment, print_table, save_json

# (layer, tokens) -> speed-up of a training step, and the memory's growth, in arXiv 2410.01201.
PAPER_SPEEDUP = {
    ("minGRU", 512): 175,
    ("minLSTM", 512): 235,
    ("minGRU", 4096): 1324,
    ("minLSTM", 4096): 1361,
}
PAPER_MEMORY = 0.88


@dataclass(frozen=True)
class Sizes:
    """What is measured: width, sequences in a batch, their lengths."""

    width: int
    batch: int
    lengths: tuple[int, ...]


GPU = Sizes(1024, 64, (512, 4096))
CPU = Sizes(256, 8, (512,))
QUICK = Sizes(32, 2, (16,))


class LogSpaceMinGRU(nn.Module):
    """x [batch, time, width] -> h [batch, time, width], from h_0 = 0, by Heinsen's scan.

    With A_t = sum of log(1 - z_s) up to t: log h_t = A_t + logcumsumexp(log(z g(v)) - A)_t. The
    sums are in float32 whatever the input is: thousands of terms lose every digit in bfloat16.
    """

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 2 * width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.gates(x).float().chunk(2, dim=-1)
        decay = -functional.softplus(k).cumsum(dim=1)
        # relu keeps the logarithm's gradient finite where the other branch is taken.
        log_g = torch.where(v >= 0, (v.relu() + 0.5).log(), -functional.softplus(-v))
        log_input = log_g - functional.softplus(-k)
        h = (decay + (log_input - decay).logcumsumexp(dim=1)).exp()
        return h.to(x.dtype)


class OutputOf(nn.Module):
    """The hidden states of `nn.GRU` or `nn.LSTM`, without the last state."""

    def __init__(self, rnn: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.rnn(x)[0]
        return h


def cell(name: CellName, width: int, bias: bool) -> Cell:
    """minserve's own layer, width -> width without the output projection, as GRU and LSTM are."""
    config = ModelConfig(
        cell=name,
        vocab_size=1,
        d_model=width,
        n_layers=1,
        expansion=1.0,
        out_projection=False,
        cell_bias=bias,
    )
    return CELLS[name](config)


Factory = Callable[[int, bool], nn.Module]
FAMILIES: dict[str, dict[str, Factory]] = {
    "GRU": {
        "minGRU": lambda width, bias: cell("mingru", width, bias),
        "minGRU log-space": LogSpaceMinGRU,
    },
    "LSTM": {"minLSTM": lambda width, bias: cell("minlstm", width, bias)},
}
PEERS: dict[str, Factory] = {
    "GRU": lambda width, bias: OutputOf(nn.GRU(width, width, bias=bias, batch_first=True)),
    "LSTM": lambda width, bias: OutputOf(nn.LSTM(width, width, bias=bias, batch_first=True)),
}


def measure_training(
    factory: Factory,
    sizes: Sizes,
    length: int,
    bias: bool,
    precision: Precision,
    device: torch.device,
) -> Figures:
    """Seconds and peak bytes of a training step of the layer that `factory` builds.

    Raises RuntimeError where the layer cannot run or a result is not finite.
    """
    torch.manual_seed(0)
    layer = factory(sizes.width, bias).to(device, precision.dtype)
    shape = (sizes.batch, length, sizes.width)
    x = torch.randn(shape, device=device, dtype=precision.dtype).requires_grad_()
    gradient = torch.randn(shape, device=device, dtype=precision.dtype)
    wanted = [x, *layer.parameters()]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), wanted, gradient)

    with in_force(precision):
        seconds = seconds_of(step, device)
        peak = peak_bytes(step, device)
        with torch.no_grad():
            output = layer(x)
        if not all(bool(found.isfinite().all()) for found in (output, *step())):
            raise RuntimeError("an output or a gradient is not finite")
    return {"seconds": seconds, "peak_bytes": peak}


def runs_on_cudnn(precision: Precision, device: torch.device) -> bool:
    """Whether torch hands layers of this type to cuDNN on this device."""
    try:
        probe = torch.empty(1, device=device, dtype=precision.dtype)
    except RuntimeError:  # a device in error: the rows say so, with the reason
        return False
    return bool(torch.cudnn_is_acceptable(probe))


def measure_family(
    family: str, sizes: Sizes, length: int, bias: bool, name: str, device: torch.device
) -> list[Figures]:
    """Rows of torch's layer, then of the minimal ones with their ratios to it.

    `name` is the precision. "over" names what the ratios are to; without a peer that ran there are
    no ratios.
    """

    def row(layer: str, factory: Factory, precision_name: str) -> Figures:
        precision = PRECISIONS[precision_name]
        found = reported(
            lambda: measure_training(factory, sizes, length, bias, precision, device), device
        )
        return {"layer": layer, "length": length, "precision": precision_name, **found}

    peers = []
    falls_back = device.type == "cuda" and not runs_on_cudnn(PRECISIONS[name], device)
    for peer_name in [name, "float16"] if falls_back else [name]:
        cudnn = "cuDNN" if runs_on_cudnn(PRECISIONS[peer_name], device) else "without cuDNN"
        peers.append(row(f"nn.{family} ({cudnn})", PEERS[family], peer_name))
    ran = [peer for peer in peers if "failed" not in peer]
    ours = [row(layer, factory, name) for layer, factory in FAMILIES[family].items()]
    for figures in ours:
        if "failed" in figures or not ran:
            continue
        peer = ran[-1]  # the one on cuDNN, where there is one
        figures["over"] = f"{peer['layer']} {peer['precision']}"
        figures["speedup"] = peer["seconds"] / figures["seconds"]
        if figures["peak_bytes"] is not None:
            figures["memory_growth"] = figures["peak_bytes"] / peer["peak_bytes"] - 1
    return peers + ours


def training_row(figures: Figures) -> list[str]:
    """A row of the training table: what is absent is "-", a failure stands with its reason."""
    head = [figures["layer"], f"{figures['length']:,}", figures["precision"]]
    if "failed" in figures:
        return [*head, "-", "-", figures["failed"], *["-"] * 4]
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


def run_training(
    sizes: Sizes,
    bias: bool,
    names: list[str],
    device: torch.device,
    keep: Callable[[list[Figures]], None],
) -> list[Figures]:
    """Measures and prints the training table. `keep` gets the rows so far after each layer: a run
    that is cut short has not measured for nothing."""
    rows: list[Figures] = []
    for name in names:
        for length in sizes.lengths:
            for family in FAMILIES:
                rows += measure_family(family, sizes, length, bias, name, device)
                keep(rows)
    heading = ["layer", "T", "dtype", "ms", "peak MiB", "compared with", "faster", "paper"]
    print_table(
        f"training step, d {sizes.width}, batch {sizes.batch}, bias {'on' if bias else 'off'}",
        [*heading, "memory", "paper"],
        [training_row(figures) for figures in rows],
    )
    print(
        "float32: no TF32 in any layer; tf32: in all. paper: arXiv 2410.01201, a T4 and batch 64, "
        "against its own GRU and LSTM; ours against torch's on this device."
    )
    return rows


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument(
        "--dtype",
        nargs="+",
        choices=sorted(PRECISIONS),
        help="default: float32, bfloat16, on CUDA tf32 too",
    )
    options.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    sizes = QUICK if args.quick else GPU if on_gpu else CPU
    seed_sizes = seed.QUICK if args.quick else seed.GPU if on_gpu else seed.CPU
    names = args.dtype or (["float32", "tf32", "bfloat16"] if on_gpu else ["float32", "bfloat16"])
    print_environment()
    if on_gpu:
        print(f"cuDNN {torch.backends.cudnn.version()}")

    def keep(training: list[Figures], seeded: list[Figures] | None = None) -> None:
        save_json(args.json, {"bias": args.bias, "training": training, "seed": seeded or []})

    training = run_training(sizes, args.bias, names, device, keep)
    keep(training, seed.run_seed(seed_sizes, names, device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
