"""FusedGemmPath: the layers of an LM as linear maps on Hopper, each with its neighbours folded in.

A layer is four kernels (six with a convolution): gates and recurrence, out projection and residual,
MLP up and GELU, MLP down and residual. Norms have no kernel of their own: who writes the residual
stream also writes what the next norm needs of it. Each kernel asks for its first weights before the
one ahead of it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from torch import Tensor, nn

from engine.models.backends.lm_head import LmHead
from engine.models.minrnn.cell import Cell
from engine.models.minrnn.conv import CausalConv
from engine.models.minrnn.lm import LM, Layer
from engine.models.state import ModelState
from engine.ops import conv_scan, conv_step
from engine.ops.gemm import linear_embed, linear_map, linear_residual_, linear_step


class Stream(NamedTuple):
    """The residual stream [tokens, d_model], and for the norm that comes next what it leaves to be
    divided, and the sums of squares to divide by."""

    x: Tensor
    scaled: Tensor
    squares: Tensor


_Convolve = Callable[[int, CausalConv, Tensor], Tensor]  # layer's number, its module, x
_Recur = Callable[[int, Cell, Tensor, Tensor], Tensor]  # ..., x, its sums of squares


class FusedGemmPath:
    """Of `model`, the weights of whose layers' norms are ones, as move_norm_weights leaves them:
    these norms read the residual stream itself. With `fixed_order` a row's bits depend on that row
    alone.

    `normed` says whether a stream's end has what the model's last norm needs."""

    def __init__(self, model: LM, head: LmHead, *, fixed_order: bool) -> None:
        self._model = model
        self._head = head
        self._fixed_order = fixed_order
        self._layers = list(cast("Iterable[Layer]", model.layers))
        self._eps = model.config.norm_eps
        self._linear_candidate = model.config.candidate == "linear"

    def step(
        self, tokens: Tensor, state: ModelState, slots: Tensor, *, normed: bool = True
    ) -> Stream:
        """One token of every sequence, as ModelBackend.step has them."""

        def convolve(index: int, conv: CausalConv, x: Tensor) -> Tensor:
            assert state.conv is not None
            return conv_step(x, conv.weight, conv.bias, state.conv[index], slots)

        def recur(index: int, cell: Cell, scaled: Tensor, squares: Tensor) -> Tensor:
            return linear_step(
                scaled,
                squares,
                self._eps,
                cell.gates.weight,
                cell.gates.bias,
                state.cell[index],
                slots,
                self._linear_candidate,
                self._model.config.normalize_gates,
                self._fixed_order,
            )

        return self._read(tokens, convolve, recur, normed)

    def prefill(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
        *,
        normed: bool = True,
    ) -> Stream:
        """Packed prompts, as ModelBackend.prefill has them."""

        def convolve(index: int, conv: CausalConv, x: Tensor) -> Tensor:
            assert state.conv is not None
            return conv_scan(x, conv.weight, conv.bias, cu_seqlens, state.conv[index], slots)

        def recur(index: int, cell: Cell, scaled: Tensor, squares: Tensor) -> Tensor:
            gates = cell.gates
            pre = self._map(scaled, squares, gates.weight, gates.bias)
            return cell.recur(pre, state.cell[index], cu_seqlens, slots)

        return self._read(tokens, convolve, recur, normed)

    def logits(self, x: Tensor, squares: Tensor | None) -> Tensor:
        """[tokens, vocabulary] fp32, of a stream's end or of hidden states."""
        logits = self._map(x, squares, self._head.weight, self._head.bias, logits=True)
        return logits[:, : self._model.config.vocab_size]

    def middle(self, layer: Layer, h: Tensor, x: Tensor) -> Tensor | None:
        """A Middle of products.py."""
        out, mlp = cast("nn.Linear", layer.cell.out), layer.mlp
        if mlp is None:
            self._add(h, out, x, None)
            return None
        up, down = cast("nn.Linear", mlp.up), cast("nn.Linear", mlp.down)
        scaled, squares = self._add(h, out, x, mlp.norm.weight, ahead=down.bias)
        return self._map(scaled, squares, up.weight, up.bias, gelu=True)

    def _read(self, tokens: Tensor, convolve: _Convolve, recur: _Recur, normed: bool) -> Stream:
        """All layers."""
        first = self._layers[0]
        norm: Tensor | None = None if first.conv is not None else first.cell_norm.weight
        table = self._model.embedding.weight
        x, _, squares = linear_embed(tokens, table, None, squares=norm is not None)
        scaled = x
        for index, layer in enumerate(self._layers):
            if layer.conv is not None:
                mix = cast("nn.Linear", layer.conv.pointwise)
                y = convolve(index, layer.conv, x)
                norm = layer.cell_norm.weight
                scaled, squares = self._add(y, mix, x, norm)
            h = recur(index, layer.cell, scaled, squares)
            norm = self._norm_after_cell(index, normed)
            out = cast("nn.Linear", layer.cell.out)  # hopper.supports() has seen to it
            scaled, squares = self._add(h, out, x, norm)
            if layer.mlp is not None:
                up, down = cast("nn.Linear", layer.mlp.up), cast("nn.Linear", layer.mlp.down)
                y = self._map(scaled, squares, up.weight, up.bias, gelu=True)
                norm = self._norm_after_layer(index, normed)
                scaled, squares = self._add(y, down, x, norm)
        return Stream(x, scaled, squares)

    def _map(
        self, x: Tensor, squares: Tensor | None, weight: Tensor, bias: Tensor | None, **how: bool
    ) -> Tensor:
        fixed = self._fixed_order
        return linear_map(x, squares, self._eps, weight, bias, fixed_order=fixed, **how)

    def _add(
        self,
        y: Tensor,
        module: nn.Linear,
        x: Tensor,
        norm: Tensor | None,
        ahead: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Adds to x; what a norm with this weight reads, and its sums of squares."""
        # What is added ahead is not the norm's.
        ones = ahead is None and self._is_of_ones(norm)
        weight, bias = module.weight, module.bias
        scaled, squares = linear_residual_(
            y, weight, bias, x, None if ones else norm, self._fixed_order, ahead, ones
        )
        return x if ones else scaled, squares

    def _is_of_ones(self, norm: Tensor | None) -> bool:
        return norm is not None and norm is not self._model.norm.weight

    def _norm_after_cell(self, index: int, normed: bool) -> Tensor | None:
        mlp = self._layers[index].mlp
        return self._norm_after_layer(index, normed) if mlp is None else mlp.norm.weight

    def _norm_after_layer(self, index: int, normed: bool) -> Tensor | None:
        """None: who comes next reads the residual stream itself."""
        if index + 1 == len(self._layers):
            return self._model.norm.weight if normed else None
        following = self._layers[index + 1]
        return None if following.conv is not None else following.cell_norm.weight
