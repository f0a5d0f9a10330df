"""Layout of PyTorch language models around the `sru` package's SRU, as state dicts.

Behind any prefix there are these tensors, and no others:

- embedding: `.weight` [vocabulary, width] of a module whose name is one of EMBEDDINGS;
- layers: `rnn_lst.N.{weight,weight_c,bias}` of one module, with or without `weight_proj`,
  `layer_norm.{weight,bias}` and `scale_x`; before them optionally `input_to_hidden.weight`;
- head: `.weight` [vocabulary, hidden] of a module whose name is one of HEADS, with or without a
  `.bias`; absent, or with the embedding's values, if it is tied.

`weight` is [inputs, hidden * k], the k parts of a channel side by side: u0, u1, u2 and, where the
highway's input is of another width, u3. Names and shapes do not show tanh, and often neither a
missing skip term nor a norm behind the layer: those are options. A bidirectional stack has the
shapes of one of twice the width; it is no language model, and cannot be told from one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.models.family import StoredTensor, WeightMap
from engine.models.gated_rnn import layouts
from engine.models.sru.config import SruConfig
from engine.models.state_dict_source import LanguageModelSource
from engine.models.state_dicts import HELD_AS
from engine.ops.sru import planes_of

EMBEDDINGS = (*layouts.EMBEDDINGS, "embedding_layer")
HEADS = (*layouts.HEADS, "output_layer")
SUPPORTED = (
    "supported are language models of an embedding, layers of sru.SRU (version 2.1.9 or later) and"
    " a head"
)
_LAYER = re.compile(r"(?P<at>(?:.*\.)?)rnn_lst\.(?P<layer>\d{1,9})\.(?P<kind>.+)")
_KINDS = ("weight", "weight_c", "bias", "weight_proj", "scale_x")
_NORM = ("layer_norm.weight", "layer_norm.bias")
# Parts of names that show what is not computed here, each with the reason.
_REFUSED = {
    ".ln_lst.": "is a layer norm of sru 2.1.7 or older, which sru itself no longer reads",
    ".custom_m.": "is of a custom module in the place of a layer's matrix, which is not supported",
    ".transform_module.": (
        "is of SRU++ (attention over the whole context) or of a module in the place of a layer's"
        " matrix, which is not supported"
    ),
    ".attn.": "is of SRU++ (attention over the whole context), which is not supported",
}


def is_sru(stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether there are layers of an SRU."""
    return any(_LAYER.fullmatch(name) is not None for name in stored)


def layout(stored: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[SruConfig, WeightMap]:
    """Return the config that names, shapes and options show, and where the model's tensors are.

    The head is tied if it is absent, or if its values are the embedding's. The gates do not see the
    state if every `weight_c` is zero, as that of a layer with `v1=True`.

    Raises:
        CheckpointError: it names the first tensor that is missing, unknown, refused or of a shape
            that contradicts the others.
        ConfigError: shapes or options that no model here can have.
    """
    source = _Source(stored)
    at, layers = source.layers()
    embedding = source.take_embedding()
    vocabulary, width = embedding.shape
    hidden = _half(source.shape(layers[0]["bias"]), layers[0]["bias"])
    tensors: dict[str, tuple[StoredTensor, ...]] = {"embedding.weight": (embedding,)}
    changes: dict[str, Any] = {}
    into = f"{at}input_to_hidden.weight"
    first = into in stored
    if first:
        tensors["layers.0.input_to_hidden.weight"] = (source.take(into, hidden, width),)
    widths = [hidden if index or first else width for index in range(len(layers))]
    parts = [source.parts(layer["weight"], hidden) for layer in layers]
    skip = _skip_term(layers, widths, parts, hidden, options)
    inner = [source.projection(layer, inputs) for layer, inputs in zip(layers, widths, strict=True)]
    _check_projections(layers, inner, widths, hidden)
    after = _normalize_after(source, layers, widths, hidden, options)
    weight_c = any(bool(stored[layer["weight_c"]].any()) for layer in layers)
    scaled = [layer for layer, count in zip(layers, parts, strict=True) if skip and count == 3]
    scale = _scale(source, scaled)
    for index, layer in enumerate(layers):
        ours, inputs = f"layers.{index}", widths[index]
        if inner[index]:
            down = source.take(layer["weight_proj"], inputs, inner[index])
            tensors[f"{ours}.down.weight"] = (down,)
            changes[f"{ours}.down.weight"] = torch.t
        matrix = source.take(layer["weight"], inner[index] or inputs, parts[index] * hidden)
        tensors[f"{ours}.input.weight"] = (matrix,)
        changes[f"{ours}.input.weight"] = partial(planes_of, parts=parts[index])
        gates = source.take(layer["weight_c"], 2 * hidden)
        if weight_c:
            tensors[f"{ours}.weight_c"] = (gates,)
        tensors[f"{ours}.gate_bias"] = (source.take(layer["bias"], 2 * hidden),)
        if after is not None:
            for kind in _NORM:
                of_norm = source.take(layer[kind], hidden if after else inputs)
                tensors[f"{ours}.{kind}"] = (of_norm,)
        if "scale_x" in layer:
            source.take(layer["scale_x"], 1)
    head, head_bias = source.take_head(vocabulary, hidden)
    source.finish()
    if head is None and hidden != width:
        raise CheckpointError(
            f"there is no head ({', '.join(sorted(HEADS))}), and the embedding {embedding.name!r}"
            f" cannot be it: its width is {width}, that of the last layer {hidden}; {SUPPORTED}"
        )
    if head is not None and _equal(stored[head.name], stored[embedding.name]):
        head = None
    if head is not None:
        tensors["head.weight"] = (head,)
    if head_bias is not None:
        tensors["head_bias"] = (head_bias,)
    config = SruConfig(
        vocab_size=vocabulary,
        d_model=hidden,
        d_embedding=width,
        n_layers=len(layers),
        tie_embeddings=head is None,
        input_to_hidden=first,
        projection=max(inner),
        weight_c=weight_c,
        skip_term=skip,
        scale_x=scale,
        tanh=bool(options.get("tanh", False)),
        layer_norm=after is not None,
        normalize_after=bool(after),
        head_bias=head_bias is not None,
        dtype=HELD_AS[stored[embedding.name].dtype],
        **({"norm_eps": options["norm_eps"]} if "norm_eps" in options else {}),
    )
    return config, WeightMap(tensors, changes=changes)


_Names = dict[str, str]  # the names of a layer's tensors, by what is behind `rnn_lst.N.`


def _half(shape: tuple[int, ...], name: str) -> int:
    if len(shape) != 1 or not shape[0] or shape[0] % 2:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(shape)}, but a layer's biases are [2 * hidden];"
            f" {SUPPORTED}"
        )
    return shape[0] // 2


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _skip_term(
    layers: list[_Names],
    widths: list[int],
    parts: list[int],
    hidden: int,
    options: Mapping[str, Any],
) -> bool:
    """Return whether layers have a skip term, as shapes show it or, where they do not, options."""
    shown: bool | None = None
    for layer, width, count in zip(layers, widths, parts, strict=True):
        if width == hidden and count == 4:
            raise CheckpointError(
                f"tensor {layer['weight']!r} has 4 vectors of {hidden} although the layer's input"
                f" is as wide; {SUPPORTED}"
            )
        if width != hidden:
            shown = count == 4
    given = options.get("skip_term")
    if shown is not None and given is not None and bool(given) != shown:
        raise ConfigError(
            f"skip_term is {given}; allowed: {shown}, which the first layer's matrix shows",
            param="skip_term",
        )
    return shown if shown is not None else bool(True if given is None else given)


def _check_projections(
    layers: list[_Names], inner: list[int], widths: list[int], hidden: int
) -> None:
    """Raise CheckpointError unless the projections follow the package's rule for one width."""
    wanted = max(inner)
    for layer, own, inputs in zip(layers, inner, widths, strict=True):
        if own != (wanted if wanted < min(inputs, hidden) else 0):
            raise CheckpointError(
                f"layer of tensor {layer['weight']!r} has a projection (weight_proj) of width"
                f" {own}, and others {wanted}; {SUPPORTED}"
            )


def _normalize_after(
    source: _Source,
    layers: list[_Names],
    widths: list[int],
    hidden: int,
    options: Mapping[str, Any],
) -> bool | None:
    """Return whether norms are behind the layers, or before them; None: there are no norms."""
    given = options.get("normalize_after")
    normed = [layer for layer in layers if _NORM[0] in layer]
    if not normed:
        if given:
            raise ConfigError(
                "normalize_after is True; allowed: False, since there are no layer norms",
                param="normalize_after",
            )
        return None
    for layer in layers:
        for kind in _NORM:
            if kind not in layer:
                name = layer["weight"].removesuffix("weight") + kind
                raise CheckpointError(f"tensor {name!r} is missing; {SUPPORTED}")
    size = source.shape(layers[0][_NORM[0]])
    if widths[0] == hidden:
        return bool(given)
    shown = size == (hidden,)
    if given is not None and bool(given) != shown:
        raise ConfigError(
            f"normalize_after is {given}; allowed: {shown}, which the first layer's norm shows",
            param="normalize_after",
        )
    return shown


def _scale(source: _Source, layers: list[_Names]) -> float:
    """Return the scale_x of layers whose highway is their input; 1.0 if none of them has one."""
    names = [layer["scale_x"] for layer in layers if "scale_x" in layer]
    if names and len(names) < len(layers):
        lacks = next(layer for layer in layers if "scale_x" not in layer)
        name = lacks["weight"].removesuffix("weight") + "scale_x"
        raise source.error(f"tensor {name!r} is missing, which other layers have")
    # One of another shape is refused when it is taken.
    values = {float(source.left[name]) for name in names if source.shape(name) == (1,)}
    if len(values) > 1:
        raise source.error(
            f"the layers' scale_x differ ({', '.join(map(str, sorted(values)))}); one value for all"
            " is supported"
        )
    return values.pop() if values else 1.0


class _Source(LanguageModelSource):
    """A state dict with the layers of an SRU."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        super().__init__(stored, SUPPORTED, embeddings=EMBEDDINGS, heads=HEADS)
        for name in stored:
            for part, reason in _REFUSED.items():
                if part in f".{name}":
                    raise self.error(f"tensor {name!r} {reason}")

    def layers(self) -> tuple[str, list[_Names]]:
        """Return the prefix of the SRU module and its layers' names, in order."""
        layers: dict[int, _Names] = {}
        prefixes = set()
        for name in self.left:
            found = _LAYER.fullmatch(name)
            if found is None:
                continue
            if found["kind"] not in (*_KINDS, *_NORM):
                raise self.error(f"tensor {name!r} is not part of a known layout")
            prefixes.add(found["at"])
            layers.setdefault(int(found["layer"]), {})[found["kind"]] = name
        if not layers:
            raise self.error("there are no layers (tensors like 'rnn.rnn_lst.0.weight')")
        if len(prefixes) > 1:
            raise self.error(f"there are layers in several modules ({', '.join(sorted(prefixes))})")
        at = prefixes.pop()
        for index in range(len(layers)):
            for kind in ("weight", "weight_c", "bias"):
                if kind not in layers.get(index, {}):
                    raise self.error(f"tensor '{at}rnn_lst.{index}.{kind}' is missing")
        return at, [layers[index] for index in range(len(layers))]

    def parts(self, name: str, hidden: int) -> int:
        """Return how many vectors of `hidden` a layer's matrix gives: 3 or 4."""
        shape = self.shape(name)
        if len(shape) != 2 or shape[1] not in (3 * hidden, 4 * hidden):
            raise self.error(
                f"tensor {name!r} has shape {list(shape)}, but the other tensors require"
                f" [*, {3 * hidden}] or [*, {4 * hidden}]"
            )
        return shape[1] // hidden

    def projection(self, layer: _Names, inputs: int) -> int:
        """Return the inner width of a layer's two matrices; 0: it has one."""
        if "weight_proj" not in layer:
            return 0
        shape = self.shape(layer["weight_proj"])
        if len(shape) != 2 or shape[0] != inputs or not shape[1]:
            raise self.error(
                f"tensor {layer['weight_proj']!r} has shape {list(shape)}, but the other tensors"
                f" require [{inputs}, *]"
            )
        return shape[1]
