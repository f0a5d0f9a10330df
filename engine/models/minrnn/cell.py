"""Cell: a recurrence between two linear projections.

A cell projects its input to pre-activations, runs its recurrence over them, and projects the hidden
states back. Only the recurrence differs between cells, so a new cell is one small file with three
operator calls and an entry in `lm.CELLS`.

Sequences are packed: the tokens of all sequences follow one another. Sequence s has the tokens from
cu_seqlens[s] to cu_seqlens[s + 1] (exclusive) and the state row slots[s]; a negative slot is
skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.models.quantized import linear


def g(x: Tensor) -> Tensor:
    """Return x + 0.5 for x >= 0, else sigmoid(x); positive, continuous (arXiv 2410.01201, B.3)."""
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


class Cell(nn.Module, ABC):
    """Base class of the cells: input projection, recurrence, output projection.

    Shapes: x [tokens, d_model] -> pre-activations [tokens, gates * inner] -> h [tokens, inner] ->
    [tokens, d_model]. Subclasses define the recurrence by three operators, and the order of the
    pre-activations.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = config.inner
        self.gates = linear(
            config, config.d_model, config.gates * config.inner, bias=config.cell_bias
        )
        self.out: nn.Module = (
            linear(config, config.inner, config.d_model, bias=config.out_bias)
            if config.out_projection
            else nn.Identity()
        )
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

    def scan(self, x: Tensor, state: Tensor, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
        """Read packed sequences x [tokens, d_model]; return [tokens, d_model].

        Each sequence's last hidden state is written to its row of `state` [rows, inner].
        """
        y: Tensor = self.out(self.recur(self.gates(x), state, cu_seqlens, slots))
        return y

    def step(self, x: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        """Read one token of every sequence: x [batch, d_model] -> [batch, d_model]."""
        y: Tensor = self.out(self.recur_step(self.gates(x), state, slots))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Read x [batch, time, d_model], differentiably, each sequence from the initial state."""
        batch, time, _ = x.shape
        pre = self.gates(x).flatten(0, 1)
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * time
        h0 = None if self.initial is None else self.initial_state().expand(batch, -1)
        h = self.recur_train(pre, cu_seqlens, h0)
        y: Tensor = self.out(h.view(batch, time, -1))
        return y

    @abstractmethod
    def recur(self, pre: Tensor, state: Tensor, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
        """Run the recurrence: pre [tokens, gates * inner] -> h [tokens, inner]; updates `state`."""

    @abstractmethod
    def recur_step(self, pre: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        """Run one step: pre [batch, gates * inner] -> h [batch, inner]; updates `state`."""

    @abstractmethod
    def recur_train(self, pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None) -> Tensor:
        """Differentiable version of `recur`, from h0 [sequences, inner] (None: zeros)."""
