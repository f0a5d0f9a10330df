"""WholeStep: an LM's decode step of a few sequences, in one kernel (engine/ops/whole_step.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.models.cell import ModelState
from engine.models.conv import CausalConv
from engine.models.lm import LM, Layer
from engine.ops.whole_step import (
    INPUTS_MULTIPLE,
    MOST_CHANNELS_EACH,
    MOST_INPUT_BYTES,
    MOST_PHASES,
    MOST_ROWS,
    MOST_TAPS,
    Phase,
    Program,
)


def most_rows(config: ModelConfig, processors: int) -> int:
    """How many sequences a step on a GPU of so many multiprocessors may have; 0: the kernel does
    not take such a model. What HopperLM asks of a model is taken as given."""
    hidden = [config.mlp_hidden] if config.mlp_hidden else []
    inputs = [config.d_model, config.inner, *hidden]
    of_layer = 2 + 2 * len(hidden) + (config.conv_kernel > 0)
    fits = (
        all(width % INPUTS_MULTIPLE == 0 for width in inputs)
        and config.d_model <= MOST_CHANNELS_EACH * processors
        and config.conv_kernel <= MOST_TAPS
        and config.n_layers * of_layer + 2 <= MOST_PHASES
    )
    return min(MOST_ROWS, MOST_INPUT_BYTES // (2 * max(inputs))) if fits else 0


class WholeStep:
    """Steps of `model` with `head` [vocabulary, d_model] and its bias for batches of up to
    `most_rows`, which must not be 0."""

    def __init__(self, model: LM, head: Tensor, head_bias: Tensor | None) -> None:
        config, device = model.config, head.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.most_rows = most_rows(config, processors)
        self._eps = config.norm_eps
        self._program = Program(
            list(_phases(model, head, head_bias)),
            gates=config.gates,
            linear_candidate=config.candidate == "linear",
            normalize_gates=config.normalize_gates,
        )

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """As HopperLM.step, with the logits of every row of `head`."""
        return self._program.run(tokens, slots, state.cell, state.conv, self._eps)


def _phases(model: LM, head: Tensor, head_bias: Tensor | None) -> Iterator[Phase]:
    layers = list(cast("Iterable[Layer]", model.layers))
    convs = [layer.conv for layer in layers]

    def read_by(index: int) -> tuple[Tensor | None, Tensor | None, int]:
        """Taps, bias and number of the convolution that reads what layer `index` begins with."""
        conv: CausalConv | None = convs[index] if index < len(layers) else None
        return (None, None, 0) if conv is None else (conv.weight, conv.bias, index)

    taps, taps_bias, layer = read_by(0)
    yield Phase(
        kind="embed",
        weight=model.embedding.weight,
        taps=taps,
        taps_bias=taps_bias,
        layer=layer,
    )
    for index, this in enumerate(layers):
        if this.conv is not None:
            mix = this.conv.pointwise
            yield Phase(kind="residual", weight=mix.weight, bias=mix.bias)
        gates, out, mlp = this.cell.gates, cast("nn.Linear", this.cell.out), this.mlp
        norm = this.cell_norm.weight
        yield Phase(kind="gates", weight=gates.weight, bias=gates.bias, norm=norm, layer=index)
        taps, taps_bias, layer = read_by(index + 1)
        last = out if mlp is None else mlp.down
        if mlp is not None:
            up = mlp.up
            yield Phase(kind="residual", weight=out.weight, bias=out.bias)
            yield Phase(kind="gelu", weight=up.weight, bias=up.bias, norm=mlp.norm.weight)
        yield Phase(
            kind="residual",
            weight=last.weight,
            bias=last.bias,
            taps=taps,
            taps_bias=taps_bias,
            layer=layer,
        )
    yield Phase(kind="logits", weight=head, bias=head_bias, norm=model.norm.weight)
