"""CublasPath: a model with cuBLASLt matrix products, and one kernel between two of them.

For many tokens nothing multiplies faster than the library, but the work between its products would
take half as long again as separate operators. A layer is four products and two kernels: a cell's
step (or norm and scan, and HGRN's gated norm), and the MLP's activation. The products themselves
add to the residual stream, and the norms' weights have been folded into the matrices after them
(engine/ops/fused_norm.py).

A caller with faster kernels for the middle of a layer, from the out projection to the activation,
can pass them (`Middle`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from engine.models.backends.autotune import TunedProducts
from engine.models.backends.blocks import (
    Block,
    Mixer,
    Support,
    compile_blocks,
    last_norm,
    lower_bounds,
)
from engine.models.backends.dispatch import ANY, FEW_ROWS, ExecutionPath, Workload
from engine.models.backends.kernel_support import lacks_bfloat16_kernels
from engine.models.backends.lm_head import LmHead, SeparateHead
from engine.models.backends.tuning_cache import TuningCache
from engine.models.backends.weight_transforms import move_norm_weights
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState, Step
from engine.ops import conv_scan, conv_step
from engine.ops.fused_norm import (
    gated_rms_norm,
    normed_gelu_,
    normed_step_,
    normed_swiglu_,
    rms_norm,
)

_Convolve = Callable[[int, Mixer, Tensor], Tensor]  # layer index, convolution, x
# layer index, block, x -> the out projection's input
_Recur = Callable[[int, Block, Tensor], Tensor]
# block, h, x -> an MLP's hidden channels after the activation, or None without an MLP. It adds the
# out projection with its bias to x and, once the MLP's norm has been computed, the bias of the
# MLP's down projection.
Middle = Callable[[Block, Tensor, Tensor], Tensor | None]


NAME = "cublas"
NAME_AROUND = "cublas around fused_gemm"  # the middle of a layer is FusedGemmPath's
SUPPORT = Support(cells=("mingru", "minlstm", "hgrn"), activations=("gelu", "swiglu"))

# If nothing was timed, larger steps and prompts use products of the library: its large tiles fill
# the GPU, and outweigh the two extra kernels per layer. Measured on an H200.
_MOST_ROWS = 192
# for layers of less than _SMALL weights, where fewer kernels pay for longer
_MOST_ROWS_OF_SMALL_LAYERS = 1024
_SMALL = 4_000_000
_MOST_TOKENS = 192
_MOST_TOKENS_WITH_CONV = 384  # with the library's products a convolution needs three more kernels


def supports(model: LanguageModel, device: torch.device) -> str | None:
    """Return why CublasPath cannot run `model`, whose weights are on `device`; None: it can."""
    config = model.config
    reason = lacks_bfloat16_kernels(model, device, SUPPORT)
    if reason is not None:
        return reason
    if config.quantization is not None:
        return f"weights are {config.quantization}"
    blocks = compile_blocks(model)
    if any(width % 8 for width in (config.d_model, blocks.inner, blocks.hidden)):
        return "widths are not multiples of 8"
    return None


def unmeasured_sizes(model: LanguageModel) -> Mapping[Workload, range]:
    """Return the sizes at which library products are used on Hopper if nothing was timed."""
    if compile_blocks(model).taps:
        return {"prompt": range(_MOST_TOKENS_WITH_CONV + 1, sys.maxsize)}
    layer = next(iter(model.layers))
    small = sum(weight.numel() for weight in layer.parameters()) < _SMALL
    most = _MOST_ROWS_OF_SMALL_LAYERS if small else _MOST_ROWS
    return {"step": range(most + 1, sys.maxsize), "prompt": range(_MOST_TOKENS + 1, sys.maxsize)}


class CublasPath:
    """Execution of `model`, which must pass `supports`, with cuBLASLt and its own `head`.

    It changes the model's weights, as move_norm_weights does. `tuning` has earlier measurements of
    products.
    """

    def __init__(
        self, model: LanguageModel, head: LmHead, tuning: TuningCache | None = None
    ) -> None:
        self._model = model
        self._blocks = compile_blocks(model).blocks
        self._lower_bounds = lower_bounds(self._blocks)
        self._norm, self._eps = last_norm(model), model.config.norm_eps
        self._products = TunedProducts(tuning)
        self._head = head
        move_norm_weights(model)

    @torch.no_grad()
    def tune(self, tokens: Iterable[int], logits: Iterable[int]) -> None:
        """Find the fastest products for these numbers of tokens, and of rows of logits.

        Waits for the device.
        """
        for count in tokens:
            for module in ("gates", "mlp.up"):
                self._products.tune(self._weights(module), count)
            for module in ("out", "mlp.down"):
                self._products.tune(self._weights(module), count, add=True)
        for count in logits:
            self._products.tune([self._head.weight], count, single=True)
        torch.cuda.empty_cache()  # memory of the measurements

    def tune_logits(self, rows: Collection[int]) -> None:
        """Find the fastest products for these numbers of rows of logits only."""
        self.tune([], rows)

    @torch.no_grad()
    def tune_around(self, tokens: Iterable[int]) -> None:
        """Find the fastest products for these numbers of tokens, read with a Middle."""
        for count in tokens:
            self._products.tune(self._weights("gates"), count)
            self._products.tune(self._weights("mlp.down"), count, add=True)
        torch.cuda.empty_cache()  # memory of the measurements

    def _weights(self, module: str) -> list[Tensor]:
        """Return the weights of this module in all layers; empty if they do not have it."""
        if module.startswith("mlp") and self._blocks[0].mlp is None:
            return []
        return [cast("nn.Linear", attrgetter(module)(block)).weight for block in self._blocks]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits; see LanguageModel.logits."""
        logits, bias = self._products.single(hidden, self._head.weight), self._head.bias
        return (logits if bias is None else logits + bias)[:, : self._model.config.vocab_size]

    @torch.no_grad()
    def step(
        self, tokens: Tensor, state: ModelState, slots: Tensor, middle: Middle | None = None
    ) -> Tensor:
        """Read one token each; return hidden states [batch, d_model], as LanguageModel.step."""

        def convolve(index: int, mixer: Mixer, x: Tensor) -> Tensor:
            conv, inputs = mixer.conv, state[mixer.conv.state][index]
            y: Tensor = mixer.mix(conv_step(x, conv.weight, conv.bias, inputs, slots))
            return y

        def recur(index: int, block: Block, x: Tensor) -> Tensor:
            how, gates = block.recurrence, block.gates
            return normed_step_(
                x,
                self._eps,
                self._products.product(x, gates.weight),
                gates.bias,
                None if middle is not None else cast("nn.Linear", block.out).bias,
                state[how.state][index],
                slots,
                how.cell,
                how.linear_candidate,
                how.normalize_gates,
                self._lower_bounds[index],
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
        """Read packed prompts; return hidden states [tokens, d_model], as LanguageModel.prefill."""

        def convolve(index: int, mixer: Mixer, x: Tensor) -> Tensor:
            conv, inputs = mixer.conv, state[mixer.conv.state][index]
            mixed = conv_scan(x, conv.weight, conv.bias, cu_seqlens, inputs, slots)
            y: Tensor = mixer.mix(mixed)
            return y

        def recur(index: int, block: Block, x: Tensor) -> Tensor:
            how, gates = block.recurrence, block.gates
            normed = rms_norm(x, self._eps, block.norm.weight)
            if gates.bias is None:
                pre = self._products.product(normed, gates.weight)
            else:
                pre = gates(normed)
            hidden, bound = state[how.state][index], self._lower_bounds[index]
            h = block.operators.scan(how, pre, hidden, cu_seqlens, slots, bound)
            if block.gated_norm is not None:
                h = gated_rms_norm(h, pre[:, -block.inner :], None, self._eps)
            bias = cast("nn.Linear", block.out).bias
            if bias is not None and middle is None:
                x += bias
            return h

        return self._read(tokens, convolve, recur, middle)

    def _read(
        self, tokens: Tensor, convolve: _Convolve, recur: _Recur, middle: Middle | None
    ) -> Tensor:
        """Read tokens; without a `middle`, `recur` must add the out projection's bias to x."""
        x: Tensor = self._model.embedding(tokens)
        for index, block in enumerate(self._blocks):
            if block.mixer is not None:
                x += convolve(index, block.mixer, x)
            h = recur(index, block, x)
            y = self._middle(block, h, x) if middle is None else middle(block, h, x)
            if block.mlp is not None and y is not None:
                down = cast("nn.Linear", block.mlp.down)
                self._products.add_(x, y, down.weight)
        return rms_norm(x, self._eps, self._norm.weight)

    def _middle(self, block: Block, h: Tensor, x: Tensor) -> Tensor | None:
        """Compute the middle of a layer, except for the out projection's bias (see _read)."""
        self._products.add_(x, h, cast("nn.Linear", block.out).weight)
        if block.mlp is None:
            return None
        up, down = cast("nn.Linear", block.mlp.up), cast("nn.Linear", block.mlp.down)
        y = self._products.product(x, up.weight)
        if block.mlp.activation == "swiglu":
            return normed_swiglu_(x, self._eps, y, up.bias, down.bias)
        normed_gelu_(x, self._eps, y, up.bias, down.bias)
        return y


def base_path(products: CublasPath) -> ExecutionPath:
    """Return the only path of a table without a faster one for few tokens."""

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
    model: LanguageModel, products: CublasPath, middle: Middle, head: SeparateHead
) -> list[ExecutionPath]:
    """Return the paths to use beside one that is faster for few tokens.

    They are library products around its `middle` of a layer, and library products only.
    """

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
    # Of equally fast paths the first is taken, so the one with fewer library products comes first:
    # these use more power, and slow down a GPU at its power limit.
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
