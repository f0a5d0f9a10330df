"""LM: the language model around a cell.

An embedding; n layers of

    x + conv(x)                  if conv_kernel
    x + cell(RMSNorm(x))
    x + MLP(RMSNorm(x))          if mlp_ratio; exact GELU

then RMSNorm and the head (the embedding's matrix if tied). This is the language model of "Were RNNs
All We Needed?" (arXiv 2410.01201, appendix C).

Three methods compute the same function: `prefill` (packed prompts, state in place), `step` (one
token of every sequence, state in place) and `forward` (differentiable, for training). `prefill`,
`step` and `logits` never wait for the device, so they can be captured in a CUDA graph.

With `config.quantization` the matrices are quantised: projections, pointwise convolutions, MLPs and
the head, or the embedding if it is the head. An untied embedding (of which a token reads one row),
norms, biases, convolution taps and initial states are not. Such a model cannot be trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import CellName, ModelConfig
from engine.models.minrnn.cell import Cell
from engine.models.minrnn.conv import CausalConv
from engine.models.minrnn.mingru import MinGRU
from engine.models.minrnn.minlstm import MinLSTM
from engine.models.quantized import QuantEmbedding, QuantLinear, linear
from engine.models.state import ModelState, new_state

CELLS: dict[CellName, type[Cell]] = {"mingru": MinGRU, "minlstm": MinLSTM}


class MLP(nn.Module):
    """The feed-forward block: x [..., d_model] -> RMSNorm -> mlp_hidden -> GELU -> d_model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.up = linear(config, config.d_model, config.mlp_hidden, bias=config.mlp_bias)
        self.down = linear(config, config.mlp_hidden, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for x [..., d_model]."""
        y: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return y


class Layer(nn.Module):
    """One residual layer; `scan`, `step` and `forward` compute the same function."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.conv = CausalConv(config) if config.conv_kernel else None
        self.cell_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.cell = CELLS[config.cell](config)
        self.mlp = MLP(config) if config.mlp_hidden else None
        self.dropout = nn.Dropout(dropout)

    def scan(
        self, x: Tensor, cell: Tensor, conv: Tensor | None, cu_seqlens: Tensor, slots: Tensor
    ) -> Tensor:
        """Read packed x [tokens, d_model]; updates cell [rows, inner], conv [rows, k - 1, ...]."""
        if self.conv is not None:
            assert conv is not None
            x = x + self.conv.scan(x, conv, cu_seqlens, slots)
        x = x + self.cell.scan(self.cell_norm(x), cell, cu_seqlens, slots)
        return x if self.mlp is None else x + self.mlp(x)

    def step(self, x: Tensor, cell: Tensor, conv: Tensor | None, slots: Tensor) -> Tensor:
        """Read one token each, x [batch, d_model]; updates cell and conv as `scan` does."""
        if self.conv is not None:
            assert conv is not None
            x = x + self.conv.step(x, conv, slots)
        x = x + self.cell.step(self.cell_norm(x), cell, slots)
        return x if self.mlp is None else x + self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        """Read x [batch, time, d_model], differentiably, from the initial state."""
        if self.conv is not None:
            x = x + self.dropout(self.conv(x))
        x = x + self.dropout(self.cell(self.cell_norm(x)))
        return x if self.mlp is None else x + self.dropout(self.mlp(x))


def _embedding(config: ModelConfig) -> nn.Embedding | QuantEmbedding:
    if config.quantization is not None and config.tie_embeddings:
        return QuantEmbedding(config.vocab_size, config.d_model, config.quantization)
    weight = torch.empty(config.vocab_size, config.d_model)
    # on the meta device, normal_ imports torch's compiler, which takes a second
    if not weight.is_meta:
        nn.init.normal_(weight, std=config.d_model**-0.5 if config.tie_embeddings else 1.0)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
    return embedding


class LM(nn.Module):
    """The language model that a ModelConfig describes; parameter names are the checkpoint's.

    `dropout` is the training probability on the embedding and on every residual branch.

    Initial values are torch's defaults, as in the paper's public implementations: linear maps
    uniform within 1 / sqrt(inputs), embeddings N(0, 1). A tied embedding is also the head, where
    N(0, 1) would start training with logits of standard deviation sqrt(d_model). It is therefore
    initialized from N(0, 1 / d_model), which makes that 1.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embedding = _embedding(config)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head: nn.Linear | QuantLinear | None = None
        self.head_bias: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.head = linear(config, config.d_model, config.vocab_size, bias=False)
        if config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        if config.quantization is not None:
            self.requires_grad_(False)

    @property
    def _layers(self) -> Iterable[Layer]:
        return cast("Iterable[Layer]", self.layers)

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Read packed sequences, each continuing from its row of `state`; updates `state`.

        Args:
            tokens: int32 or int64 [tokens]; ids must be in range.
            cu_seqlens: int32 [sequences + 1].
            state: the rows of all sequences.
            slots: int32 [sequences].

        Returns:
            Hidden states after the final norm [tokens, d_model].
        """
        x = self._embed(tokens)  # [tokens, d_model]
        for index, layer in enumerate(self._layers):
            conv = None if state.conv is None else state.conv[index]
            x = layer.scan(x, state.cell[index], conv, cu_seqlens, slots)
        hidden: Tensor = self.norm(x)
        return hidden

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token of every sequence; updates `state` in place.

        tokens [batch], slots [batch] int32 -> hidden states after the final norm [batch, d_model].
        """
        x = self._embed(tokens)  # [batch, d_model]
        for index, layer in enumerate(self._layers):
            conv = None if state.conv is None else state.conv[index]
            x = layer.step(x, state.cell[index], conv, slots)
        hidden: Tensor = self.norm(x)
        return hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        """Look up tokens [...]; return [..., d_model] in the type of the activations."""
        x: Tensor
        if isinstance(self.embedding, QuantEmbedding):
            x = self.embedding(tokens, self.norm.weight.dtype)
        else:
            x = self.embedding(tokens)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits fp32 [n, vocab_size] of hidden [n, d_model].

        They are fp32 with 16-bit weights too (fp64 in a fp64 model, which can only be trained).
        With 16-bit weights the products are summed in fp32 and not rounded to 16 bits, which would
        change a bf16 logit by up to 1 part in 256.
        """
        head = self.embedding if self.head is None else self.head
        weight = head.weight
        if isinstance(head, QuantEmbedding | QuantLinear):
            logits = head.product(hidden)
        elif weight.dtype in (torch.float32, torch.float64):
            logits = functional.linear(hidden, weight).to(weight.dtype)  # autocast may round it
        elif weight.is_cuda and not torch.is_grad_enabled():  # this form of mm has no gradient
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:
            logits = functional.linear(hidden.float(), weight.float())
        return logits if self.head_bias is None else logits + self.head_bias

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits differentiably, every sequence from the initial state.

        tokens [batch, time] -> logits fp32 [batch, time, vocab_size].
        """
        x: Tensor = self.dropout(self._embed(tokens))  # [batch, time, d_model]
        for layer in self._layers:
            x = layer(x)
        hidden: Tensor = self.norm(x)
        return self.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)

    @torch.no_grad()
    def initial_state_rows(self) -> Tensor:
        """Return every layer's h_0: [layers, inner] fp32."""
        return torch.stack([layer.cell.initial_state() for layer in self._layers])

    def new_state(self, rows: int) -> ModelState:
        """Return the state of `rows` sequences that have read nothing."""
        device = self.embedding.weight.device
        return new_state(self.config, rows, self.initial_state_rows(), device)
