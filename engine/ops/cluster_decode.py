"""cluster_step: one token of up to about a hundred sequences through a small model in one kernel.

For Hopper. A cluster of sixteen blocks processes up to 32 sequences and holds a sixteenth of all
layers' weights in each block. Blocks exchange data through their shared memory, so a product costs
the time to read its weights and one exchange, not a kernel launch. Every cluster reads all weights,
mostly from the L2 cache, where other clusters have just read them. A model's layers therefore have
at most 67 million weights. The kernel also computes the head; if that is large, a separate head
reads the output of the last norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from engine.ops.library import preactivations_of

# Blocks that share a model's weights.
BLOCKS = 16

_TILE = 16  # rows by as many inputs; 32 lanes with eight weights each
_PAIRS = 6  # pairs of warps in a block, each with its own stream of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayer:
    """A layer's tensors on one GPU, bfloat16 and contiguous.

    Matrices are [rows, inputs], biases [rows] or None. Norms have no weights of their own; these
    are folded into the matrices after them (engine/ops/fused_norm.py). Without a convolution `taps`
    and `mix` are None, without an MLP `up` and `down`.
    """

    gates: Tensor  # [gates * inner, d_model], gate by gate
    out: Tensor  # [d_model, inner]
    gates_bias: Tensor | None = None
    out_bias: Tensor | None = None
    taps: Tensor | None = None  # [d_model, K], the oldest input's first
    taps_bias: Tensor | None = None
    mix: Tensor | None = None  # [d_model, d_model], the pointwise part of the convolution
    mix_bias: Tensor | None = None
    up: Tensor | None = None  # [hidden, d_model]
    up_bias: Tensor | None = None
    down: Tensor | None = None  # [d_model, hidden]
    down_bias: Tensor | None = None


class ClusterProgram:
    """A model whose weights were packed for the kernel, as a copy.

    Keeps the other tensors of its layers (biases, taps). Waits for the device.

    Args:
        table: the embedding [ids, d_model].
        layers: as many as `refusal` allows.
        head: [vocabulary, d_model], with the last norm's weight folded in; None: a run returns
            hidden states, for a separate head.
        head_bias: [vocabulary].
        norm: without a head, the last norm's weight [d_model].
        cell: name of the recurrence.
        linear_candidate: g(x) = x.
        normalize_gates: for minLSTM: f' + i' = 1.
        eps: the norms' epsilon.

    Raises:
        RuntimeError: shapes or dtypes do not fit the kernel (`refusal`), or each other.
    """

    def __init__(
        self,
        table: Tensor,
        layers: Sequence[ClusterLayer],
        head: Tensor | None,
        head_bias: Tensor | None,
        *,
        norm: Tensor | None = None,
        cell: str,
        linear_candidate: bool,
        normalize_gates: bool,
        eps: float,
    ) -> None:
        _require((head is None) == (norm is not None), "either a head or a norm is required")
        gates = preactivations_of(cell)
        _check(table, layers, head, head_bias, norm, gates)
        self._table, self._head_bias, self._norm = table, head_bias, norm
        self._vocabulary = 0 if head is None else len(head)
        self._hidden = 0 if layers[0].up is None else len(layers[0].up)
        self._cell, self._eps = cell, eps
        self._linear_candidate, self._normalize_gates = linear_candidate, normalize_gates
        self._weights = _packed(layers, head, gates)
        self._taps = 0 if layers[0].taps is None else layers[0].taps.shape[1]
        self._vectors: list[Tensor] = []
        self._plan = torch.tensor(
            [self._indices(layer) for layer in layers], dtype=torch.int64, device="cpu"
        )
        # the kernel prefetches weights before the previous kernel on the stream has ended
        if table.is_cuda:
            torch.cuda.synchronize(table.device)

    def run(self, tokens: Tensor, slots: Tensor, cell: Tensor, conv: Tensor | None) -> Tensor:
        """Read one token of every row.

        Args:
            tokens: int32 [batch]; an id out of range is read as a row of zeros.
            slots: int32 [batch]; negative: a padding row, whose logits are undefined. No row may
                occur twice.
            cell: float32 [layers, num_slots, inner]; **changed in place**.
            conv: float32 [layers, num_slots, K - 1, d_model], **changed in place**; None without
                convolutions.

        Returns:
            Logits, float32 [batch, vocabulary]; without a head the last norm's output, bfloat16
            [batch, d_model].

        Raises:
            RuntimeError: shapes, dtypes or devices do not fit, or the GPU is not a Hopper.
        """
        if conv is not None and conv.shape[2] + 1 != self._taps:
            raise RuntimeError(
                f"minserve::cluster_step: conv must have {self._taps} - 1 inputs of each channel,"
                f" got {list(conv.shape)}"
            )
        result: Tensor = torch.ops.minserve.cluster_step(
            tokens,
            slots,
            self._weights,
            self._table,
            self._head_bias,
            self._norm,
            self._vectors,
            self._plan,
            cell,
            conv,
            self._hidden,
            self._vocabulary,
            self._cell,
            self._eps,
            self._linear_candidate,
            self._normalize_gates,
        )
        return result

    def _indices(self, layer: ClusterLayer) -> list[int]:
        """Return a row of the plan for csrc/cluster_decode/op.cpp: indices; -1 for no tensor."""
        of_layer = (
            layer.taps,
            layer.taps_bias,
            layer.mix_bias,
            layer.gates_bias,
            layer.out_bias,
            layer.up_bias,
            layer.down_bias,
        )
        indices = []
        for tensor in of_layer:
            indices.append(-1 if tensor is None else len(self._vectors))
            if tensor is not None:
                self._vectors.append(tensor.detach())
        return indices


def refusal(*, layers: int, width: int, inner: int, hidden: int, taps: int) -> str:
    """Return why the kernel does not support a model of these sizes; "": it does.

    The answer is the same in any build of the library.
    """
    why: str = torch.ops.minserve.cluster_step_refusal(layers, width, inner, hidden, taps)
    return why


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"minserve::cluster_step: {what}")


def _check(
    table: Tensor,
    layers: Sequence[ClusterLayer],
    head: Tensor | None,
    head_bias: Tensor | None,
    norm: Tensor | None,
    gates: int,
) -> None:
    """Raise RuntimeError if tensors do not fit each other or the kernel."""
    width, first = table.shape[1], layers[0]
    inner, hidden = first.out.shape[1], 0 if first.up is None else len(first.up)
    count = 0 if first.taps is None else first.taps.shape[1]
    why = refusal(layers=len(layers), width=width, inner=inner, hidden=hidden, taps=count)
    _require(not why, why)
    convolved, has_mlp = count > 0, hidden > 0
    shapes: dict[str, tuple[int, ...] | None] = {
        "gates": (gates * inner, width),
        "gates_bias": (gates * inner,),
        "out": (width, inner),
        "out_bias": (width,),
        "taps": (width, count) if convolved else None,
        "taps_bias": (width,) if convolved else None,
        "mix": (width, width) if convolved else None,
        "mix_bias": (width,) if convolved else None,
        "up": (hidden, width) if has_mlp else None,
        "up_bias": (hidden,) if has_mlp else None,
        "down": (width, hidden) if has_mlp else None,
        "down_bias": (width,) if has_mlp else None,
    }
    vocabulary = 0 if head is None else len(head)
    of_model = [("table", table, tuple(table.shape))]
    if head is not None:
        of_model.append(("head", head, (vocabulary, width)))
    if head_bias is not None:
        of_model.append(("head_bias", head_bias, (vocabulary,)))
    if norm is not None:
        of_model.append(("norm", norm, (width,)))
    for number, layer in enumerate(layers):
        for name, shape in shapes.items():
            tensor: Tensor | None = getattr(layer, name)
            if tensor is not None and shape is not None:
                of_model.append((f"{name} of layer {number}", tensor, shape))
            optional = name.endswith("_bias") and shape is not None
            _require(
                optional or (tensor is None) == (shape is None),
                f"{name} of layer {number} is missing, or does not belong in such a model",
            )
    for name, tensor, shape in of_model:
        _require(
            tuple(tensor.shape) == shape
            and tensor.dtype == torch.bfloat16
            and tensor.is_contiguous()
            and tensor.device == table.device
            and tensor.data_ptr() % 4 == 0,
            f"{name} must be contiguous bfloat16 {list(shape)} on {table.device},"
            f" got {tensor.dtype} {list(tensor.shape)} on {tensor.device}",
        )


def _products(layer: ClusterLayer, gates: int) -> list[list[Tensor]]:
    """Return what each pair of warps reads of a layer, in order: [BLOCKS, tiles, 256] each."""
    products = [_gate_rows(layer.gates, gates), _parts(layer.out)]
    if layer.mix is not None:
        products.insert(0, _rows(layer.mix))
    if layer.up is not None and layer.down is not None:
        products += [_rows(layer.up), _parts(layer.down)]
    return products


def _packed(layers: Sequence[ClusterLayer], head: Tensor | None, gates: int) -> Tensor:
    """Return [BLOCKS, _PAIRS, weights]: the pairs' streams, padded to the longest, the first."""
    products = [product for layer in layers for product in _products(layer, gates)]
    if head is not None:
        products.append(_head_rows(head))
    streams = [torch.cat(of_pair, dim=1).flatten(1) for of_pair in zip(*products, strict=True)]
    filled: Tensor = pad_sequence([stream.T for stream in streams], batch_first=True)
    return filled.permute(2, 0, 1).contiguous()


def _tiles(weight: Tensor) -> Tensor:
    """Arrange [..., rows, inputs], multiples of 16, as tiles: [..., rows / 16, inputs / 16, 256].

    Weights are in the order of lanes. Of rows t / 4 and t / 4 + 8, lane t has the inputs 2 (t % 4)
    and 2 (t % 4) + 1, then both of these eight inputs further on (PTX ISA, mma.m16n8k16).
    """
    *before, rows, inputs = weight.shape
    split = weight.reshape(*before, rows // _TILE, 2, 8, inputs // _TILE, 2, 4, 2)
    n = len(before)
    tile_of_rows, half, row, tile, later, pair, one = range(n, n + 7)
    order = (*range(n), tile_of_rows, tile, row, pair, later, half, one)
    return split.permute(order).reshape(*before, rows // _TILE, inputs // _TILE, _TILE * _TILE)


def _shared_out(units: Tensor) -> list[Tensor]:
    """Distribute [BLOCKS, units, tiles, 256] over the pairs of warps, in turn."""
    return [units[:, pair::_PAIRS].flatten(1, 2) for pair in range(_PAIRS)]


def _rows(weight: Tensor) -> list[Tensor]:
    """Assign adjacent rows to each block, padded with zeros to whole tiles."""
    own = weight.reshape(BLOCKS, -1, weight.shape[1])
    own = functional.pad(own, (0, 0, 0, -own.shape[1] % _TILE))
    return _shared_out(_tiles(own))


def _gate_rows(weight: Tensor, gates: int) -> list[Tensor]:
    """Assign units of eight channels with all gates: two fill a tile, three are padded to two."""
    units = weight.reshape(gates, BLOCKS, -1, 8, weight.shape[1]).permute(1, 2, 0, 3, 4)
    units = functional.pad(units, (0, 0, 0, 0, 0, gates % 2))
    count = units.shape[1]
    tiles = _tiles(units.reshape(BLOCKS, count, -1, weight.shape[1]))
    return _shared_out(tiles.flatten(2, 3))


def _parts(weight: Tensor) -> list[Tensor]:
    """Assign all rows of adjacent inputs to each block.

    A warp has every twelfth tile of rows. A pair has those of its two warps alternately, sixteen
    inputs at a time.
    """
    rows = -len(weight) % (2 * _PAIRS * _TILE)
    tiles = _tiles(functional.pad(weight, (0, 0, 0, rows)))  # [rows / 16, inputs / 16, 256]
    parts = tiles.reshape(-1, _PAIRS, 2, BLOCKS, tiles.shape[1] // BLOCKS, _TILE * _TILE)
    turn, pair, warp, block, step, numbers = range(6)
    parts = parts.permute(block, pair, step, turn, warp, numbers)
    return list(parts.flatten(2, 4).unbind(1))


def _head_rows(head: Tensor) -> list[Tensor]:
    """Assign tiles of rows to the blocks in turn; the last ones are zeros."""
    rows = functional.pad(head, (0, 0, 0, -len(head) % (_TILE * BLOCKS)))
    tiles = _tiles(rows).reshape(-1, BLOCKS, head.shape[1] // _TILE, _TILE * _TILE)
    return _shared_out(tiles.transpose(0, 1))


def _fake(
    tokens: Tensor,
    slots: Tensor,
    packed: Tensor,
    table: Tensor,
    head_bias: Tensor | None,
    norm: Tensor | None,
    vectors: Sequence[Tensor],
    plan: Tensor,
    cell: Tensor,
    conv: Tensor | None,
    hidden: int,
    vocabulary: int,
    kind: str,
    eps: float,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    if norm is not None:
        return table.new_empty((tokens.shape[0], table.shape[1]))
    return cell.new_empty((tokens.shape[0], vocabulary))


torch.library.register_fake("minserve::cluster_step", _fake)
