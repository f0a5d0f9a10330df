"""LM: the language model of "Were RNNs All We Needed?" (arXiv 2410.01201, appendix C).

An embedding; n layers of

    x + conv(x)                  if conv_kernel
    x + cell(RMSNorm(x))
    x + MLP(RMSNorm(x))          if mlp_ratio; exact GELU

then RMSNorm and the head (the embedding's matrix if tied). LanguageModel says what its methods do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models import program
from engine.models.language_model import LanguageModel, RecurrentLayer
from engine.models.minrnn.cell import Cell
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.conv import CausalConv
from engine.models.program import LayerProgram, Stage
from engine.models.quantized import linear
from engine.models.recurrence import lower_bounds_of


class MLP(nn.Module):
    """The feed-forward block: x [..., d_model] -> RMSNorm -> mlp_hidden -> GELU -> d_model."""

    def __init__(self, config: MinRnnConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.up = linear(config, config.d_model, config.mlp_hidden, bias=config.mlp_bias)
        self.down = linear(config, config.mlp_hidden, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for x [..., d_model]."""
        y: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return y


class Layer(RecurrentLayer):
    """One residual layer; `scan`, `step` and `forward` compute the same function."""

    def __init__(self, config: MinRnnConfig, dropout: float) -> None:
        super().__init__()
        self.conv = CausalConv(config) if config.conv_kernel else None
        self.cell_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.cell = Cell(config)
        self.mlp = MLP(config) if config.mlp_hidden else None
        self.dropout = nn.Dropout(dropout)

    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, d_model]; updates cell [rows, inner], conv [rows, k - 1, ...]."""
        if self.conv is not None:
            x = x + self.conv.scan(x, state["conv"], cu_seqlens, slots)
        x = x + self.cell.scan(self.cell_norm(x), state["cell"], cu_seqlens, slots, per_channel)
        return x if self.mlp is None else x + self.mlp(x)

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, d_model]; updates cell and conv as `scan` does."""
        if self.conv is not None:
            x = x + self.conv.step(x, state["conv"], slots)
        x = x + self.cell.step(self.cell_norm(x), state["cell"], slots, per_channel)
        return x if self.mlp is None else x + self.mlp(x)

    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, d_model], differentiably, from the initial state."""
        return self.read(x, per_channel, None, None)[0]

    def read(
        self,
        x: Tensor,
        per_channel: Tensor | None,
        before: Mapping[str, Tensor] | None,
        fresh: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Read like `forward`, and return the state too; see `LM.read`."""
        state, before = {}, before or {}
        if self.conv is not None:
            y, state["conv"] = self.conv.read(x, before.get("conv"), fresh)
            x = x + self.dropout(y)
        normed = self.cell_norm(x)
        y, state["cell"] = self.cell.read(normed, per_channel, before.get("cell"), fresh)
        x = x + self.dropout(y)
        return x if self.mlp is None else x + self.dropout(self.mlp(x)), state

    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""
        stages: list[Stage] = []
        if self.conv is not None:
            stages += [
                program.Conv(self.conv.weight, self.conv.bias, "conv"),
                program.Linear(self.conv.pointwise),
                program.Residual(),
            ]
        stages += [
            program.Norm(self.cell_norm),
            *self.cell.stages(per_channel),
            program.Residual(),
        ]
        if self.mlp is not None:
            stages += [
                program.Norm(self.mlp.norm),
                program.Linear(self.mlp.up),
                program.Elementwise("gelu"),
                program.Linear(self.mlp.down),
                program.Residual(),
            ]
        return tuple(stages)


class LM(LanguageModel):
    """The language model that a MinRnnConfig describes.

    `dropout` is the training probability on the embedding and on every residual branch.

    Initial values are torch's defaults, as in the paper's public implementations: linear maps
    uniform within 1 / sqrt(inputs), embeddings N(0, 1), tied ones N(0, 1 / d_model).
    HGRN's lower bounds begin as equal steps from layer to layer.
    """

    config: MinRnnConfig
    vectors_of_layers = frozenset({"lower_bounds"})
    float32_parameters = (".weight_c",)

    def __init__(self, config: MinRnnConfig, dropout: float = 0.0) -> None:
        super().__init__(config, lambda _: Layer(config, dropout))
        self.dropout = nn.Dropout(dropout)
        if config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.lower_bounds: nn.Parameter | None = None
        if config.cell == "hgrn" and config.lower_bounds:
            self.lower_bounds = nn.Parameter(torch.zeros(config.n_layers, config.inner))
        if config.quantization is not None:
            self.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits differentiably, with dropout in training mode; see LanguageModel."""
        x: Tensor = self.dropout(self.embed(tokens))  # [batch, time, d_model]
        return self._read(x)

    def read(
        self, tokens: Tensor, before: Mapping[str, Tensor], fresh: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute logits differentiably, like `forward`, from given states.

        Args:
            tokens: int64 [batch, time].
            before: each sequence's state: `cell` [layers, batch, inner] fp32, `conv` [layers,
                batch, k - 1, d_model] (the tensors of a ModelState).
            fresh: bool [batch]: sequences that begin at the initial state instead.

        Returns:
            Logits fp32 [batch, time, vocab_size], and the state behind the last token, like
            `before`.
        """
        x: Tensor = self.dropout(self.embed(tokens))
        after: list[dict[str, Tensor]] = []
        layers = cast("Sequence[Layer]", self.layers)
        for index, (layer, per_channel) in enumerate(
            zip(layers, self.channel_parameters(), strict=True)
        ):
            own = {name: tensor[index] for name, tensor in before.items()}
            x, state = layer.read(x, per_channel, own, fresh)
            after.append(state)
        hidden = self.last_norm(x)
        logits = self.logits(hidden.flatten(0, 1)).view(*hidden.shape[:-1], -1)
        return logits, {
            name: torch.stack([state[name].to(tensor.dtype) for state in after])
            for name, tensor in before.items()
        }

    def channel_parameters(self) -> Sequence[Tensor | None]:
        """Return what each layer's recurrence needs per channel, fp32; None: nothing.

        Of HGRN the lower bounds of the forget gate [inner], of SRU `Cell.vectors` [4 * inner].
        """
        if self.config.cell == "sru":
            return [layer.cell.vectors() for layer in cast("Sequence[Layer]", self.layers)]
        return lower_bounds_of(self.lower_bounds, self.config.n_layers)

    @torch.no_grad()
    def initial_state(self) -> dict[str, Tensor]:
        """Return every layer's h_0 if it is learned: `cell` [layers, inner] fp32."""
        if not self.config.learned_initial_state:
            return {}
        layers = cast("Sequence[Layer]", self.layers)
        return {"cell": torch.stack([layer.cell.initial_state() for layer in layers])}
