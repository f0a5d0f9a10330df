"""LayerProgram: what a layer computes, as a list of stages with their weights.

A family's model in plain torch is the specification of what is computed. Its program says the same
in a form that backends can read: a backend compiles the stages that it has kernels for, and refuses
others by name (engine/models/backends/blocks.py). Stages hold the model's own modules, so a backend
that changes or moves weights changes the model's.

A value flows from stage to stage: Norm begins with the residual stream x, every other stage takes
the value of the one before, and Residual adds it to x. A convolution before the first norm begins
with x, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from engine.models.quantized import QuantEmbedding, QuantLinear

Activation = Literal["gelu", "swiglu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of the residual stream: x -> [tokens, d_model]."""

    module: nn.RMSNorm


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map with its bias, if it has one: [tokens, inputs] -> [tokens, outputs]."""

    module: nn.Linear | QuantLinear


@dataclass(frozen=True, slots=True)
class Conv:
    """Causal depthwise convolution of some columns of the value; the others pass unchanged.

    Args:
        weight: [channels, taps] for as many columns, the tap of the oldest input first.
        bias: [channels] or None.
        state: name of the state tensor [taps - 1, channels] with the last inputs.
        first: first of the columns.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    state: str
    first: int = 0


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A cell over time: pre-activations [tokens, gates * channels] -> h [tokens, channels].

    Args:
        cell: name of the cell (csrc/cells/cells.def); its operators are in recurrence.py.
        state: name of the state tensor [channels].
        linear_candidate: minGRU and minLSTM: the candidate is v itself instead of g(v).
        normalize_gates: minLSTM: the gates are scaled so that f' + i' = 1.
        lower_bound: HGRN: the least forget gate of every channel, fp32 [channels], computed from
            the weights as they were when the program was made; None: 0.
    """

    cell: str
    state: str
    linear_candidate: bool = False
    normalize_gates: bool = True
    lower_bound: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SelectiveRecurrence:
    """Mamba's recurrence with its selection: [x | z] -> y [tokens, channels].

    u = silu(x); dt, B, C = select(u), each divided by its RMS if there is `norm_eps`; the rest is
    `selective_scan` (engine/ops/selective.py) with dt.weight dt as time steps, dt.bias and gate z.

    Args:
        select: [dt_rank + 2 * states, channels], rows dt | B | C; no bias.
        dt: [channels, dt_rank] with bias.
        A: fp32 [channels, states], computed from the weights as they were when the program was
            made.
        D: [channels].
        state: name of the state tensor [channels, states].
        norm_eps: epsilon of the norms of dt, B and C, which have no weights; None: no norms.
    """

    select: nn.Linear
    dt: nn.Linear
    A: Tensor = field(compare=False)
    D: nn.Parameter = field(compare=False)
    state: str
    norm_eps: float | None


@dataclass(frozen=True, slots=True)
class SsdRecurrence:
    """Mamba-2's recurrence with its gated norm: [z | x | B | C | dt] -> y [tokens, channels].

    x, B, C = silu(x), silu(B), silu(C); h = `ssd_scan` of them (engine/ops/ssd.py); y is
    h silu(z), each group of its channels divided by its RMS, times the norm's weight.

    Args:
        A: fp32 [heads], computed from the weights as they were when the program was made.
        D: [heads].
        dt_bias: [heads].
        dt_limit: least and largest time step; the latter may be infinite.
        norm_weight: weight of the gated norm [channels].
        norm_eps: its epsilon.
        groups: parts of the channels that are normed by themselves, and that share B and C.
        state: name of the state tensor [heads, head_dim, states].
    """

    A: Tensor = field(compare=False)
    D: nn.Parameter = field(compare=False)
    dt_bias: nn.Parameter = field(compare=False)
    dt_limit: tuple[float, float]
    norm_weight: nn.Parameter = field(compare=False)
    norm_eps: float
    groups: int
    state: str


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm of the recurrence's h, times silu of the last of its gates."""

    module: nn.RMSNorm


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An activation: exact GELU, or SwiGLU: [gate | up] -> silu(gate) * up, half as wide."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Residual:
    """x += value."""


Stage = (
    Norm
    | Linear
    | Conv
    | Recurrence
    | SelectiveRecurrence
    | SsdRecurrence
    | GatedNorm
    | Elementwise
    | Residual
)
LayerProgram = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """A language model: embedding, layers, a last norm and a head.

    The head is the embedding's matrix if `head` is that module.
    """

    embedding: nn.Embedding | QuantEmbedding
    layers: tuple[LayerProgram, ...]
    norm: nn.RMSNorm
    head: nn.Embedding | QuantEmbedding | nn.Linear | QuantLinear
    head_bias: nn.Parameter | None
