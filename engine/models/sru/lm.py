"""SruLM: a language model of SRU layers, one upon the other, as the `sru` package computes them.

An embedding; a linear map if `input_to_hidden`; n layers of

    y = layer_norm(x)                         if layer_norm, and not normalize_after
    u = input(down(y)) or input(y)            u0 | u1 | u2, and u3 where x is of another width
    x = recurrence(u, x)                      engine/ops/sru.py; x' is x, not y
    x = layer_norm(x)                         if normalize_after

then the head (the embedding's matrix if tied). There is no residual stream besides the highway, and
no norm behind the last layer. LanguageModel says what its methods do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from engine.models import program
from engine.models.language_model import LanguageModel, RecurrentLayer
from engine.models.program import LayerProgram, Stage
from engine.models.quantized import linear
from engine.models.sru.config import SruConfig
from engine.ops import sru_scan, sru_scan_train, sru_step


class Layer(RecurrentLayer):
    """One layer; `scan`, `step` and `forward` compute the same function.

    The rows of `input` are u0 | u1 | u2 (| u3). `weight_c` and `gate_bias` are forget | reset.
    Initial values are the package's.
    """

    def __init__(self, config: SruConfig, index: int) -> None:
        super().__init__()
        width, hidden, inner = config.inputs(index), config.d_model, config.projected(index)
        self.tanh, self.scale_x = config.tanh, config.scale_x
        self.highway = config.skip_term and config.parts(index) == 3
        self.normalize_after = config.normalize_after
        self.input_to_hidden = (
            linear(config, config.d_embedding, hidden, bias=False)
            if config.input_to_hidden and index == 0
            else None
        )
        self.layer_norm = (
            nn.LayerNorm(hidden if config.normalize_after else width, eps=config.norm_eps)
            if config.layer_norm
            else None
        )
        self.down = linear(config, width, inner, bias=False) if inner else None
        self.input = linear(config, inner or width, config.parts(index) * hidden, bias=False)
        self.weight_c: nn.Parameter | None = None
        if config.weight_c:
            self.weight_c = nn.Parameter(torch.empty(2 * hidden))
        self.gate_bias = nn.Parameter(torch.zeros(2 * hidden))
        if config.quantization is None and not self.gate_bias.is_meta:
            self._initialize(inner or width)

    def _initialize(self, inputs: int) -> None:
        bound = (3 / inputs) ** 0.5
        nn.init.uniform_(self.input.weight, -bound, bound)
        if self.weight_c is not None:
            nn.init.uniform_(self.weight_c, -(1.5**0.5), 1.5**0.5)

    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, width]; updates cell [rows, d_model]."""
        u, highway = self._inputs(x)
        weight_c, bias = self._of_gates(per_channel)
        return self._output(
            sru_scan(
                *(u, highway, weight_c, bias, cu_seqlens, state["cell"], slots),
                scale_x=self.scale_x,
                tanh=self.tanh,
            )
        )

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, width]; updates the state as `scan` does."""
        u, highway = self._inputs(x)
        weight_c, bias = self._of_gates(per_channel)
        return self._output(
            sru_step(
                *(u, highway, weight_c, bias, state["cell"], slots),
                scale_x=self.scale_x,
                tanh=self.tanh,
            )
        )

    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, width], differentiably, from the initial state."""
        batch, time, _ = x.shape
        u, highway = self._inputs(x.flatten(0, 1))
        weight_c, bias = self._of_gates(per_channel)
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * time
        h, _ = sru_scan_train(
            u, highway, weight_c, bias, bounds, scale_x=self.scale_x, tanh=self.tanh
        )
        return self._output(h.view(batch, time, -1))

    def vectors(self) -> Tensor:
        """Return weight_c | gate_bias, fp32 (fp64 of fp64) [4 * d_model], differentiable.

        Where the gates do not see the state, it is the bias alone [2 * d_model].
        """
        parts = [self.gate_bias] if self.weight_c is None else [self.weight_c, self.gate_bias]
        return torch.cat(
            [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        )

    def _of_gates(self, per_channel: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return what the gates see of the state, and their bias, of `vectors`."""
        assert per_channel is not None
        if self.weight_c is None:
            return None, per_channel
        weight_c, bias = per_channel.chunk(2)
        return weight_c, bias

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return u and the highway's input, if it is no part of u."""
        if self.input_to_hidden is not None:
            x = self.input_to_hidden(x)
        y = x if self.layer_norm is None or self.normalize_after else self.layer_norm(x)
        u: Tensor = self.input(y if self.down is None else self.down(y))
        return u, x if self.highway else None

    def _output(self, h: Tensor) -> Tensor:
        if self.layer_norm is None or not self.normalize_after:
            return h
        normed: Tensor = self.layer_norm(h)
        return normed

    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""
        stages: list[Stage] = []
        if self.input_to_hidden is not None:
            stages += [program.Linear(self.input_to_hidden), program.Replace()]
        norm = [] if self.layer_norm is None else [program.LayerNorm(self.layer_norm)]
        if not self.normalize_after:
            stages += norm
        if self.down is not None:
            stages.append(program.Linear(self.down))
        stages += [
            program.Linear(self.input),
            program.SruRecurrence(
                *(*self._of_gates(per_channel), "cell"),
                highway=self.highway,
                scale_x=self.scale_x,
                tanh=self.tanh,
            ),
        ]
        if self.normalize_after:
            stages += norm
        return (*stages, program.Replace())


class SruLM(LanguageModel):
    """The language model that an SruConfig describes."""

    config: SruConfig
    has_last_norm = False
    float32_parameters = (".weight_c",)

    def __init__(self, config: SruConfig) -> None:
        super().__init__(config, lambda index: Layer(config, index))
        if config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        if config.quantization is not None:
            self.requires_grad_(False)

    def channel_parameters(self) -> Sequence[Tensor | None]:
        """Return each layer's vectors of its gates (Layer.vectors)."""
        return [layer.vectors() for layer in cast("Sequence[Layer]", self.layers)]
