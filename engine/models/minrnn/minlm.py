"""Layouts of minGRU-pytorch's `minLM` and its descendant, BorealisAI/minRNNs' `Model`.

Both stack [conv, norm, cell, norm, feed-forward] under `layers.<i>.<0 to 4>`. They differ in:

|                       | minGRU-pytorch 0.2.1        | BorealisAI/minRNNs                  |
|-----------------------|-----------------------------|-------------------------------------|
| head                  | to_logits                   | to_out                              |
| minLSTM's projection  | to_hidden_and_f_i_gate      | to_hidden_and_gate                  |
| biases of the cell    | none                        | of both projections                 |
| the cell's to_out     | absent at expansion 1       | always there                        |
| init_hidden_state     | none                        | optional; h_0 = g of it             |
| feed-forward          | always there                | optional; without it its norm stays |

Everything else follows from the shapes. The fused projection of a cell has the candidate first
(hidden, gate; hidden, f, i); in this project it comes last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.family import StoredTensor, WeightMap
from engine.models.minrnn.config import MinRnnConfig
from engine.models.state_dict_source import StateDictSource
from engine.models.state_dicts import HELD_AS

SUPPORTED = (
    "supported are the state dicts of minGRU-pytorch's minLM and of BorealisAI/minRNNs' Model over"
    " tokens with RMSNorm"
)
HEADS = ("to_logits.weight", "to_out.weight")
_PROJECTIONS = ("to_hidden_and_gate", "to_hidden_and_f_i_gate")
_INDEX = r"\d{1,9}"  # longer numbers are no index of a layer, and slow or impossible to read


def layout(weights: Mapping[str, Tensor]) -> tuple[MinRnnConfig, WeightMap]:
    """Return the config that names and shapes show, and where the model's tensors are.

    The values of `weights` are not looked at, so they may be on the meta device.

    Raises CheckpointError, naming the first tensor that is missing, unknown or of a shape that
    contradicts the others; ConfigError for shapes that no model here can have.
    """
    source = _Source(weights, SUPPORTED)
    _refuse_other_models(weights)
    head = next((name for name in HEADS if name in weights), HEADS[0])
    embedding = source.part("token_emb.weight", None, None)
    vocab, width = embedding.shape
    layers = [_layer(source, f"layers.{index}", width) for index in range(source.layers())]
    dtype = weights[embedding.stored].dtype
    norm_eps = _norm_eps(source, "norm")
    norm = _norm(source, "norm", width)
    head_weight = source.part(head, vocab, width)
    source.finish()
    _refuse_unlike_layers(layers)
    config = MinRnnConfig(
        vocab_size=vocab,
        d_model=width,
        n_layers=len(layers),
        norm_eps=norm_eps,
        dtype=HELD_AS[dtype],
        **_layer_config(layers[0], width),
    )
    taken = {"embedding.weight": embedding, "norm.weight": norm, "head.weight": head_weight}
    for index, layer in enumerate(layers):
        taken |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return config, WeightMap(
        {name: (StoredTensor(one.stored, one.stored_shape),) for name, one in taken.items()},
        changes={name: one.change for name, one in taken.items() if one.change is not None},
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A tensor of the model: the stored one of which it is made, and its own shape."""

    stored: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor] | None = None

    def of_shape(self, *shape: int) -> _Taken:
        """Return it reshaped."""
        return replace(self, shape=shape)


class _Source(StateDictSource):
    """A state dict whose layers are numbered modules of nn.Sequential."""

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def part(self, name: str, *shape: int | None) -> _Taken:
        """Take a tensor (see `take`) as it is stored."""
        size = self.take(name, *shape).shape
        return _Taken(name, size, size)

    def layers(self) -> int:
        """Return the number of layers, from the tensors' names."""
        found = (re.match(rf"layers\.({_INDEX})\.", name) for name in self.left)
        return 1 + max((int(match[1]) for match in found if match), default=0)

    def modules(self, prefix: str) -> list[str]:
        """Return the modules under `prefix` that have a weight, in order.

        nn.Sequential numbers them, and dropout between them shifts the numbers.
        """
        names = [
            name.removesuffix(".weight")
            for name in self.left
            if name.startswith(f"{prefix}.") and name.endswith(".weight")
        ]
        return sorted(names, key=lambda name: [int(part) for part in re.findall(_INDEX, name)])


def _refuse_other_models(weights: Mapping[str, Tensor]) -> None:
    for name in weights:
        if name.endswith("running_mean"):
            raise CheckpointError(
                f"tensor {name!r} shows BatchNorm, which is not supported; {SUPPORTED}"
            )
        if name.startswith("layer_in."):
            raise CheckpointError(
                f"tensor {name!r} shows a model of vectors instead of tokens; {SUPPORTED}"
            )


def _layer(source: _Source, prefix: str, width: int) -> dict[str, _Taken]:
    """Return one layer's tensors under this project's names."""
    layer = {"cell_norm.weight": _norm(source, f"{prefix}.1", width)}
    conv = source.modules(f"{prefix}.0")
    if conv:
        depthwise, pointwise = _two(conv, f"{prefix}.0", "depthwise, pointwise convolution")
        taps = source.part(f"{depthwise}.weight", width, 1, None)
        layer["conv.weight"] = taps.of_shape(width, taps.shape[2])
        mix = source.part(f"{pointwise}.weight", width, width, 1)
        layer["conv.pointwise.weight"] = mix.of_shape(width, width)
        _take_bias(source, depthwise, width, layer, "conv.bias")
        _take_bias(source, pointwise, width, layer, "conv.pointwise.bias")
    layer |= _cell(source, f"{prefix}.2", width)
    mlp_norm = _norm(source, f"{prefix}.3", width)
    mlp = source.modules(f"{prefix}.4")
    if mlp:
        up, down = _two(mlp, f"{prefix}.4", "linear maps up and down")
        layer["mlp.norm.weight"] = mlp_norm
        layer["mlp.up.weight"] = source.part(f"{up}.weight", None, width)
        hidden = layer["mlp.up.weight"].shape[0]
        layer["mlp.down.weight"] = source.part(f"{down}.weight", width, hidden)
        _take_bias(source, up, hidden, layer, "mlp.up.bias")
        _take_bias(source, down, width, layer, "mlp.down.bias")
    return layer


def _cell(source: _Source, prefix: str, width: int) -> dict[str, _Taken]:
    names = [f"{prefix}.{name}" for name in _PROJECTIONS]
    projection = next((name for name in names if f"{name}.weight" in source), names[0])
    fused = source.part(f"{projection}.weight", None, width)
    cell: dict[str, _Taken] = {}
    inner = width
    # Only a minLM of expansion 1 has no out projection. Its minLSTM has a projection name of its
    # own, so three times the width under the shared name is a minGRU without its to_out.
    shared_name = projection == names[0]
    if f"{prefix}.to_out.weight" in source or (shared_name and fused.shape[0] != 2 * width):
        cell["out.weight"] = source.part(f"{prefix}.to_out.weight", width, None)
        inner = cell["out.weight"].shape[1]
        _take_bias(source, f"{prefix}.to_out", width, cell, "out.bias")
    gates = (2, 3) if shared_name else (3,)
    if fused.shape[0] not in [count * inner for count in gates]:
        raise CheckpointError(
            f"tensor '{projection}.weight' has {fused.shape[0]} rows; with {inner} channels it must"
            f" have {' or '.join(str(count * inner) for count in gates)}"
        )
    candidate_last = partial(_candidate_last, inner=inner)
    cell["gates.weight"] = replace(fused, change=candidate_last)
    _take_bias(source, projection, fused.shape[0], cell, "gates.bias")
    if "gates.bias" in cell:
        cell["gates.bias"] = replace(cell["gates.bias"], change=candidate_last)
    if f"{prefix}.init_hidden_state" in source:
        cell["initial"] = source.part(f"{prefix}.init_hidden_state", inner)
    return {f"cell.{name}": tensor for name, tensor in cell.items()}


def _candidate_last(fused: Tensor, inner: int) -> Tensor:
    return torch.cat((fused[inner:], fused[:inner]))


def _two(modules: list[str], prefix: str, what: str) -> tuple[str, str]:
    if len(modules) != 2:
        raise CheckpointError(
            f"{prefix} has {len(modules)} weights ({', '.join(modules)}) instead of two ({what});"
            f" {SUPPORTED}"
        )
    return modules[0], modules[1]


def _take_bias(
    source: _Source, module: str, size: int, target: dict[str, _Taken], name: str
) -> None:
    if f"{module}.bias" in source:
        target[name] = source.part(f"{module}.bias", size)


def _norm(source: _Source, prefix: str, width: int) -> _Taken:
    """Return RMSNorm's factor.

    torch.nn.RMSNorm calls it weight. The RMSNorm of earlier minGRU-pytorch, from which
    BorealisAI/minRNNs descends, has a gamma and multiplies by gamma + 1.
    """
    if f"{prefix}.gamma" in source:
        return replace(source.part(f"{prefix}.gamma", width), change=_plus_one)
    return source.part(f"{prefix}.weight", width)


def _plus_one(gamma: Tensor) -> Tensor:
    return gamma.float() + 1


def _norm_eps(source: _Source, prefix: str) -> float:
    """Return the default epsilon of the norm's form.

    The gamma form divides by the norm, at least 1e-12. torch.nn.RMSNorm's default is the epsilon of
    float32 whatever the weights are: it computes 16-bit inputs in float32 too. Weights of float64
    are held as float32.
    """
    return 1e-12 if f"{prefix}.gamma" in source else float(torch.finfo(torch.float32).eps)


def _refuse_unlike_layers(layers: list[dict[str, _Taken]]) -> None:
    shapes = [{name: list(tensor.shape) for name, tensor in layer.items()} for layer in layers]
    for index, layer in enumerate(shapes):
        if layer != shapes[0]:
            name = next(n for n in layer | shapes[0] if layer.get(n) != shapes[0].get(n))
            raise CheckpointError(
                f"layers.{index} differs from layers.0: its {name} has shape"
                f" {layer.get(name, 'none')} instead of {shapes[0].get(name, 'none')}"
            )


def _layer_config(layer: dict[str, _Taken], width: int) -> dict[str, Any]:
    """Return the fields of MinRnnConfig that one layer shows."""
    rows = layer["cell.gates.weight"].shape[0]
    inner = layer["cell.out.weight"].shape[1] if "cell.out.weight" in layer else width
    hidden = layer["mlp.up.weight"].shape[0] if "mlp.up.weight" in layer else 0
    return {
        "cell": "mingru" if rows == 2 * inner else "minlstm",
        "expansion": _ratio(inner, width),
        "out_projection": "cell.out.weight" in layer,
        "conv_kernel": layer["conv.weight"].shape[1] if "conv.weight" in layer else 0,
        "mlp_ratio": _ratio(hidden, width),
        "cell_bias": "cell.gates.bias" in layer,
        "out_bias": "cell.out.bias" in layer,
        "mlp_bias": "mlp.up.bias" in layer or not hidden,
        "conv_bias": "conv.bias" in layer or "conv.weight" not in layer,
        "learned_initial_state": "cell.initial" in layer,
    }


def _ratio(size: int, width: int) -> float:
    """Return r with int(width * r) == size.

    It is the quotient, or the next float if rounding makes the product too small.
    """
    ratio = size / width
    return ratio if int(width * ratio) == size else math.nextafter(ratio, math.inf)
