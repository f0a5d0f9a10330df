"""Layouts of PyTorch language models around torch.nn.GRU or torch.nn.LSTM, as state dicts.

Behind any prefix there are these tensors, and no others:

- embedding: `.weight` [vocabulary, width] of a module whose name is one of EMBEDDINGS;
- layers: `{weight,bias}_{ih,hh}_l{k}` of one module (`rnn.weight_ih_l0`), of several modules of one
  layer each (`rnns.0.weight_ih_l0`), or of cells (`cells.0.weight_ih`); biases may be absent, all
  of them;
- head: `.weight` [vocabulary, hidden] of a module whose name is one of HEADS, with or without a
  `.bias`; absent, or with the embedding's values, if it is tied.

A matrix that AWD-LSTM drops weights of is `weight_hh_l0_raw`; `weight_hh_l0` beside it is what the
last training step left of it, and is not read.

Layers may have different widths (AWD-LSTM's last one is as wide as its embedding). A model here has
one, so narrower layers are padded with zeros to the widest: rows that are zero give pre-activations
of 0, for which h and c stay exactly 0, and no matrix reads them but by columns of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import CheckpointError
from engine.models.family import StoredTensor, WeightMap
from engine.models.gated_rnn.config import GatedRnnConfig, GruConfig, LstmConfig
from engine.models.state_dict_source import LanguageModelSource
from engine.models.state_dicts import HELD_AS

EMBEDDINGS = (
    "encoder", "embedding", "embeddings", "embed", "embeds", "emb", "word_embedding",
    "word_embeddings", "token_embedding", "token_embeddings", "lookup_table", "wte",
)  # fmt: skip
HEADS = (
    "decoder", "head", "lm_head", "fc", "fc_out", "linear", "lin", "out", "output", "h2o", "proj",
    "projection", "dense", "classifier", "logits", "to_logits",
)  # fmt: skip
SUPPORTED = (
    "supported are language models of an embedding, layers of torch.nn.GRU or torch.nn.LSTM and a"
    " head"
)
_CELLS: dict[int, type[GatedRnnConfig]] = {one.gates: one for one in (GruConfig, LstmConfig)}
_RECURRENT = re.compile(  # longer numbers are no index of a layer
    r"(?P<at>(?:.*\.)?)(?P<kind>(?:weight|bias)_(?:ih|hh|hr))(?:_l(?P<layer>\d{1,9}))?"
    r"(?P<reverse>_reverse)?(?P<raw>_raw)?"
)
_INDEX = re.compile(r"(?<![^.])\d+(?=\.)")  # of a module in a list: a whole part of its path
_DROPPED_EMBEDDING = "encoder_dp.emb.weight"  # fastai's second name of the embedding


def gates_of(stored: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the gates of a state dict's recurrent cells, by shape; None if it has no such cells.

    A plain torch.nn.RNN has one; 0: the shapes are of no cell.
    """
    for name, shape in stored.items():
        found = _RECURRENT.fullmatch(name)
        if found and found["kind"] == "weight_hh":
            square = len(shape) == 2 and shape[1] > 0 and shape[0] % shape[1] == 0
            return shape[0] // shape[1] if square else 0
    return None


def layout(
    stored: Mapping[str, Tensor], config_class: type[GatedRnnConfig]
) -> tuple[GatedRnnConfig, WeightMap]:
    """Return the config that names and shapes show, and where the model's tensors are.

    The head is tied if it is absent, or if its values are the embedding's.

    Raises:
        CheckpointError: it names the first tensor that is missing, unknown or of a shape that
            contradicts the others.
        ConfigError: shapes that no model here can have.
    """
    source = _Source(stored)
    cells = source.take_cells(config_class)
    embedding = source.take_embedding()
    vocabulary, width = embedding.shape
    widths = [stored[cell["weight_hh"]].shape[1] for cell in cells]
    hidden = max(widths)
    tensors: dict[str, tuple[StoredTensor, ...]] = {"embedding.weight": (embedding,)}
    changes = {}

    def put(name: str, part: StoredTensor, gates: int, *shape: int) -> None:
        tensors[name] = (part,)
        if part.shape != (gates * shape[0], *shape[1:]):
            changes[name] = partial(_padded, gates=gates, shape=shape)

    inputs, padded_inputs = width, width
    for index, (cell, units) in enumerate(zip(cells, widths, strict=True)):
        at, rows = f"layers.{index}", config_class.gates * units
        for side, ours, columns, padded in (
            ("ih", "input", inputs, padded_inputs),
            ("hh", "recurrent", units, hidden),
        ):
            matrix = source.take(cell[f"weight_{side}"], rows, columns)
            put(f"{at}.{ours}.weight", matrix, config_class.gates, hidden, padded)
            tensors[f"{at}.{ours}.bias"] = ()  # zeros
            if bias := cell.get(f"bias_{side}"):
                part = source.take(bias, rows)
                put(f"{at}.{ours}.bias", part, config_class.gates, hidden)
        inputs, padded_inputs = units, hidden

    head, head_bias = source.take_head(vocabulary, inputs)
    if head is None and inputs != width:
        raise CheckpointError(
            f"there is no head ({', '.join(sorted(HEADS))}), and the embedding {embedding.name!r}"
            f" cannot be it: its width is {width}, that of the last layer {inputs}; {SUPPORTED}"
        )
    source.finish()
    if head is not None and _equal(stored[head.name], stored[embedding.name]):
        head = None
    tied = head is None and inputs == hidden
    if not tied:
        put("head.weight", head or embedding, 1, vocabulary, hidden)
    if head_bias is not None:
        tensors["head_bias"] = (head_bias,)
    config = config_class(  # type: ignore[call-arg]  # `cell` has a default in each
        vocab_size=vocabulary,
        d_model=hidden,
        d_embedding=width,
        n_layers=len(cells),
        tie_embeddings=tied,
        head_bias=head_bias is not None,
        dtype=HELD_AS[stored[embedding.name].dtype],
    )
    return config, WeightMap(tensors, changes=changes)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _padded(tensor: Tensor, gates: int, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor [gates * n, ...] with each gate padded by zeros to `shape`."""
    parts = tensor.reshape(gates, -1, *tensor.shape[1:])
    missing = [new - old for new, old in zip(shape, parts.shape[1:], strict=True)]
    sides = [side for size in reversed(missing) for side in (0, size)]
    return functional.pad(parts, sides).flatten(0, 1)


_Cell = dict[str, str]  # the names of a recurrent layer's tensors, by kind (`weight_ih`, ...)


class _Source(LanguageModelSource):
    """A state dict with recurrent layers."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        super().__init__(
            {name: tensor for name, tensor in stored.items() if not _is_copy(name)},
            SUPPORTED,
            embeddings=EMBEDDINGS,
            heads=HEADS,
        )

    def take_cells(self, config_class: type[GatedRnnConfig]) -> list[_Cell]:
        """Return the recurrent layers, in order."""
        found = {
            name: match for name in self.left if (match := _RECURRENT.fullmatch(name)) is not None
        }
        self._check_gates(found, config_class)
        dropped = {_place(match): name for name, match in found.items() if match["raw"] is not None}
        cells: dict[tuple[str, int], _Cell] = {}
        for name, match in found.items():
            if match["raw"] is None and _place(match) in dropped:
                del self.left[name]
                continue
            module, layer, kind = _place(match)
            cells.setdefault((module, layer), {})[kind] = name
        if not cells:
            raise self.error("there are no recurrent layers (tensors like 'rnn.weight_hh_l0')")
        modules = {_INDEX.sub("#", at) for at, _ in cells}
        if len(modules) > 1:
            raise self.error(
                "there are recurrent layers in several modules"
                f" ({', '.join(sorted({at for at, _ in cells}))})"
            )
        order = sorted(cells, key=_order)
        needed = ["weight_ih", "weight_hh"]
        if any(kind.startswith("bias") for cell in cells.values() for kind in cell):
            needed += ["bias_ih", "bias_hh"]  # torch writes both of every layer, or none
        for at, layer in order:
            cell = cells[at, layer]
            for kind in needed:
                if kind not in cell:
                    beside = cell.get("weight_ih") or next(iter(cell.values()))
                    raise self.error(f"tensor {_named_as(beside, kind)!r} is missing")
            if layer and (at, layer - 1) not in cells:
                missing = f"{at}weight_ih_l{layer - 1}"
                raise self.error(f"tensor {missing!r} is missing")
        return [cells[key] for key in order]

    def _check_gates(
        self, found: Mapping[str, re.Match[str]], config_class: type[GatedRnnConfig]
    ) -> None:
        """Raise CheckpointError for layers that are not of the family's cell."""
        for name, match in found.items():
            if match["reverse"]:
                raise self.error(
                    f"tensor {name!r} shows a bidirectional layer, which reads the tokens that come"
                    " after one, too"
                )
            if match["kind"].endswith("_hr"):
                raise self.error(
                    f"tensor {name!r} shows an LSTM with projections (proj_size), which is not"
                    " supported"
                )
        for name, match in found.items():
            if match["kind"] != "weight_hh":
                continue
            shape = list(self.left[name].shape)
            gates = gates_of({name: tuple(shape)})
            if gates == config_class.gates:
                continue
            if gates == 1:
                reason = "shows a torch.nn.RNN without gates, which is not supported"
            elif gates in _CELLS:
                other = _CELLS[gates].family
                reason = f"shows {gates} gates: {other.upper()} layers, of the family {other}"
            else:
                reason = (
                    f"is of no cell; [{config_class.gates} n, n] is one of {config_class.family}"
                )
            raise self.error(f"tensor {name!r} {shape} {reason}")


def _order(place: tuple[str, int]) -> tuple[list[int], int]:
    """Return by what layers are sorted: the numbers in a module's name, then the layer in it."""
    return [int(number) for number in re.findall(r"\d+", place[0])], place[1]


def _named_as(name: str, kind: str) -> str:
    """Return the name that a tensor of another kind has beside the recurrent tensor `name`."""
    at, _, last = name.removesuffix("_raw").rpartition(".")
    _, suffix, layer = last.partition("_l")
    return f"{at}.{kind}{suffix}{layer}".removeprefix(".")


def _is_copy(name: str) -> bool:
    return name == _DROPPED_EMBEDDING or name.endswith("." + _DROPPED_EMBEDDING)


def _place(match: re.Match[str]) -> tuple[str, int, str]:
    """Return the module, layer and kind of a recurrent tensor.

    A module that drops weights, of which `module` is the one inside, counts as that one.
    """
    return match["at"].removesuffix("module."), int(match["layer"] or 0), match["kind"]
