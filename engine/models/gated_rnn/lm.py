"""GatedRnnLM: a language model of torch.nn's GRU or LSTM layers, one upon the other.

An embedding; n layers of

    pre = input(x)                            W x + b of all tokens at once
    x = scan(pre, recurrent)                  adds U h + c token by token (engine/ops/gated_rnn.py)

then the head (the embedding's matrix if tied). There are no norms and no residual stream. The
embedding may have another width than the layers. LanguageModel says what its methods do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from engine.models import program
from engine.models.gated_rnn.config import GatedRnnConfig
from engine.models.language_model import LanguageModel, RecurrentLayer
from engine.models.program import GatedCell, LayerProgram
from engine.models.quantize import dequantize
from engine.models.quantized import QuantLinear, linear
from engine.ops import gru_scan, gru_step, lstm_scan, lstm_step
from engine.ops.gated_rnn import decodes, gated_decode


class Layer(RecurrentLayer):
    """One layer; `scan`, `step` and `forward` compute the same function.

    The rows of `input` and `recurrent` are torch's gates: r | z | n of a GRU, i | f | g | o of an
    LSTM. Both have a bias, which is zero where a checkpoint has none.
    """

    def __init__(self, config: GatedRnnConfig, index: int) -> None:
        super().__init__()
        self.cell: GatedCell = cast("GatedCell", config.cell)
        width, hidden = config.d_model if index else config.embedding_width, config.d_model
        self.input = linear(config, width, config.gates * hidden, bias=True)
        self.recurrent = linear(config, hidden, config.gates * hidden, bias=True)
        if config.quantization is None and not self.input.weight.is_meta:
            for parameter in self.parameters():  # as torch.nn does
                nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, width]; updates hidden (and cell) [rows, d_model]."""
        pre = self.input(x)
        weight, bias = _matrix(self.recurrent, pre.dtype), self.recurrent.bias
        if self.cell == "gru":
            return gru_scan(pre, weight, bias, cu_seqlens, state["hidden"], slots)
        return lstm_scan(pre, weight, bias, cu_seqlens, state["hidden"], state["cell"], slots)

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, width]; updates the state as `scan` does."""
        hidden, plain = state["hidden"], (self.input, self.recurrent)
        if all(isinstance(one, nn.Linear) for one in plain) and decodes(x, hidden.shape[1]):
            W, b = self.input.weight, cast("Tensor", self.input.bias)
            U, c = self.recurrent.weight, cast("Tensor", self.recurrent.bias)
            return gated_decode(x, W, b, U, c, hidden, state.get("cell"), slots)
        pre = self.input(x)
        last = hidden.index_select(0, slots.clamp(0, len(hidden) - 1))  # padding reads any row
        recurrent = self.recurrent(last.to(pre.dtype))
        if self.cell == "gru":
            return gru_step(pre, recurrent, hidden, slots)
        return lstm_step(pre, recurrent, hidden, state["cell"], slots)

    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, width], differentiably, from the initial state."""
        weight = _matrix(self.recurrent, x.dtype)
        biases = [cast("Tensor", one.bias) for one in (self.input, self.recurrent)]
        weights = [_matrix(self.input, x.dtype), weight, *biases]
        zeros = x.new_zeros(1, len(x), weight.shape[1])
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        how = True, 1, 0.0, self.training, False, True
        if self.cell == "gru":
            return torch.gru(x, zeros, weights, *how)[0]
        return torch.lstm(x, (zeros, zeros), weights, *how)[0]

    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""
        memory = "cell" if self.cell == "lstm" else None
        return (
            program.Linear(self.input),
            program.GatedRecurrence(self.cell, self.recurrent, "hidden", memory),
            program.Replace(),
        )


def _matrix(module: nn.Linear | QuantLinear, dtype: torch.dtype) -> Tensor:
    """Return a matrix for the operators of prompts, which take no 8-bit ones.

    It is widened in each call: that costs as much as a few tokens' products, while a copy that
    stays would make 8-bit weights take more memory than 16-bit ones.
    """
    if isinstance(module, QuantLinear):
        return dequantize(module.weight, module.scale).to(dtype)
    return module.weight


class GatedRnnLM(LanguageModel):
    """The language model that a GruConfig or LstmConfig describes."""

    config: GatedRnnConfig
    has_last_norm = False

    def __init__(self, config: GatedRnnConfig) -> None:
        super().__init__(config, lambda index: Layer(config, index))
        if config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        if config.quantization is not None:
            self.requires_grad_(False)
