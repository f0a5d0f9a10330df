"""The layers that `loadtest.layers` compares, and the measurement of one training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.minrnn.cell import Cell
from engine.models.minrnn.config import CellName, MinRnnConfig
from loadtest.layers_timing import step_seconds
from loadtest.measuring import Figures, Precision, in_force, peak_bytes

FEW_TOKENS = 16  # of the step that comes before all others


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure: width, sequences in a batch, their lengths."""

    width: int
    batch: int
    lengths: tuple[int, ...]


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
    """Wraps `nn.GRU` or `nn.LSTM`; returns the hidden states without the last state."""

    def __init__(self, rnn: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.rnn(x)[0]
        return h


def cell(name: CellName, width: int, bias: bool) -> Cell:
    """Return minserve's layer, width -> width, without the output projection, like GRU and LSTM."""
    config = MinRnnConfig(
        cell=name,
        vocab_size=1,
        d_model=width,
        n_layers=1,
        expansion=1.0,
        out_projection=False,
        cell_bias=bias,
    )
    return Cell(config)


@dataclass(frozen=True)
class Layer:
    """A layer [batch, time, width] -> [batch, time, width], built by (width, bias).

    Minimal layers and torch's of one family are compared with each other. With `time_major`, the
    layer reads and writes [time, batch, width] in memory without a copy.
    """

    name: str
    family: str
    build: Callable[[int, bool], nn.Module]
    time_major: bool = False


OURS = (
    Layer("minGRU", "GRU", lambda width, bias: cell("mingru", width, bias)),
    Layer("minLSTM", "LSTM", lambda width, bias: cell("minlstm", width, bias)),
)
LOG_SPACE = Layer("minGRU log-space", "GRU", LogSpaceMinGRU)
PEERS = (
    Layer(
        "nn.GRU",
        "GRU",
        lambda width, bias: OutputOf(nn.GRU(width, width, bias=bias, batch_first=True)),
        time_major=True,
    ),
    Layer(
        "nn.LSTM",
        "LSTM",
        lambda width, bias: OutputOf(nn.LSTM(width, width, bias=bias, batch_first=True)),
        time_major=True,
    ),
)


def runs_on_cudnn(precision: Precision, device: torch.device) -> bool:
    """Whether torch computes layers of this type by cuDNN on this device."""
    try:
        probe = torch.empty(1, device=device, dtype=precision.dtype)
    except RuntimeError:  # a device in error: the rows say so, with the reason
        return False
    return bool(torch.cudnn_is_acceptable(probe))


def measure_training(
    layer: Layer,
    sizes: Sizes,
    length: int,
    bias: bool,
    precision: Precision,
    device: torch.device,
) -> Figures:
    """Return seconds and peak bytes of a training step: forward and all gradients.

    The gradients are those of x and of all weights. Peak bytes are what a step holds above the
    weights, x and the gradient of its output. Raises RuntimeError if the layer cannot run or a
    result is not finite.
    """
    torch.manual_seed(0)
    module = layer.build(sizes.width, bias).to(device, precision.dtype)

    def draw(time: int) -> Tensor:
        dense = (time, sizes.batch) if layer.time_major else (sizes.batch, time)
        drawn = torch.randn(*dense, sizes.width, device=device, dtype=precision.dtype)
        return drawn.transpose(0, 1) if layer.time_major else drawn

    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x), [x, *module.parameters()], gradient)

    x, gradient = draw(length).requires_grad_(), draw(length)
    with in_force(precision):
        few = min(length, FEW_TOKENS)
        step(draw(few).requires_grad_(), draw(few))  # libraries load, with workspaces of their own
        with torch.no_grad():
            output = module(x)
        if not all(bool(found.isfinite().all()) for found in (output, *step(x, gradient))):
            raise RuntimeError("an output or a gradient is not finite")
        del output
        seconds = step_seconds(lambda: step(x, gradient), device)
        peak = peak_bytes(lambda: step(x, gradient), device)
    return {"seconds": seconds, "peak_bytes": peak}
