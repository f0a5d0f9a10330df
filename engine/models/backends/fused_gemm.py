"""FusedGemmPath: a model's layers as linear maps on Hopper, each fused with its neighbours.

A layer is four kernels (six with a convolution): gates and recurrence, out projection and residual,
MLP up and activation, MLP down and residual. Norms have no kernel of their own: a kernel that
writes the residual stream also writes what the next norm needs, and HGRN's step what the norm
behind it needs. (In prompts, where a scan is between gates and out projection, that norm is a
kernel.) Each kernel prefetches its first weights before the previous one has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from engine.models.backends import kernel_support
from engine.models.backends.blocks import (
    Block,
    BlockModel,
    Mlp,
    Support,
    compile_blocks,
    last_norm,
    lower_bounds,
)
from engine.models.backends.dispatch import ANY, FEW_ROWS, ExecutionPath, Workload
from engine.models.backends.kernel_support import lacks_hopper_kernels
from engine.models.backends.lm_head import LmHead, SeparateHead
from engine.models.language_model import LanguageModel
from engine.models.program import Conv
from engine.models.state import ModelState
from engine.ops import conv_scan, conv_step
from engine.ops.fused_norm import gated_rms_norm, rms_norm
from engine.ops.gemm import (
    SQUARE_ROWS,
    linear_best,
    linear_embed,
    linear_map,
    linear_residual_,
    linear_step,
    linear_swiglu,
)

NAME = "fused_gemm"
NAME_TO_HEAD = "fused_gemm to a head"  # the head is a separate kernel
SUPPORT = Support(cells=("mingru", "minlstm", "hgrn"), activations=("gelu", "swiglu"))

_MOST_TOKENS = 65_535 * 128  # the largest vocabulary: the rows of a grid, a tile of the head each

# What `supports` requires of a model's widths, in words.
WIDTHS = (
    f"d_model a multiple of {SQUARE_ROWS}, inner and MLP widths multiples of 8 (inner of "
    f"{SQUARE_ROWS} with an output gate), an out projection, a vocabulary of up to {_MOST_TOKENS:,}"
)


def supports(model: LanguageModel, device: torch.device) -> str | None:
    """Return why FusedGemmPath cannot run `model`, whose weights are on `device`; None: it can."""
    return lacks_hopper_kernels(model, device, SUPPORT) or refuses_model(model)


def refuses_model(model: LanguageModel) -> str | None:
    """Return why FusedGemmPath cannot run `model` on any GPU; None: it can on Hopper."""
    reason = kernel_support.refuses_model(model, SUPPORT)
    if reason is not None:
        return reason
    if model.config.quantization is not None:
        return f"weights are {model.config.quantization}"
    return None if supports_widths(compile_blocks(model)) else f"widths do not meet: {WIDTHS}"


def supports_widths(model: BlockModel) -> bool:
    """Return whether the widths meet WIDTHS; the out projection is not checked."""
    return (
        model.config.d_model % SQUARE_ROWS == 0
        and model.inner % (8 if model.blocks[0].gated_norm is None else SQUARE_ROWS) == 0
        and model.hidden % 8 == 0
        and model.config.vocab_size <= _MOST_TOKENS
    )


class Stream(NamedTuple):
    """The residual stream [tokens, d_model], and the input of the norm that comes next.

    `scaled` is to be divided by the root mean square that follows from `squares`, the sums of
    squares.
    """

    x: Tensor
    scaled: Tensor
    squares: Tensor


_Convolve = Callable[[int, Conv, Tensor], Tensor]  # layer index, convolution, x
# layer index, block, x, its sums of squares -> the out projection's input, and the sums of squares
# that its product is still to be divided by; None: it is not
_Recur = Callable[[int, Block, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class FusedGemmPath:
    """Execution of `model`, whose layers' norms must have weights of 1 (see move_norm_weights).

    These norms then read the residual stream itself. With `fixed_order` a row's bits depend only on
    that row. `normed` says whether to compute what the model's last norm needs.
    """

    def __init__(self, model: LanguageModel, head: LmHead, *, fixed_order: bool) -> None:
        self._model = model
        self._head = head
        self._fixed_order = fixed_order
        self._blocks = compile_blocks(model).blocks
        self._lower_bounds = lower_bounds(self._blocks)
        self._last_norm = last_norm(model)
        self._eps, self._vocabulary = model.config.norm_eps, model.config.vocab_size

    def step(
        self, tokens: Tensor, state: ModelState, slots: Tensor, *, normed: bool = True
    ) -> Stream:
        """Read one token of every sequence; arguments as for ModelBackend.step."""

        def convolve(index: int, conv: Conv, x: Tensor) -> Tensor:
            return conv_step(x, conv.weight, conv.bias, state[conv.state][index], slots)

        def recur(
            index: int, block: Block, scaled: Tensor, squares: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            how = block.recurrence
            out, of_h = linear_step(
                scaled,
                squares,
                self._eps,
                block.gates.weight,
                block.gates.bias,
                state[how.state][index],
                slots,
                how.cell,
                how.linear_candidate,
                how.normalize_gates,
                self._fixed_order,
                self._lower_bounds[index],
            )
            return out, None if block.gated_norm is None else of_h

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
        """Read packed prompts; arguments as for ModelBackend.prefill."""

        def convolve(index: int, conv: Conv, x: Tensor) -> Tensor:
            return conv_scan(x, conv.weight, conv.bias, cu_seqlens, state[conv.state][index], slots)

        def recur(index: int, block: Block, scaled: Tensor, squares: Tensor) -> tuple[Tensor, None]:
            how, gates = block.recurrence, block.gates
            pre = self._map(scaled, squares, gates.weight, gates.bias)
            hidden, bound = state[how.state][index], self._lower_bounds[index]
            h = block.operators.scan(how, pre, hidden, cu_seqlens, slots, bound)
            if block.gated_norm is not None:
                h = gated_rms_norm(h, pre[:, -block.inner :], None, self._eps)
            return h, None

        return self._read(tokens, convolve, recur, normed)

    def logits(self, x: Tensor, squares: Tensor | None) -> Tensor:
        """Return logits [tokens, vocabulary] fp32, of a stream's end or of hidden states."""
        logits = self._map(x, squares, self._head.weight, self._head.bias, logits=True)
        return logits[:, : self._model.config.vocab_size]

    def step_to_logits(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Run a step; see ModelBackend.step."""
        _, scaled, squares = self.step(tokens, state, slots)
        return self.logits(scaled, squares)

    def step_to_hidden(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Run a step; return hidden states [batch, d_model], for a separate head."""
        return self._norm(self.step(tokens, state, slots, normed=False).x)

    def prefill_to_hidden(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Read packed prompts; see ModelBackend.prefill."""
        if not self._fixed_order:
            return self._norm(self.prefill(tokens, cu_seqlens, state, slots, normed=False).x)
        _, scaled, squares = self.prefill(tokens, cu_seqlens, state, slots)
        mean = _sum_in_pairs(squares) / scaled.shape[1]  # [tokens]
        hidden: Tensor = (scaled * (mean + self._eps).rsqrt().unsqueeze(-1)).to(scaled.dtype)
        return hidden

    def step_to_bests(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Run a step; return the input of `sample_best_`, int64 [batch, parts].

        In a fixed order, the logits in it are bitwise those of `step_to_logits`.
        """
        head = self._head
        if self._fixed_order:
            _, scaled, squares = self.step(tokens, state, slots)
            return linear_best(scaled, squares, self._eps, head.weight, head.bias, self._vocabulary)
        if head.bias is None:
            # The norm divides all logits of a row by one number, which does not change their order.
            x = self.step(tokens, state, slots).scaled
        else:
            x = self.step_to_hidden(tokens, state, slots)
        return linear_best(x, None, 0.0, head.weight, head.bias, self._vocabulary)

    def _norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._eps, self._last_norm.weight)

    def middle(self, block: Block, h: Tensor, x: Tensor) -> Tensor | None:
        """Compute the middle of a layer: a Middle (cublas.py)."""
        out, mlp = cast("nn.Linear", block.out), block.mlp
        if mlp is None:
            self._add(h, out, x, None)
            return None
        down = cast("nn.Linear", mlp.down)
        scaled, squares = self._add(h, out, x, mlp.norm.weight, ahead=down.bias)
        return self._activated(mlp, scaled, squares)

    def _read(self, tokens: Tensor, convolve: _Convolve, recur: _Recur, normed: bool) -> Stream:
        """Read tokens through all layers."""
        first = self._blocks[0]
        norm: Tensor | None = None if first.mixer is not None else first.norm.weight
        table = self._model.embedding.weight
        x, _, squares = linear_embed(tokens, table, None, squares=norm is not None)
        scaled = x
        for index, block in enumerate(self._blocks):
            if block.mixer is not None:
                mix = cast("nn.Linear", block.mixer.mix)
                y = convolve(index, block.mixer.conv, x)
                norm = block.norm.weight
                scaled, squares = self._add(y, mix, x, norm)
            h, of_h = recur(index, block, scaled, squares)
            norm = self._norm_after_cell(index, normed)
            out = cast("nn.Linear", block.out)  # hopper.supports() has checked it
            scaled, squares = self._add(h, out, x, norm, y_squares=of_h)
            if block.mlp is not None:
                y = self._activated(block.mlp, scaled, squares)
                norm = self._norm_after_layer(index, normed)
                scaled, squares = self._add(y, cast("nn.Linear", block.mlp.down), x, norm)
        return Stream(x, scaled, squares)

    def _activated(self, mlp: Mlp, x: Tensor, squares: Tensor) -> Tensor:
        """Compute the MLP's hidden channels after the activation."""
        up = cast("nn.Linear", mlp.up)
        if mlp.activation == "swiglu":
            return linear_swiglu(x, squares, self._eps, up.weight, up.bias, self._fixed_order)
        return self._map(x, squares, up.weight, up.bias, gelu=True)

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
        y_squares: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add a product to x; return the input of a norm with this weight and its squares' sums.

        With `y_squares` the product is divided by the norm that they give.
        """
        # What is added ahead is not part of the norm's input.
        ones = ahead is None and self._is_of_ones(norm)
        weight, bias = module.weight, module.bias
        scaled, squares = linear_residual_(
            y,
            weight,
            bias,
            x,
            None if ones else norm,
            self._fixed_order,
            ahead,
            ones,
            y_squares,
            self._eps,
        )
        return x if ones else scaled, squares

    def _is_of_ones(self, norm: Tensor | None) -> bool:
        return norm is not None and norm is not self._last_norm.weight

    def _norm_after_cell(self, index: int, normed: bool) -> Tensor | None:
        mlp = self._blocks[index].mlp
        return self._norm_after_layer(index, normed) if mlp is None else mlp.norm.weight

    def _norm_after_layer(self, index: int, normed: bool) -> Tensor | None:
        """Return the weight of the norm after the layer; None: no norm follows directly."""
        if index + 1 == len(self._blocks):
            return self._last_norm.weight if normed else None
        following = self._blocks[index + 1]
        return None if following.mixer is not None else following.norm.weight


def path(chain: FusedGemmPath, *, bests: bool = False) -> ExecutionPath:
    """Return the path for all sizes, with which the others are compared.

    `bests`: its steps may end with the best tokens.
    """
    return ExecutionPath(
        name=NAME,
        sizes={"step": ANY, "prompt": ANY},
        unmeasured={"step": ANY, "prompt": ANY},
        step=chain.step_to_logits,
        step_to_bests=chain.step_to_bests if bests else None,
        prefill=chain.prefill_to_hidden,
    )


def path_to_head(chain: FusedGemmPath, head: SeparateHead) -> ExecutionPath:
    """Return the path of steps of many rows that end before the head."""

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        head.tune(sizes)

    many = range(FEW_ROWS + 1, sys.maxsize)
    return ExecutionPath(
        name=NAME_TO_HEAD,
        sizes={"step": many, "argmax": many} if head.finds_best else {"step": many},
        step=head.behind(chain.step_to_hidden),
        step_to_bests=chain.step_to_bests if head.finds_best else None,
        tune=tune,
    )


def _sum_in_pairs(rows: Tensor) -> Tensor:
    """Return the sum [tokens] of rows [n, tokens], n >= 1, in a fixed order.

    torch's sum adds in an order that depends on the number of tokens.
    """
    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat((rows[:half] + rows[half : 2 * half], rows[2 * half :]))
    return rows[0]
