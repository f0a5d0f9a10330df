"""SsdLayers: the layers of Mamba-2 on a GPU, with few kernels between two matrix products.

A layer of a step is six kernels: the norm; the product to z | x | B | C | dt; the convolution of
its columns x, B and C, with SiLU; the step; the norm of each group's gated channels; the out
product. Folded, it is four: without the first norm and the convolution. A prompt has the scans of
convolution and recurrence in place of their steps.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.models.backends.blocks import SsdBlock, compile_ssd
from engine.models.backends.state_space_layers import Product, StateSpaceLayers
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState
from engine.ops import conv_scan, conv_step, ssd_scan, ssd_step
from engine.ops.fused_norm import gated_rms_norm

WIDTHS = (
    "d_model, inner, a group's channels and the in projection (2 inner + 2 groups states + heads) "
    "multiples of 8"
)
_MOST_STATES = 1024  # kMostSsdStates in csrc/ssd/args.h

# Inputs of the convolution -> its outputs; of these x, then dt, B and C -> y, as the operators.
Convolve = Callable[[int, Tensor], Tensor]
Recur = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


def refuses_widths(model: LanguageModel) -> str | None:
    """Return why the kernels cannot run a Mamba-2 of these sizes; None: they can."""
    block = compile_ssd(model.program())[0]
    widths = [
        *(model.config.d_model, block.inner, block.inputs.weight.shape[0]),
        block.inner // block.recurrence.groups,
    ]
    if any(width % 8 for width in widths):
        return f"widths do not meet: {WIDTHS}"
    return f"more than {_MOST_STATES} states" if block.states > _MOST_STATES else None


class SsdLayers(StateSpaceLayers):
    """The layers of `model`, whose program must be of SSD blocks."""

    def __init__(self, model: LanguageModel) -> None:
        self.blocks = compile_ssd(model.program())
        super().__init__(model, self.blocks)
        first = self.blocks[0]
        self._projected = [first.inner, first.conv.weight.shape[0], first.heads]
        shared = first.recurrence.groups * first.states
        self._selected = [first.inner, shared, shared]

    def step(self, product: Product, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token each; return hidden states [batch, d_model], as LanguageModel.step."""

        def convolve(index: int, inputs: Tensor) -> Tensor:
            conv = self.blocks[index].conv
            rows = state[conv.state][index]
            return conv_step(inputs, conv.weight, conv.bias, rows, slots, silu=True)

        return self._mix(product, tokens, convolve, self._ssd_step(state, slots))

    def folded_step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Compute `step` with two kernels a layer fewer."""
        ssd = self._ssd_step(state, slots)

        def recur(index: int, projected: Tensor, convolved: Tensor) -> Tensor:
            z, _, dt = projected.split(self._projected, dim=1)
            return self._gated(index, z, convolved, dt, ssd)

        return self._read_folded(tokens, state, slots, recur, first_convolved=self._projected[0])

    def _ssd_step(self, state: ModelState, slots: Tensor) -> Recur:
        def recur(index: int, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
            how = self.blocks[index].recurrence
            return ssd_step(
                *(x, dt, how.A, b, c, how.D, how.dt_bias, how.dt_limit),
                *(state[how.state][index], slots),
            )

        return recur

    def prefill(
        self,
        product: Product,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
    ) -> Tensor:
        """Read packed prompts; return hidden states [tokens, d_model], as LanguageModel.prefill."""

        def convolve(index: int, inputs: Tensor) -> Tensor:
            conv = self.blocks[index].conv
            rows = state[conv.state][index]
            return conv_scan(inputs, conv.weight, conv.bias, cu_seqlens, rows, slots, silu=True)

        def recur(index: int, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
            how = self.blocks[index].recurrence
            return ssd_scan(
                *(x, dt, how.A, b, c, how.D, how.dt_bias, how.dt_limit),
                *(cu_seqlens, state[how.state][index], slots),
            )

        return self._mix(product, tokens, convolve, recur)

    def _mix(self, product: Product, tokens: Tensor, convolve: Convolve, recur: Recur) -> Tensor:
        def mixed(index: int, projected: Tensor) -> Tensor:
            z, inputs, dt = projected.split(self._projected, dim=1)
            return self._gated(index, z, convolve(index, inputs), dt, recur)

        return self._read(product, tokens, mixed)

    def _gated(self, index: int, z: Tensor, convolved: Tensor, dt: Tensor, recur: Recur) -> Tensor:
        """Return the out projection's input, from convolved columns x | B | C."""
        block: SsdBlock = self.blocks[index]
        how = block.recurrence
        x, b, c = convolved.split(self._selected, dim=1)
        shared = (how.groups, block.states)
        y = recur(
            *(index, x.unflatten(1, (block.heads, -1)), dt),
            *(b.unflatten(1, shared), c.unflatten(1, shared)),
        )
        return gated_rms_norm(
            *(y.flatten(1), z, how.norm_weight, how.norm_eps),
            groups=how.groups,
            gate_first=True,
        )
