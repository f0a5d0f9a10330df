"""StateSpaceLayers: the layers of Mamba and Mamba-2 on a GPU, with any matrix product.

A layer begins with the norm, which first adds the product before it to the residual stream (that
is fp32, so no product of the library can add to it), and has a product at either end. Folded
layers have neither the norm nor the convolution as kernels of their own: on Hopper these are
epilogues of the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from engine.models.backends.blocks import last_norm
from engine.models.language_model import LanguageModel
from engine.models.program import Conv
from engine.models.quantized import QuantLinear
from engine.models.state import ModelState
from engine.ops.fused_norm import added_rms_norm_
from engine.ops.gemm import SQUARE_ROWS, linear_convolve, linear_map, linear_residual_

# What the epilogues take.
MOST_FOLDED_ROWS = 64
_FOLDED_TAPS, _FOLDED_CHANNELS = 4, 4

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> x weight^T + bias


class Block(Protocol):
    """What the layers of both have: SelectiveBlock and SsdBlock (blocks.py)."""

    @property
    def norm(self) -> nn.RMSNorm:
        """The norm of the residual stream."""

    @property
    def inputs(self) -> nn.Linear | QuantLinear:
        """The in projection."""

    @property
    def conv(self) -> Conv:
        """The convolution of some of the in projection's channels."""

    @property
    def out(self) -> nn.Linear | QuantLinear:
        """The out projection."""


class StateSpaceLayers(ABC):
    """The layers of `model`, computed with any matrix product."""

    def __init__(self, model: LanguageModel, blocks: Sequence[Block]) -> None:
        self._model, self._blocks = model, blocks
        self._norms = [
            norm.weight for norm in [*(block.norm for block in blocks), last_norm(model)]
        ]
        self._eps = model.config.norm_eps

    @abstractmethod
    def step(self, product: Product, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token each; return hidden states [batch, d_model], as LanguageModel.step."""

    @abstractmethod
    def folded_step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Compute `step` of up to MOST_FOLDED_ROWS tokens, on Hopper, of layers that `folds`."""

    @property
    def folds(self) -> bool:
        """Whether `folded_step` can run these layers."""
        return self._model.config.d_model % SQUARE_ROWS == 0 and all(
            block.conv.weight.shape[1] == _FOLDED_TAPS
            and not block.conv.weight.shape[0] % _FOLDED_CHANNELS
            for block in self._blocks
        )

    @abstractmethod
    def prefill(
        self,
        product: Product,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
    ) -> Tensor:
        """Read packed prompts; return hidden states [tokens, d_model], as LanguageModel.prefill."""

    def weights(self, prompts: bool) -> list[list[Tensor]]:
        """Return the matrices of all products of a step or a prompt, each with those alike."""
        return [
            [cast("nn.Linear", block.inputs).weight for block in self._blocks],
            [cast("nn.Linear", block.out).weight for block in self._blocks],
        ]

    @torch.no_grad()
    def _read(
        self, product: Product, tokens: Tensor, recur: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Read tokens; `recur`: layer index, in projection -> the out projection's input."""
        stream, y = self._model.embed(tokens), None
        for index, block in enumerate(self._blocks):
            normed = added_rms_norm_(stream, y, self._eps, self._norms[index])
            inputs, out = cast("nn.Linear", block.inputs), cast("nn.Linear", block.out)
            projected = product(normed, inputs.weight, inputs.bias)
            y = product(recur(index, projected), out.weight, out.bias)
        return added_rms_norm_(stream, y, self._eps, self._norms[-1])

    @torch.no_grad()
    def _read_folded(
        self,
        tokens: Tensor,
        state: ModelState,
        slots: Tensor,
        recur: Callable[[int, Tensor, Tensor], Tensor],
        *,
        first_convolved: int,
    ) -> Tensor:
        """Read tokens with folded layers.

        `recur`: layer index, in projection, its convolved channels, of which `first_convolved` is
        the first -> the out projection's input.
        """
        stream = self._model.embed(tokens)
        normed = added_rms_norm_(stream, None, self._eps, self._norms[0])
        squares: Tensor | None = None  # the first norm is no epilogue
        for index, block in enumerate(self._blocks):
            inputs, out = cast("nn.Linear", block.inputs), cast("nn.Linear", block.out)
            conv = block.conv
            projected, convolved = linear_convolve(
                *(normed, squares, self._eps, inputs.weight, inputs.bias),
                *(conv.weight, conv.bias, state[conv.state][index], slots, first_convolved),
            )
            y = recur(index, projected, convolved)
            if index + 1 < len(self._blocks):
                following = self._norms[index + 1]
                normed, squares = linear_residual_(y, out.weight, out.bias, stream, following)
        last = linear_map(y, None, 0.0, out.weight, out.bias)
        return added_rms_norm_(stream, last, self._eps, self._norms[-1])
