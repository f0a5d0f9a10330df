"""The recurrences as operators, by the name of their cell, for models in plain torch and backends.

Sequences are packed: the tokens of all sequences follow one another. Sequence s has the tokens from
cu_seqlens[s] to cu_seqlens[s + 1] (exclusive) and the state row slots[s]; a negative slot is
skipped. `pre` are pre-activations [tokens, gates * channels], `state` [rows, channels] is updated
in place, and h [tokens, channels] is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.models.program import Recurrence
from engine.ops import (
    hgrn_scan,
    hgrn_scan_train,
    hgrn_step,
    mingru_scan,
    mingru_scan_train,
    mingru_step,
    minlstm_scan,
    minlstm_scan_train,
    minlstm_step,
    sru_scan,
    sru_scan_train,
    sru_step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOperators:
    """The operators of one cell.

    In their methods `how` has the cell's options, `per_channel` its channel parameters, fp32
    [channels], of SRU [4 * channels].

    Args:
        gates: columns of the pre-activations per channel, as in csrc/cells.
        operators: scan, step and differentiable scan, which take the same last arguments.
        arguments: these, from `how` and `per_channel`.
        output_gate: the last gate is one of the output, after a norm (GatedNorm).
        bounded: it reads a lower bound of the forget gate (Recurrence.lower_bound).
        sees_state: its gates depend on the state (Recurrence.vectors).
    """

    gates: int
    operators: tuple[
        Callable[..., Tensor], Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]
    ]
    arguments: Callable[[Recurrence, Tensor | None], tuple[Any, ...]]
    output_gate: bool = False
    bounded: bool = False
    sees_state: bool = False

    def scan(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        """Read packed sequences, each from its state row."""
        return self.operators[0](pre, cu_seqlens, state, slots, *self.arguments(how, per_channel))

    def step(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        """Read one token of every sequence: `pre` has a row for each of `slots`."""
        return self.operators[1](pre, state, slots, *self.arguments(how, per_channel))

    def train(
        self,
        how: Recurrence,
        pre: Tensor,
        cu_seqlens: Tensor,
        h0: Tensor | None,
        per_channel: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Differentiable version of `scan`, from h0 [sequences, channels] (None: zeros).

        Returns h [tokens, channels] and each sequence's last h [sequences, channels].
        """
        return self.operators[2](pre, cu_seqlens, h0, *self.arguments(how, per_channel))


def _vectors(per_channel: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what an SRU's gates see of the state, and their bias, of Recurrence.vectors."""
    assert per_channel is not None
    weight_c, bias = per_channel.chunk(2)
    return weight_c, bias


def _sru_scan(
    pre: Tensor, cu_seqlens: Tensor, state: Tensor, slots: Tensor, weight_c: Tensor, bias: Tensor
) -> Tensor:
    return sru_scan(pre, None, weight_c, bias, cu_seqlens, state, slots)


def _sru_step(pre: Tensor, state: Tensor, slots: Tensor, weight_c: Tensor, bias: Tensor) -> Tensor:
    return sru_step(pre, None, weight_c, bias, state, slots)


def _sru_scan_train(
    pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None, weight_c: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    return sru_scan_train(pre, None, weight_c, bias, cu_seqlens, h0)


CELLS: dict[str, CellOperators] = {
    # h_t = (1 - z) h_{t-1} + z g(v), z = sigmoid(k); gates k | v (arXiv 2410.01201, section 3.1)
    "mingru": CellOperators(
        gates=2,
        operators=(mingru_scan, mingru_step, mingru_scan_train),
        arguments=lambda how, _: (how.linear_candidate,),
    ),
    # h_t = f' h_{t-1} + i' g(v); gates f | i | v (arXiv 2410.01201, section 3.2). Normalised, f' =
    # sigmoid(f) / (sigmoid(f) + sigmoid(i)) and i' = 1 - f'; else they are the sigmoids.
    "minlstm": CellOperators(
        gates=3,
        operators=(minlstm_scan, minlstm_step, minlstm_scan_train),
        arguments=lambda how, _: (how.linear_candidate, how.normalize_gates),
    ),
    # h_t = f' h_{t-1} + (1 - f') silu(i), f' = lb + (1 - lb) sigmoid(f); gates i | f | g, of which
    # g is the output's (arXiv 2311.04823). The channel parameters are lb, or 0.
    "hgrn": CellOperators(
        gates=3,
        operators=(hgrn_scan, hgrn_step, hgrn_scan_train),
        arguments=lambda _, per_channel: (per_channel,),
        output_gate=True,
        bounded=True,
    ),
    # c_t = f c_{t-1} + (1 - f) u0, f = sigmoid(u1 + v_f c_{t-1} + b_f); h_t = r c_t + (1 - r) u3, r
    # likewise of u2 (arXiv 1709.02755); parts u0 | u1 | u2 | u3, and the state is c. The channel
    # parameters are v_f | v_r | b_f | b_r. It is not affine in c, and no cell of csrc/cells.
    "sru": CellOperators(
        gates=4,
        operators=(_sru_scan, _sru_step, _sru_scan_train),
        arguments=lambda _, per_channel: _vectors(per_channel),
        sees_state=True,
    ),
}


def lower_bounds_of(raw: Tensor | None, layers: int) -> Sequence[Tensor | None]:
    """Return every layer's least forget gates, fp32 (fp64 of fp64) [channels]; differentiable.

    `raw` [layers, channels] are the learned parameters; None: no layer has bounds. A softmax over
    the layers makes them the shares by which the bounds rise from a layer to the next. Those of the
    first layer are 0.
    """
    if raw is None:
        return [None] * layers
    dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
    shares = raw.softmax(0, dtype=dtype)
    bounds = shares.cumsum(0) - shares[0]
    return list(bounds)
