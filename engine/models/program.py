"""LayerProgram: what a layer computes, as a list of stages with their weights.

A family's model in plain torch is the specification of what is computed. Its program says the same
in a form that backends can read: a backend compiles the stages that it has kernels for, and refuses
others by name (engine/models/backends/blocks.py). Stages hold the model's own modules, so a backend
that changes or moves weights changes the model's.

A value flows from stage to stage: the first stage of a layer and every Norm begin with the layers'
stream x, any other stage takes the value of the one before. Residual adds the value to x, and
Replace puts it in the place of x, where layers have no residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from engine.models.quantized import QuantEmbedding, QuantLinear

GatedCell = Literal["gru", "lstm"]
Activation = Literal["gelu", "swiglu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of the stream: x -> [tokens, d_model]."""

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
        vectors: SRU: what the gates see of the state and their biases, v_f | v_r | b_f | b_r, fp32
            [4 * channels], as they were when the program was made.
    """

    cell: str
    state: str
    linear_candidate: bool = False
    normalize_gates: bool = True
    lower_bound: Tensor | None = field(default=None, compare=False)
    vectors: Tensor | None = field(default=None, compare=False)


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
class GatedRecurrence:
    """GRU or LSTM over time: input products [tokens, gates * channels] -> h [tokens, channels].

    Each step adds its recurrent product, `recurrent` of the last h, to the input products, which
    have their own bias (engine/ops/gated_rnn.py).

    Args:
        cell: the cell, with torch.nn's equations and order of gates.
        recurrent: [gates * channels, channels] with bias.
        hidden: name of the state tensor [channels] with h.
        memory: LSTM: name of the state tensor [channels] with c; None: there is none.
    """

    cell: GatedCell
    recurrent: nn.Linear | QuantLinear
    hidden: str
    memory: str | None = None


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm of the value, with weight and bias: [tokens, width] -> [tokens, width]."""

    module: nn.LayerNorm


@dataclass(frozen=True, slots=True)
class SruRecurrence:
    """SRU over time: u0 | u1 | u2 (| u3) [tokens, 3 or 4 * channels] -> h [tokens, channels].

    Args:
        weight_c: what the gates see of the state, forget | reset, fp32 [2 * channels], computed
            from the weights as they were when the program was made; None: nothing.
        bias: of the gates, likewise.
        state: name of the state tensor [channels] with c.
        highway: whether the highway's input is the layers' stream x, times `scale_x`; false: it is
            u3, or there is none.
        scale_x: factor of x.
        tanh: whether the output is of tanh(c), not of c.
    """

    weight_c: Tensor | None = field(compare=False)
    bias: Tensor = field(compare=False)
    state: str
    highway: bool
    scale_x: float
    tanh: bool


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


@dataclass(frozen=True, slots=True)
class Replace:
    """x = value, which may have another width."""


Stage = (
    Norm
    | Linear
    | Conv
    | Recurrence
    | SelectiveRecurrence
    | SsdRecurrence
    | GatedRecurrence
    | SruRecurrence
    | LayerNorm
    | GatedNorm
    | Elementwise
    | Residual
    | Replace
)
LayerProgram = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """A language model: embedding, layers, a last norm (None: there is none) and a head.

    The head is the embedding's matrix if `head` is that module.
    """

    embedding: nn.Embedding | QuantEmbedding
    layers: tuple[LayerProgram, ...]
    norm: nn.RMSNorm | None
    head: nn.Embedding | QuantEmbedding | nn.Linear | QuantLinear
    head_bias: nn.Parameter | None
