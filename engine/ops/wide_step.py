"""Weights of a small model as csrc/wide_step reads them: the kernel of `cluster_step` for some
hundred sequences, which eight blocks share.

A cluster of eight has up to 80 sequences. Its warps multiply by groups of four: a slab, 64 rows of
weights by 16 inputs, is what a group reads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from engine.ops.cluster_decode import ClusterLayer

#: Blocks that share a model's weights.
BLOCKS = 8

_GROUPS = 3  # of a block's warps, each with a stream of weights of its own
_SLAB = 64  # rows
_UNIT = 16  # rows of a warp, and inputs of a slab


def packed(layers: Sequence[ClusterLayer], head: Tensor | None, gates: int) -> Tensor:
    """[BLOCKS, groups, weights] of layers that fit each other, filled up to the longest stream, the
    last. head [vocabulary, d_model], or None."""
    products = [_for_all(passes) for layer in layers for passes in _products(layer, gates)]
    parts = [[part] for part in _head_parts(head)] if head is not None else [[]] * _GROUPS
    streams = [
        torch.cat([*(passes[:, group::_GROUPS].flatten(1) for passes in products), *part], dim=1)
        for group, part in enumerate(parts)
    ]
    return side_by_side(streams)


def side_by_side(streams: Sequence[Tensor]) -> Tensor:
    """Streams [blocks, weights] -> [blocks, streams, weights], filled up to the longest."""
    filled: Tensor = pad_sequence([stream.T for stream in streams], batch_first=True)
    return filled.permute(2, 0, 1).contiguous()


def _products(layer: ClusterLayer, gates: int) -> list[Tensor]:
    """What the groups read of a layer, in its order: [BLOCKS, passes, weights] each; the groups
    take turns."""
    products = [_gate_rows(layer.gates, gates), _parts(layer.out)]
    if layer.mix is not None:
        products.insert(0, _parts(layer.mix))
    if layer.up is not None and layer.down is not None:
        products += [_up_rows(layer.up), _parts(layer.down)]
    return products


def _for_all(passes: Tensor) -> Tensor:
    """With zeros up to as many for each group."""
    return functional.pad(passes, (0, 0, 0, -passes.shape[1] % _GROUPS))


def _slabs(weight: Tensor) -> Tensor:
    """[..., rows, inputs], of 64 and 16 -> [..., rows / 64, inputs / 16, 1024]: granules of eight
    rows by eight inputs, two a step of inputs, as the tensor cores read them from shared memory
    (PTX ISA, wgmma, canonical layouts without swizzle)."""
    *before, rows, inputs = weight.shape
    split = weight.reshape(*before, rows // _SLAB, 8, 8, inputs // _UNIT, 2, 8)
    n = len(before)
    slab, eight, row, step, half, one = range(n, n + 6)
    order = (*range(n), slab, step, eight, half, row, one)
    return split.permute(order).reshape(*before, rows // _SLAB, inputs // _UNIT, _SLAB * _UNIT)


def _in_pairs(weight: Tensor) -> Tensor:
    """Of each 16 rows [..., rows, inputs] the even ones first: a lane has rows r and r + 8 of a
    product, which are neighbours then."""
    *before, rows, inputs = weight.shape
    pairs = weight.reshape(*before, rows // _UNIT, 8, 2, inputs)
    in_order: Tensor = pairs.transpose(-3, -2).reshape(weight.shape)
    return in_order


def _own_first(weight: Tensor) -> Tensor:
    """Rows of each block [BLOCKS, ..., inputs], multiplied with the residual stream: the inputs
    that the block itself has come first, then those of the next one, round about."""
    of_blocks = weight.unflatten(-1, (BLOCKS, -1))
    turned = [of_blocks[block].roll(-block, dims=-2) for block in range(BLOCKS)]
    return torch.stack(turned).flatten(-2)


def _passes(slabs: Tensor, high: int) -> Tensor:
    """[BLOCKS, slabs, steps, 1024] -> [BLOCKS, passes, weights]: so many slabs a pass, step by
    step."""
    of_passes: Tensor = slabs.unflatten(1, (-1, high))
    return of_passes.transpose(2, 3).flatten(2)


def _gate_rows(weight: Tensor, gates: int) -> Tensor:
    """A warp has eight channels: two gates of them are its sixteen rows of a slab, a third those of
    a second one, with zeros."""
    units = weight.reshape(gates, BLOCKS, -1, 8, weight.shape[1]).permute(1, 2, 0, 3, 4)
    units = functional.pad(units, (0, 0, 0, 0, 0, gates % 2))
    high = units.shape[2] // 2
    # [blocks, passes, warps, slabs, 16, inputs]
    warps = units.reshape(BLOCKS, -1, 4, high, _UNIT, weight.shape[1])
    rows = warps.transpose(2, 3).reshape(BLOCKS, -1, weight.shape[1])
    return _passes(_slabs(_own_first(rows)), high)


def _up_rows(weight: Tensor) -> Tensor:
    """Neighbouring rows for each block, filled up with zeros to whole slabs."""
    own = _in_pairs(weight.reshape(BLOCKS, -1, weight.shape[1]))
    own = functional.pad(own, (0, 0, 0, -own.shape[1] % _SLAB))
    return _passes(_slabs(_own_first(own)), 1)


def _head_parts(head: Tensor) -> list[Tensor]:
    """Sixteen rows after another go round the blocks; the last ones are zeros. Of all rows each
    group has some of the inputs, multiples of four steps."""
    rows = functional.pad(head, (0, 0, 0, -len(head) % (_SLAB * BLOCKS)))
    sixteens = _in_pairs(rows).reshape(-1, BLOCKS, _UNIT, head.shape[1])
    own = _slabs(_own_first(sixteens.transpose(0, 1).flatten(1, 2)))  # [blocks, passes, steps, ...]
    fours = own.shape[2] // 4
    bounds = [group * fours // _GROUPS * 4 for group in range(_GROUPS + 1)]
    return [own[:, :, first:end].flatten(1) for first, end in pairwise(bounds)]


def _parts(weight: Tensor) -> Tensor:
    """All rows of neighbouring inputs for each block, with zeros up to pairs of steps. A warp has
    32 neighbouring rows, sixteen of each slab."""
    inputs = weight.shape[1]
    rows = _in_pairs(weight).reshape(-1, 4, 2, _UNIT, inputs).transpose(1, 2).reshape(-1, inputs)
    parts = rows.unflatten(1, (BLOCKS, -1)).transpose(0, 1)
    parts = functional.pad(parts, (0, -parts.shape[2] % (2 * _UNIT)))
    slabs: Tensor = _slabs(parts).unflatten(1, (-1, 2))
    return slabs.flatten(2)  # one after the other
