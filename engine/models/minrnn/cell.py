"""Cell: a recurrence between two linear projections.

A cell projects its input to pre-activations, runs its recurrence over them, and projects the hidden
states back. Cells differ in the recurrence (engine/models/recurrence.py, which also says how
sequences are packed), and HGRN has a gated norm after it.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor, nn

from engine.models.gated import GatedRMSNorm
from engine.models.minrnn.config import MinRnnConfig
from engine.models.program import GatedNorm, Linear, Recurrence, Stage
from engine.models.quantized import QuantLinear, linear
from engine.models.recurrence import CELLS


def g(x: Tensor) -> Tensor:
    """Return x + 0.5 for x >= 0, else sigmoid(x); positive, continuous (arXiv 2410.01201, B.3)."""
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


class Cell(nn.Module):
    """Input projection, recurrence, output projection.

    Shapes: x [tokens, d_model] -> pre-activations [tokens, gates * inner] -> h [tokens, inner] ->
    [tokens, d_model]. `per_channel` are the recurrence's channel parameters, if it has any.
    """

    def __init__(self, config: MinRnnConfig) -> None:
        super().__init__()
        self.inner = config.inner
        self.operators = CELLS[config.cell]
        self.recurrence = Recurrence(
            config.cell,
            "cell",
            linear_candidate=config.candidate == "linear",
            normalize_gates=config.normalize_gates or config.cell != "minlstm",
        )
        self.gates = linear(
            config, config.d_model, self.operators.gates * config.inner, bias=config.cell_bias
        )
        self.norm = (
            GatedRMSNorm(config.inner, eps=config.norm_eps) if self.operators.output_gate else None
        )
        self.out: nn.Module = (
            linear(config, config.inner, config.d_model, bias=config.out_bias)
            if config.out_projection
            else nn.Identity()
        )
        # of SRU: what the gates see of the state, and their bias; forget | reset
        self.weight_c: nn.Parameter | None = None
        self.gate_bias: nn.Parameter | None = None
        if self.operators.sees_state:
            self.weight_c = nn.Parameter(torch.empty(2 * config.inner))
            self.gate_bias = nn.Parameter(torch.zeros(2 * config.inner))
            if not self.weight_c.is_meta:
                nn.init.uniform_(self.weight_c, -(1.5**0.5), 1.5**0.5)  # as its authors do
        self.initial = (
            nn.Parameter(torch.randn(config.inner)) if config.learned_initial_state else None
        )

    def initial_state(self) -> Tensor:
        """Return h_0 [inner]: g(parameter), or zeros; fp32, like states (fp64 in a fp64 model)."""
        weight = self.gates.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        if self.initial is None:
            return torch.zeros(self.inner, dtype=dtype, device=weight.device)
        return g(self.initial.to(dtype))

    def vectors(self) -> Tensor | None:
        """Return v_f | v_r | b_f | b_r of an SRU, fp32 (fp64 of fp64) [4 * inner]; else None."""
        if self.weight_c is None or self.gate_bias is None:
            return None
        parts = self.weight_c, self.gate_bias
        return torch.cat(
            [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        )

    def scan(
        self,
        x: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None = None,
    ) -> Tensor:
        """Read packed sequences x [tokens, d_model]; return [tokens, d_model].

        Each sequence's last hidden state is written to its row of `state` [rows, inner].
        """
        pre = self.gates(x)
        h = self.operators.scan(self.recurrence, pre, state, cu_seqlens, slots, per_channel)
        return self._project(h, pre)

    def step(
        self, x: Tensor, state: Tensor, slots: Tensor, per_channel: Tensor | None = None
    ) -> Tensor:
        """Read one token of every sequence: x [batch, d_model] -> [batch, d_model]."""
        pre = self.gates(x)
        h = self.operators.step(self.recurrence, pre, state, slots, per_channel)
        return self._project(h, pre)

    def forward(self, x: Tensor, per_channel: Tensor | None = None) -> Tensor:
        """Read x [batch, time, d_model], differentiably, each sequence from the initial state."""
        return self.read(x, per_channel)[0]

    def read(
        self,
        x: Tensor,
        per_channel: Tensor | None = None,
        before: Tensor | None = None,
        fresh: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read x [batch, time, d_model] like `forward`; return the same shape and the last h.

        Each sequence goes on from its row of `before` [batch, inner], or from the initial state if
        there is none or the sequence is `fresh` (bool [batch]). The last h is [batch, inner].
        """
        batch, time, _ = x.shape
        pre = self.gates(x).flatten(0, 1)
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * time
        h0 = None if self.initial is None else self.initial_state().expand(batch, -1)
        if before is not None:
            first = torch.zeros_like(before) if h0 is None else h0
            h0 = before if fresh is None else torch.where(fresh.unsqueeze(1), first, before)
        h, last = self.operators.train(self.recurrence, pre, cu_seqlens, h0, per_channel)
        return self._project(h.view(batch, time, -1), pre.view(batch, time, -1)), last

    def _project(self, h: Tensor, pre: Tensor) -> Tensor:
        """Gate h [..., inner] if the cell has an output gate, and project it."""
        if self.norm is not None:
            h = self.norm(h, pre[..., -self.inner :])
        y: Tensor = self.out(h)
        return y

    def stages(self, per_channel: Tensor | None) -> list[Stage]:
        """Return the cell's stages (engine/models/program.py)."""
        stages: list[Stage] = [
            Linear(self.gates),
            self._recurrence_of(per_channel),
        ]
        if self.norm is not None:
            stages.append(GatedNorm(self.norm))
        if not isinstance(self.out, nn.Identity):
            stages.append(Linear(cast("nn.Linear | QuantLinear", self.out)))
        return stages

    def _recurrence_of(self, per_channel: Tensor | None) -> Recurrence:
        if self.operators.sees_state:
            return dataclasses.replace(self.recurrence, vectors=per_channel)
        return dataclasses.replace(self.recurrence, lower_bound=per_channel)
