"""The recurrences as operators, by the name of their cell, for models in plain torch and backends.

Sequences are packed: the tokens of all sequences follow one another. Sequence s has the tokens from
cu_seqlens[s] to cu_seqlens[s + 1] (exclusive) and the state row slots[s]; a negative slot is
skipped. `pre` are pre-activations [tokens, gates * channels], `state` [rows, channels] is updated
in place, and h [tokens, channels] is returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
)


class CellOperators(ABC):
    """The operators of one cell.

    `how` has its options, `per_channel` its channel parameters, fp32 [channels].
    """

    gates: int  # columns of the pre-activations per channel, as in csrc/cells
    output_gate = False  # the last of these gates the output, after a norm (GatedNorm)
    bounded = False  # reads a lower bound of the forget gate (Recurrence.lower_bound)

    @abstractmethod
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

    @abstractmethod
    def step(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        """Read one token of every sequence: `pre` has a row for each of `slots`."""

    @abstractmethod
    def train(
        self,
        how: Recurrence,
        pre: Tensor,
        cu_seqlens: Tensor,
        h0: Tensor | None,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        """Differentiable version of `scan`, from h0 [sequences, channels] (None: zeros)."""


class MinGRU(CellOperators):
    """h_t = (1 - z) h_{t-1} + z g(v), z = sigmoid(k); gates k | v (arXiv 2410.01201, 3.1)."""

    gates = 2

    def scan(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return mingru_scan(pre, cu_seqlens, state, slots, how.linear_candidate)

    def step(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return mingru_step(pre, state, slots, how.linear_candidate)

    def train(
        self,
        how: Recurrence,
        pre: Tensor,
        cu_seqlens: Tensor,
        h0: Tensor | None,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return mingru_scan_train(pre, cu_seqlens, h0, how.linear_candidate)[0]


class MinLSTM(CellOperators):
    """h_t = f' h_{t-1} + i' g(v); gates f | i | v (arXiv 2410.01201, section 3.2).

    With normalised gates f' = sigmoid(f) / (sigmoid(f) + sigmoid(i)) and i' = 1 - f'; without, f'
    and i' are the sigmoids themselves.
    """

    gates = 3

    def scan(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return minlstm_scan(
            pre, cu_seqlens, state, slots, how.linear_candidate, how.normalize_gates
        )

    def step(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return minlstm_step(pre, state, slots, how.linear_candidate, how.normalize_gates)

    def train(
        self,
        how: Recurrence,
        pre: Tensor,
        cu_seqlens: Tensor,
        h0: Tensor | None,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return minlstm_scan_train(pre, cu_seqlens, h0, how.linear_candidate, how.normalize_gates)[0]


class HGRN(CellOperators):
    """h_t = f' h_{t-1} + (1 - f') silu(i), f' = lb + (1 - lb) sigmoid(f); gates i | f | g.

    g gates the output (arXiv 2311.04823). lb are the channel parameters, or 0.
    """

    gates = 3
    output_gate = True
    bounded = True

    def scan(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return hgrn_scan(pre, cu_seqlens, state, slots, per_channel)

    def step(
        self,
        how: Recurrence,
        pre: Tensor,
        state: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return hgrn_step(pre, state, slots, per_channel)

    def train(
        self,
        how: Recurrence,
        pre: Tensor,
        cu_seqlens: Tensor,
        h0: Tensor | None,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        return hgrn_scan_train(pre, cu_seqlens, h0, per_channel)[0]


CELLS: dict[str, CellOperators] = {"mingru": MinGRU(), "minlstm": MinLSTM(), "hgrn": HGRN()}


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
