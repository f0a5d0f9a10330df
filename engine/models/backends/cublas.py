"""CublasPath: an LM whose matrix products are the library's, with one kernel between two of them.

For many tokens nothing multiplies quicker than the library; what it leaves undone between its
products would take half as long again. A layer is four products and two kernels: a cell's step (or
norm and scan), and GELU. The residual stream is added up by the products themselves, and norms have
left their weights in the matrices that read them (engine/ops/fused_norm.py).

A caller that has quicker kernels for the middle of a layer, from the out projection to GELU, brings
them (`Middle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from engine.models.backends.autotune import TunedProducts
from engine.models.backends.lm_head import LmHead
from engine.models.backends.weight_transforms import move_norm_weights
from engine.models.minrnn.cell import Cell
from engine.models.minrnn.conv import CausalConv
from engine.models.minrnn.lm import LM, Layer
from engine.models.state import ModelState
from engine.ops import library
from engine.ops.fused_norm import normed_gelu_, normed_step_, rms_norm

_Convolve = Callable[[int, CausalConv, Tensor], Tensor]  # layer's number, its module, x
_Recur = Callable[[int, Layer, Tensor], Tensor]  # ..., x -> h
#: layer, h, x -> an MLP's hidden channels, past GELU, or None without one. Adds the out projection
#: to x, its bias included, and, when the MLP's norm has been seen to, the bias of its lower half.
Middle = Callable[[Layer, Tensor, Tensor], Tensor | None]


def supports(model: LM) -> bool:
    """Whether its widths and its bfloat16 weights, on any GPU, are what the kernels take. (In
    float16 products with the residual stream itself, not divided yet, could overflow.)"""
    config, norm = model.config, model.norm.weight
    return (
        norm.is_cuda
        and norm.dtype == torch.bfloat16
        and library.has_cuda_kernels()
        and config.quantization is None
        and config.out_projection
        and all(width % 8 == 0 for width in (config.d_model, config.inner, config.mlp_hidden))
    )


class CublasPath:
    """`model`, which `supports` says yes to.

    Gives it other weights, as move_norm_weights does.
    """

    def __init__(self, model: LM, head: LmHead) -> None:
        """`head`: the model's."""
        self._model = model
        self._layers = list(cast("Iterable[Layer]", model.layers))
        self._eps = model.config.norm_eps
        self._products = TunedProducts()
        self._head = head
        move_norm_weights(model)

    @torch.no_grad()
    def tune(self, tokens: Iterable[int], logits: Iterable[int]) -> None:
        """Looks for the quickest products of so many tokens, and of so many rows of logits. Waits
        for the device."""
        for count in tokens:
            for module in ("cell.gates", "mlp.up"):
                self._products.tune(self._weights(module), count)
            for module in ("cell.out", "mlp.down"):
                self._products.tune(self._weights(module), count, add=True)
        for count in logits:
            self._products.tune([self._head.weight], count, single=True)
        torch.cuda.empty_cache()  # of what was multiplied

    @torch.no_grad()
    def tune_around(self, tokens: Iterable[int]) -> None:
        """The same of so many tokens that are read with a Middle."""
        for count in tokens:
            self._products.tune(self._weights("cell.gates"), count)
            self._products.tune(self._weights("mlp.down"), count, add=True)
        torch.cuda.empty_cache()

    def _weights(self, module: str) -> list[Tensor]:
        """Of this module of all layers, where they have it."""
        if module.startswith("mlp") and not self._model.config.mlp_hidden:
            return []
        return [cast("nn.Linear", layer.get_submodule(module)).weight for layer in self._layers]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """As LM.logits."""
        logits, bias = self._products.single(hidden, self._head.weight), self._head.bias
        return (logits if bias is None else logits + bias)[:, : self._model.config.vocab_size]

    @torch.no_grad()
    def step(
        self, tokens: Tensor, state: ModelState, slots: Tensor, middle: Middle | None = None
    ) -> Tensor:
        """As LM.step: hidden states [batch, d_model]."""

        def convolve(index: int, conv: CausalConv, x: Tensor) -> Tensor:
            assert state.conv is not None
            return conv.step(x, state.conv[index], slots)

        def recur(index: int, layer: Layer, x: Tensor) -> Tensor:
            config, gates = self._model.config, layer.cell.gates
            return normed_step_(
                x,
                self._eps,
                self._products.product(x, gates.weight),
                gates.bias,
                None if middle is not None else cast("nn.Linear", layer.cell.out).bias,
                state.cell[index],
                slots,
                config.candidate == "linear",
                config.normalize_gates,
            )

        return self._read(tokens, convolve, recur, middle)

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
        middle: Middle | None = None,
    ) -> Tensor:
        """As LM.prefill: hidden states [tokens, d_model]."""

        def convolve(index: int, conv: CausalConv, x: Tensor) -> Tensor:
            assert state.conv is not None
            return conv.scan(x, state.conv[index], cu_seqlens, slots)

        def recur(index: int, layer: Layer, x: Tensor) -> Tensor:
            cell: Cell = layer.cell
            normed = rms_norm(x, self._eps, layer.cell_norm.weight)
            gates = cell.gates
            if gates.bias is None:
                pre = self._products.product(normed, gates.weight)
            else:
                pre = gates(normed)
            h = cell.recur(pre, state.cell[index], cu_seqlens, slots)
            bias = cast("nn.Linear", cell.out).bias
            if bias is not None and middle is None:
                x += bias
            return h

        return self._read(tokens, convolve, recur, middle)

    def _read(
        self, tokens: Tensor, convolve: _Convolve, recur: _Recur, middle: Middle | None
    ) -> Tensor:
        """Without a `middle`, `recur` adds the bias of the out projection to x, ahead of it."""
        x: Tensor = self._model.embedding(tokens)
        for index, layer in enumerate(self._layers):
            if layer.conv is not None:
                x += convolve(index, layer.conv, x)
            h = recur(index, layer, x)
            y = self._middle(layer, h, x) if middle is None else middle(layer, h, x)
            if layer.mlp is not None and y is not None:
                down = cast("nn.Linear", layer.mlp.down)
                self._products.add_(x, y, down.weight)
        return rms_norm(x, self._eps, self._model.norm.weight)

    def _middle(self, layer: Layer, h: Tensor, x: Tensor) -> Tensor | None:
        """As a Middle, but for the out projection's bias (see _read)."""
        self._products.add_(x, h, cast("nn.Linear", layer.cell.out).weight)
        if layer.mlp is None:
            return None
        up, down = cast("nn.Linear", layer.mlp.up), cast("nn.Linear", layer.mlp.down)
        y = self._products.product(x, up.weight)
        normed_gelu_(x, self._eps, y, up.bias, down.bias)
        return y
