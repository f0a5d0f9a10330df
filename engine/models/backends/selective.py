"""SelectiveBackend: Mamba and Mamba-2 in bfloat16 on a GPU, with few kernels between two products.

A layer of a step is six kernels, in Mamba-2 (ssd_layers.py) and in Mamba: the norm; the product to
x | z; the convolution with SiLU; the product that selects; the step, with the projection of its
time steps and the norms of Falcon-Mamba; the out product. On Hopper, for up to 64 sequences, it is
two fewer: the first product convolves, and the last one gives the next norm its inputs. A prompt
has a product for its time steps and a scan.

The products are cuBLASLt's, or on Hopper linear maps that prefetch their weights while the kernel
before still runs. These can sum in a fixed order, and then every row's bits depend on that row
only, for all other kernels are of this kind.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.backend_info import BackendInfo, PathInfo
from engine.models.backends import ssd_layers
from engine.models.backends.autotune import TunedProducts
from engine.models.backends.blocks import Support, compile_selective, is_ssd
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
from engine.models.backends.ssd_layers import SsdLayers
from engine.models.backends.state_space_layers import (
    MOST_FOLDED_ROWS,
    Product,
    StateSpaceLayers,
)
from engine.models.backends.tuning_cache import TuningCache
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState, Step
from engine.ops import conv_scan, conv_step, selective_scan
from engine.ops.gemm import linear_map
from engine.ops.selective import pack_dt_weight, selected_step

BACKEND = "selective"
NAME = "cublas"
NAME_ON_HOPPER = "linear maps"
SUPPORT = Support(cells=("mamba", "mamba2"))
_STATES = 16
WIDTHS = f"d_model, inner and dt_rank multiples of 8, {_STATES} states"
_SUMS = "deterministic is set, but its sums depend on the number of rows"
# If nothing was timed, larger steps and prompts use products of the library, as in cublas.py.
_MOST_TOKENS = 192


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
    """Return why the kernels cannot run a Mamba or Mamba-2 of these widths; None: they can."""
    if model.config.quantization is not None:
        return f"weights are {model.config.quantization}"
    if is_ssd(model.program()):
        return ssd_layers.refuses_widths(model)
    block = compile_selective(model.program())[0]
    inner, rank = block.recurrence.dt.weight.shape
    fits = not any(width % 8 for width in (model.config.d_model, inner, rank))
    if not fits or block.recurrence.A.shape[1] != _STATES:
        return f"widths do not meet: {WIDTHS}"
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


class SelectiveLayers(StateSpaceLayers):
    """The layers of `model`, a Mamba that must pass `supports`.

    It holds copies of the weights of time steps.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageModel) -> None:
        self.blocks = compile_selective(model.program())
        super().__init__(model, self.blocks)
        self._dt_weights = [pack_dt_weight(block.recurrence.dt.weight) for block in self.blocks]

    def weights(self, prompts: bool) -> list[list[Tensor]]:
        """Return the matrices of all products of a step or a prompt, each with those alike."""
        weights = super().weights(prompts)
        weights.append([block.recurrence.select.weight for block in self.blocks])
        if prompts:
            weights.append([block.recurrence.dt.weight for block in self.blocks])
        return weights

    def step(self, product: Product, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token each; return hidden states [batch, d_model], as LanguageModel.step."""

        def recur(index: int, projected: Tensor) -> Tensor:
            conv = self.blocks[index].conv
            x, z = projected.chunk(2, dim=1)
            u = conv_step(x, conv.weight, conv.bias, state[conv.state][index], slots, silu=True)
            return self._selected_step(product, index, u, z, state, slots)

        return self._read(product, tokens, recur)

    def folded_step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Compute `step` with two kernels a layer fewer."""

        def recur(index: int, projected: Tensor, u: Tensor) -> Tensor:
            z = projected[:, u.shape[1] :]
            return self._selected_step(by_linear_map, index, u, z, state, slots)

        return self._read_folded(tokens, state, slots, recur, first_convolved=0)

    def _selected_step(
        self, product: Product, index: int, u: Tensor, z: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        how = self.blocks[index].recurrence
        return selected_step(
            u,
            product(u, how.select.weight, None),
            self._dt_weights[index],
            *(how.A, how.D, how.dt.bias),
            z,
            *(state[how.state][index], slots),
            how.norm_eps,
        )

    def prefill(
        self,
        product: Product,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
    ) -> Tensor:
        """Read packed prompts; return hidden states [tokens, d_model], as LanguageModel.prefill."""

        def recur(index: int, projected: Tensor) -> Tensor:
            how, conv = self.blocks[index].recurrence, self.blocks[index].conv
            x, z = projected.chunk(2, dim=1)
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


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return x [..., n] divided by its root mean square, computed in fp32."""
    return functional.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class LibraryProducts:
    """Products by cuBLASLt, of the layers and of the head."""

    def __init__(
        self, model: LanguageModel, layers: StateSpaceLayers, head: LmHead, tuning: TuningCache
    ) -> None:
        self._vocabulary = model.config.vocab_size
        self._layers, self._head = layers, head
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
            for alike in self._layers.weights(prompts):
                self._products.tune(alike, count)
        torch.cuda.empty_cache()  # memory of the measurements

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
        device, vocabulary = model.device, model.config.vocab_size
        layers: StateSpaceLayers
        layers = SsdLayers(model) if is_ssd(model.program()) else SelectiveLayers(model)
        head = LmHead.of(model)
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
    layers: StateSpaceLayers, maps: Product, head: SeparateHead, *, fixed_order: bool
) -> ExecutionPath:
    """Return the path for all sizes on Hopper, with which the library's products are compared.

    `fixed_order`: as of the products of `maps`; else its steps may end with the best tokens.
    """
    folds = layers.folds and not fixed_order

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        if folds and len(tokens) <= MOST_FOLDED_ROWS:
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
    layers: StateSpaceLayers, library: LibraryProducts, head: SeparateHead
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


def _path_of_library(layers: StateSpaceLayers, library: LibraryProducts) -> ExecutionPath:
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
