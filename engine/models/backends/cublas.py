"""CublasPath: an LM whose matrix products are the library's, with one kernel between two of them.

For many tokens nothing multiplies quicker than the library; what it leaves undone between its
products would take half as long again. A layer is four products and two kernels: a cell's step (or
norm and scan), and GELU. The residual stream is added up by the products themselves, and norms have
left their weights in the matrices that read them (engine/ops/fused_norm.py).

A caller that has quicker kernels for the middle of a layer, from the out projection to GELU, brings
them (`Middle`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from engine.models.backends.autotune import TunedProducts
from engine.models.backends.dispatch import ANY, FEW_ROWS, ExecutionPath, Workload
from engine.models.backends.kernel_support import lacks_bfloat16_kernels
from engine.models.backends.lm_head import LmHead, SeparateHead
from engine.models.backends.tuning_cache import TuningCache
from engine.models.backends.weight_transforms import move_norm_weights
from engine.models.minrnn.cell import Cell
from engine.models.minrnn.conv import CausalConv
from engine.models.minrnn.lm import LM, Layer
from engine.models.state import ModelState, Step
from engine.ops.fused_norm import normed_gelu_, normed_step_, rms_norm

_Convolve = Callable[[int, CausalConv, Tensor], Tensor]  # layer's number, its module, x
_Recur = Callable[[int, Layer, Tensor], Tensor]  # ..., x -> h
#: layer, h, x -> an MLP's hidden channels, past GELU, or None without one. Adds the out projection
#: to x, its bias included, and, when the MLP's norm has been seen to, the bias of its lower half.
Middle = Callable[[Layer, Tensor, Tensor], Tensor | None]


NAME = "cublas"
NAME_AROUND = "cublas around fused_gemm"  # the middle of a layer is FusedGemmPath's

# Steps of more rows and prompts of more tokens are read with products of the library where nothing
# was timed: its large tiles fill the GPU, and they outweigh the two kernels a layer more. Measured
# on an H200.
_MOST_ROWS = 192
_MOST_ROWS_OF_SMALL_LAYERS = 1024  # of less than _SMALL weights: fewer kernels for longer
_SMALL = 4_000_000
_MOST_TOKENS = 192
_MOST_TOKENS_WITH_CONV = 384  # which the library's products would have three kernels more for


def supports(model: LM, device: torch.device) -> str | None:
    """Why CublasPath does not run `model`, whose weights are on `device`; None: it does."""
    config = model.config
    reason = lacks_bfloat16_kernels(model, device)
    if reason is not None:
        return reason
    if config.quantization is not None:
        return f"weights are {config.quantization}"
    if any(width % 8 for width in (config.d_model, config.inner, config.mlp_hidden)):
        return "widths are not multiples of 8"
    return None


def unmeasured_sizes(model: LM) -> Mapping[Workload, range]:
    """Sizes of which products of the library are taken on Hopper where nothing was timed."""
    if model.config.conv_kernel:
        return {"prompt": range(_MOST_TOKENS_WITH_CONV + 1, sys.maxsize)}
    layer = next(iter(model.layers))
    small = sum(weight.numel() for weight in layer.parameters()) < _SMALL
    most = _MOST_ROWS_OF_SMALL_LAYERS if small else _MOST_ROWS
    return {"step": range(most + 1, sys.maxsize), "prompt": range(_MOST_TOKENS + 1, sys.maxsize)}


class CublasPath:
    """`model`, which `supports` takes, with its own `head`.

    Gives it other weights, as move_norm_weights does. `tuning`: which products were the quickest.
    """

    def __init__(self, model: LM, head: LmHead, tuning: TuningCache | None = None) -> None:
        self._model = model
        self._layers = list(cast("Iterable[Layer]", model.layers))
        self._eps = model.config.norm_eps
        self._products = TunedProducts(tuning)
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

    def tune_logits(self, rows: Collection[int]) -> None:
        """The same of so many rows of logits alone."""
        self.tune([], rows)

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


def base_path(products: CublasPath) -> ExecutionPath:
    """The path of a table without any that is quicker for few tokens."""

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        return products.logits(products.step(tokens, state, slots))

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        products.tune(sizes, [] if workload == "prompt" else sizes)

    return ExecutionPath(
        name=NAME,
        sizes={"step": ANY, "prompt": ANY},
        unmeasured={"step": ANY, "prompt": ANY},
        step=step,
        prefill=products.prefill,
        tune=tune,
    )


def paths_of_many(
    model: LM, products: CublasPath, middle: Middle, head: SeparateHead
) -> list[ExecutionPath]:
    """The paths beside one that is quicker for few tokens: around its `middle` of a layer, and with
    products of the library alone."""

    def tune_around(workload: Workload, sizes: Collection[int]) -> None:
        products.tune_around(sizes)
        if workload != "prompt":
            head.tune(sizes)

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        products.tune(sizes, [])
        if workload != "prompt":
            head.tune(sizes)

    many = range(FEW_ROWS + 1, sys.maxsize)
    around: Step = partial(products.step, middle=middle)
    # Of paths that are alike the first is taken, so that with less of the library's products comes
    # first: the more of a step they are the more power it takes, and the slower a GPU becomes that
    # is at its limit.
    return [
        ExecutionPath(
            name=NAME_AROUND,
            sizes={"step": many, "prompt": many},
            step=head.behind(around),
            step_to_bests=head.bests_behind(around),
            prefill=partial(products.prefill, middle=middle),
            tune=tune_around,
        ),
        ExecutionPath(
            name=NAME,
            sizes={"step": many, "prompt": many},
            unmeasured=unmeasured_sizes(model),
            step=head.behind(products.step),
            step_to_bests=head.bests_behind(products.step),
            prefill=products.prefill,
            tune=tune,
        ),
    ]
