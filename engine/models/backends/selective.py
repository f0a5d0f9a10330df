"""SelectiveBackend: Mamba in bfloat16 on a GPU, with one kernel between two matrix products.

A layer of a step is four kernels where the epilogues of linear maps take the rest: the product to
x | z with the convolution and SiLU; the product that selects; the step, with the projection of its
time steps and the norms of Falcon-Mamba; the out product, which adds to the residual stream and
gives the next norm its inputs. That is on Hopper, for up to 64 sequences.

Else it is six kernels: the norm, which first adds the product before it to the residual
stream (that is fp32, so no product can add to it); the product to x | z; the convolution with SiLU;
the product that selects; the step, with the projection of its time steps and the norms of
Falcon-Mamba; the out product. A prompt has a product for its time steps and a scan.

The products are cuBLASLt's, or on Hopper linear maps that prefetch their weights while the kernel
before still runs. These can sum in a fixed order, and then every row's bits depend on that row
only, for all other kernels are of this kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.backend_info import BackendInfo, PathInfo
from engine.models.backends.autotune import TunedProducts
from engine.models.backends.blocks import (
    SelectiveBlock,
    Support,
    compile_selective,
)
from engine.models.backends.dispatch import (
    ANY,
    FEW_ROWS,
    ExecutionPath,
    PathBackend,
    Row,
    Workload,
    usable_paths,
)
from engine.models.backends.kernel_support import lacks_bfloat16_kernels, lacks_hopper_kernels
from engine.models.backends.lm_head import LmHead, SeparateHead
from engine.models.backends.tuning_cache import TuningCache
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState, Step
from engine.ops import conv_scan, conv_step, selective_scan
from engine.ops.fused_norm import added_rms_norm_
from engine.ops.gemm import SQUARE_ROWS, linear_convolve, linear_map, linear_residual_
from engine.ops.selective import pack_dt_weight, selected_step

BACKEND = "selective"
NAME = "cublas"
NAME_ON_HOPPER = "linear maps"
SUPPORT = Support(cells=("mamba",))
_STATES = 16
_WIDTHS = f"d_model, inner and dt_rank multiples of 8, {_STATES} states"
_SUMS = "deterministic is set, but its sums depend on the number of rows"
# If nothing was timed, larger steps and prompts use products of the library, as in cublas.py.
_MOST_TOKENS = 192
# What linear_convolve takes.
_MOST_FOLDED_ROWS, _FOLDED_TAPS = 64, 4

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> x weight^T + bias


def supports(
    model: LanguageModel, device: torch.device, *, deterministic: bool = False
) -> str | None:
    """Return why SelectiveBackend cannot run `model`, whose weights are on `device`; None: it can.

    Sums in a fixed order are for Hopper alone.
    """
    reason = lacks_bfloat16_kernels(model, device, SUPPORT) or refuses_widths(model)
    if reason is None and deterministic:
        return lacks_hopper_kernels(model, device, SUPPORT)
    return reason


def refuses_widths(model: LanguageModel) -> str | None:
    """Return why the kernels cannot run a Mamba of these widths; None: they can."""
    if model.config.quantization is not None:
        return f"weights are {model.config.quantization}"
    block = compile_selective(model.program())[0]
    inner, rank = block.recurrence.dt.weight.shape
    fits = not any(width % 8 for width in (model.config.d_model, inner, rank))
    if not fits or block.recurrence.A.shape[1] != _STATES:
        return f"widths do not meet: {_WIDTHS}"
    return None


def explain(model: LanguageModel, device: torch.device) -> BackendInfo:
    """Return the info that a SelectiveBackend of `model` would have, without making it.

    The model may be on the meta device.
    """
    no_maps = lacks_hopper_kernels(model, device, SUPPORT)
    return BackendInfo(
        BACKEND,
        (PathInfo(NAME_ON_HOPPER, no_maps is None, no_maps), PathInfo(NAME, True)),
    )


class SelectiveLayers:
    """The layers of `model`, which must pass `supports`, computed with any matrix product.

    It holds copies of the weights of time steps.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.blocks: Sequence[SelectiveBlock] = compile_selective(model.program())
        self._dt_weights = [pack_dt_weight(block.recurrence.dt.weight) for block in self.blocks]
        self._norms = [norm.weight for norm in [*(block.norm for block in self.blocks), model.norm]]
        self._eps = model.config.norm_eps

    @torch.no_grad()
    def step(self, product: Product, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token each; return hidden states [batch, d_model], as LanguageModel.step."""

        def recur(index: int, block: SelectiveBlock, x: Tensor, z: Tensor) -> Tensor:
            how, conv = block.recurrence, block.conv
            u = conv_step(x, conv.weight, conv.bias, state[conv.state][index], slots, silu=True)
            return selected_step(
                u,
                product(u, how.select.weight, None),
                self._dt_weights[index],
                *(how.A, how.D, how.dt.bias),
                z,
                *(state[how.state][index], slots),
                how.norm_eps,
            )

        return self._read(product, tokens, recur)

    @property
    def folds(self) -> bool:
        """Whether `folded_step` can run these layers."""
        width = self._model.config.d_model
        return width % SQUARE_ROWS == 0 and all(
            block.conv.weight.shape[1] == _FOLDED_TAPS for block in self.blocks
        )

    @torch.no_grad()
    def folded_step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Compute `step` of up to 64 tokens with four kernels a layer."""
        stream = self._model.embed(tokens)
        normed = added_rms_norm_(stream, None, self._eps, self._norms[0])
        squares: Tensor | None = None
        for index, block in enumerate(self.blocks):
            inputs, how, conv = cast("nn.Linear", block.inputs), block.recurrence, block.conv
            xz, u = linear_convolve(
                *(normed, squares, self._eps, inputs.weight, inputs.bias),
                *(conv.weight, conv.bias, state[conv.state][index], slots),
            )
            y = selected_step(
                u,
                linear_map(u, None, 0.0, how.select.weight),
                self._dt_weights[index],
                *(how.A, how.D, how.dt.bias),
                xz[:, block.inner :],
                *(state[how.state][index], slots),
                how.norm_eps,
            )
            out = cast("nn.Linear", block.out)
            if index + 1 == len(self.blocks):
                last = linear_map(y, None, 0.0, out.weight, out.bias)
                return added_rms_norm_(stream, last, self._eps, self._norms[-1])
            normed, squares = linear_residual_(
                y, out.weight, out.bias, stream, self._norms[index + 1]
            )
        raise AssertionError("a model has layers")

    @torch.no_grad()
    def prefill(
        self,
        product: Product,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
    ) -> Tensor:
        """Read packed prompts; return hidden states [tokens, d_model], as LanguageModel.prefill."""

        def recur(index: int, block: SelectiveBlock, x: Tensor, z: Tensor) -> Tensor:
            how, conv = block.recurrence, block.conv
            inputs = state[conv.state][index]
            u = conv_scan(x, conv.weight, conv.bias, cu_seqlens, inputs, slots, silu=True)
            rank, states = how.dt.weight.shape[1], how.A.shape[1]
            selection = product(u, how.select.weight, None)
            parts: Sequence[Tensor] = selection.split([rank, states, states], dim=1)
            if how.norm_eps is not None:
                parts = [_normed(part, how.norm_eps) for part in parts]
            dt = product(parts[0].contiguous(), how.dt.weight, None)
            return selective_scan(
                *(u, dt, how.A, parts[1], parts[2], how.D, how.dt.bias, z),
                *(cu_seqlens, state[how.state][index], slots),
            )

        return self._read(product, tokens, recur)

    def _read(
        self,
        product: Product,
        tokens: Tensor,
        recur: Callable[[int, SelectiveBlock, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Read tokens; `recur`: layer index, block, x and z -> the out projection's input."""
        stream, y = self._model.embed(tokens), None
        for index, block in enumerate(self.blocks):
            normed = added_rms_norm_(stream, y, self._eps, self._norms[index])
            inputs, out = cast("nn.Linear", block.inputs), cast("nn.Linear", block.out)
            x, z = product(normed, inputs.weight, inputs.bias).chunk(2, dim=1)
            y = product(recur(index, block, x, z), out.weight, out.bias)
        return added_rms_norm_(stream, y, self._eps, self._norms[-1])


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return x [..., n] divided by its root mean square, computed in fp32."""
    return functional.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class LibraryProducts:
    """Products by cuBLASLt, of the layers and of the head."""

    def __init__(
        self, model: LanguageModel, layers: SelectiveLayers, head: LmHead, tuning: TuningCache
    ) -> None:
        self._vocabulary = model.config.vocab_size
        self._blocks, self._head = layers.blocks, head
        self._products = TunedProducts(tuning)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight^T + bias."""
        y = self._products.product(x, weight)
        return y if bias is None else y.add_(bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits; see LanguageModel.logits."""
        logits, bias = self._products.single(hidden, self._head.weight), self._head.bias
        return (logits if bias is None else logits + bias)[:, : self._vocabulary]

    @torch.no_grad()
    def tune(self, tokens: Iterable[int], prompts: bool) -> None:
        """Find the fastest products for these numbers of tokens. Waits for the device."""
        for count in tokens:
            self._tune_layer(count, prompts)
        torch.cuda.empty_cache()  # memory of the measurements

    def _tune_layer(self, count: int, prompts: bool) -> None:
        weights = [
            [cast("nn.Linear", block.inputs).weight for block in self._blocks],
            [block.recurrence.select.weight for block in self._blocks],
            [cast("nn.Linear", block.out).weight for block in self._blocks],
        ]
        if prompts:
            weights.append([block.recurrence.dt.weight for block in self._blocks])
        for alike in weights:
            self._products.tune(alike, count)

    @torch.no_grad()
    def tune_logits(self, rows: Collection[int]) -> None:
        """Find the fastest products for these numbers of rows of logits. Waits for the device."""
        for count in rows:
            self._products.tune([self._head.weight], count, single=True)
        torch.cuda.empty_cache()


def by_linear_map(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, fixed_order: bool = False
) -> Tensor:
    """Return x weight^T + bias by a kernel for Hopper."""
    return linear_map(x, None, 0.0, weight, bias, fixed_order=fixed_order)


class SelectiveBackend(PathBackend):
    """A ModelBackend of `model`, which must pass `supports`.

    Args:
        model: the model.
        deterministic: a row's bits depend only on that row. Nothing is timed.
        tuning: earlier measurements; None: everything is measured.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        deterministic: bool = False,
        tuning: TuningCache | None = None,
    ) -> None:
        tuning = TuningCache() if tuning is None else tuning
        device, vocabulary = model.norm.weight.device, model.config.vocab_size
        layers, head = SelectiveLayers(model), LmHead.of(model)
        library = LibraryProducts(model, layers, head, tuning)
        no_maps = lacks_hopper_kernels(model, device, SUPPORT)

        def logits_by_map(hidden: Tensor) -> Tensor:
            logits = linear_map(
                *(hidden, None, 0.0, head.weight, head.bias),
                logits=True,
                fixed_order=deterministic,
            )
            return logits[:, :vocabulary]

        apart = SeparateHead(
            head,
            vocabulary,
            few=logits_by_map,
            many=logits_by_map if deterministic else library.logits,
            tune_many=_nothing if deterministic else library.tune_logits,
        )
        maps = partial(by_linear_map, fixed_order=deterministic)
        if no_maps is None:
            by_library = partial(_path_beside_maps, layers, library, apart)
        else:
            by_library = partial(_path_of_library, layers, library)
        rows = [
            Row(
                NAME_ON_HOPPER,
                no_maps,
                lambda: [_path_of_maps(layers, maps, apart, fixed_order=deterministic)],
            ),
            Row(NAME, _SUMS if deterministic else None, lambda: [by_library()]),
        ]
        usable = usable_paths(rows)
        super().__init__(
            model,
            usable.paths,
            logits_by_map if deterministic else library.logits,
            tune_logits=None if deterministic else library.tune_logits,
            tuning=tuning,
            info=BackendInfo(BACKEND, usable.told),
        )
        # Kernels may prefetch weights before the previous kernel on the stream has ended.
        torch.cuda.synchronize(device)


def _nothing(sizes: Collection[int]) -> None:
    return None


def _path_of_maps(
    layers: SelectiveLayers, maps: Product, head: SeparateHead, *, fixed_order: bool
) -> ExecutionPath:
    """Return the path for all sizes on Hopper, with which the library's products are compared.

    `fixed_order`: as of the products of `maps`; else its steps may end with the best tokens.
    """
    folds = layers.folds and not fixed_order

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        if folds and len(tokens) <= _MOST_FOLDED_ROWS:
            return layers.folded_step(tokens, state, slots)
        return layers.step(maps, tokens, state, slots)

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        if workload != "prompt":
            head.tune(sizes)

    return ExecutionPath(
        name=NAME_ON_HOPPER,
        sizes={"step": ANY, "prompt": ANY},
        unmeasured={"step": ANY, "prompt": ANY},
        step=head.behind(step),
        step_to_bests=None if fixed_order else head.bests_behind(step),
        prefill=partial(layers.prefill, maps),
        tune=tune,
    )


def _path_beside_maps(
    layers: SelectiveLayers, library: LibraryProducts, head: SeparateHead
) -> ExecutionPath:
    """Return the path of cuBLASLt's products on Hopper."""

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        library.tune(sizes, prompts=workload == "prompt")
        if workload != "prompt":
            head.tune(sizes)

    step: Step = partial(layers.step, library.product)
    some, many = range(FEW_ROWS + 1, sys.maxsize), range(_MOST_TOKENS + 1, sys.maxsize)
    return ExecutionPath(
        name=NAME,
        sizes={"step": some, "prompt": some},
        unmeasured={"step": many, "prompt": many},
        step=head.behind(step),
        step_to_bests=head.bests_behind(step),
        prefill=partial(layers.prefill, library.product),
        tune=tune,
    )


def _path_of_library(layers: SelectiveLayers, library: LibraryProducts) -> ExecutionPath:
    """Return the only path of other GPUs: cuBLASLt's products."""

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        return library.logits(layers.step(library.product, tokens, state, slots))

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        library.tune(sizes, prompts=workload == "prompt")
        if workload != "prompt":
            library.tune_logits(sizes)

    return ExecutionPath(
        name=NAME,
        sizes={"step": ANY, "prompt": ANY},
        unmeasured={"step": ANY, "prompt": ANY},
        step=step,
        prefill=partial(layers.prefill, library.product),
        tune=tune,
    )
