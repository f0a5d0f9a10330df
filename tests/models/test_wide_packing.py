"""How weights are packed for wide steps: what csrc/wide_step multiplies of a stream, in its order,
are the model's products."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from engine.ops import wide_step
from engine.ops.cluster_decode import ClusterLayer

BLOCKS, GROUPS = wide_step.BLOCKS, wide_step._GROUPS


def matrix(rows: int, inputs: int) -> Tensor:
    """Small integers: sums are exact in any order."""
    return torch.randint(-3, 4, (rows, inputs)).double()


class Streams:
    """Slabs in the order in which the groups of the blocks read them (WideShape::run)."""

    def __init__(self, packed: Tensor) -> None:
        self._packed = packed
        self._read = torch.zeros(BLOCKS, GROUPS, dtype=torch.long)

    def slab(self, block: int, group: int) -> Tensor:
        """The next one: [64, 16], of granules of eight rows by eight inputs, of 16 inputs two after
        another, as wgmma reads them from shared memory without swizzle."""
        at = int(self._read[block, group])
        self._read[block, group] += 1
        granules = self._packed[block, group, at * 1024 : (at + 1) * 1024].reshape(8, 2, 8, 8)
        return granules.permute(0, 2, 1, 3).reshape(64, 16)

    def sums(self, block: int, group: int, inputs: Tensor, high: int = 1) -> Tensor:
        """A pass: [high, 64], so many slabs at each step of 16 inputs."""
        sums = torch.zeros(high, 64).double()
        for step, slab in product(inputs.split(16), range(high)):
            sums[slab] += self.slab(block, group) @ step
        return sums

    def are_read(self) -> bool:
        """To their ends, but for zeros."""
        longest = int(self._read.max())
        return self._packed.shape[2] == longest * 1024 and not any(
            self._packed[block, group, int(self._read[block, group]) * 1024 :].any()
            for block, group in product(range(BLOCKS), range(GROUPS))
        )


def neighbours(sums: Tensor) -> Tensor:
    """[64] as the channels that they are: of a warp's sixteen r and r + 8 are neighbours."""
    return sums.reshape(4, 2, 8).transpose(1, 2).flatten()


def own_first(block: int, stream: Tensor) -> Tensor:
    return stream.roll(-block * (len(stream) // BLOCKS))


def passes(count: int) -> list[tuple[int, int]]:
    """(group, number): the groups take turns, and all have as many, those from `count` on zeros."""
    turns = -(-count // GROUPS)
    return [(number % GROUPS, number) for number in range(turns * GROUPS)]


def check_part(streams: Streams, weight: Tensor) -> None:
    """All channels of the stream, from what each block has made, filled up to pairs of steps."""
    made, own = matrix(1, weight.shape[1])[0], weight.shape[1] // BLOCKS
    found = torch.zeros(len(weight)).double()
    for block in range(BLOCKS):
        inputs = torch.zeros(own + -own % 32).double()
        inputs[:own] = made[block * own : (block + 1) * own]
        for group, number in passes(len(weight) // 128):
            for slab in (0, 1):
                sums = streams.sums(block, group, inputs)[0]
                if number >= len(weight) // 128:
                    assert not sums.any()
                    continue
                for warp, sixteen in enumerate(neighbours(sums).split(16)):
                    first = 128 * number + 32 * warp + 16 * slab
                    found[first : first + 16] += sixteen
    assert torch.equal(found, weight @ made)


def check_gates(streams: Streams, weight: Tensor, gates: int, stream: Tensor) -> None:
    inner = len(weight) // gates
    found = torch.zeros(gates, inner).double()
    for block in range(BLOCKS):
        for group, number in passes(inner // 256):
            sums = streams.sums(block, group, own_first(block, stream), (gates + 1) // 2)
            if number >= inner // 256:
                assert not sums.any()
                continue
            for warp, gate in product(range(4), range(gates)):
                first = block * inner // BLOCKS + 32 * number + 8 * warp
                of_gate = 16 * warp + gate % 2 * 8
                found[gate, first : first + 8] = sums[gate // 2, of_gate : of_gate + 8]
    assert torch.equal(found.flatten(), weight @ stream)


def check_up(streams: Streams, weight: Tensor, stream: Tensor) -> None:
    own, found = len(weight) // BLOCKS, []
    for block in range(BLOCKS):
        rows = [torch.zeros(0).double()]
        for group, number in passes(-(-own // 64)):
            sums = streams.sums(block, group, own_first(block, stream))[0]
            rows.append(neighbours(sums))
            assert number * 64 < own or not sums.any()
        found.append(torch.cat(rows)[:own])
    assert torch.equal(torch.cat(found), weight @ stream)


def check_head(streams: Streams, weight: Tensor, stream: Tensor) -> None:
    """Some of the inputs for each group, multiples of four steps."""
    fours = len(stream) // 64
    bounds = [group * fours // GROUPS * 64 for group in range(GROUPS + 1)]
    count = -(-len(weight) // (BLOCKS * 64))
    found = torch.zeros(count * BLOCKS * 64).double()
    for block, number in product(range(BLOCKS), range(count)):
        inputs, sums = own_first(block, stream), torch.zeros(64).double()
        for group in range(GROUPS):
            some = inputs[bounds[group] : bounds[group + 1]]
            if len(some) > 0:
                sums += streams.sums(block, group, some)[0]
        for warp, sixteen in enumerate(neighbours(sums).split(16)):
            first = ((number * 4 + warp) * BLOCKS + block) * 16
            found[first : first + 16] = sixteen
    assert torch.equal(found[: len(weight)], weight @ stream)
    assert not found[len(weight) :].any()


@pytest.mark.parametrize(
    ("width", "inner", "hidden", "gates", "vocabulary", "convolved"),
    [
        (128, 256, 0, 2, 5, True),
        (128, 256, 256, 3, 513, False),
        (256, 256, 256, 2, 600, True),
        (384, 768, 1536, 2, 66, True),
        (384, 512, 1280, 3, 1025, False),
        (512, 1024, 768, 3, 300, True),
        (512, 256, 2048, 2, 511, False),
    ],
)
def test_products_of_a_stream_are_those_of_the_model(
    width: int, inner: int, hidden: int, gates: int, vocabulary: int, convolved: bool
) -> None:
    torch.manual_seed(0)
    layers = [
        ClusterLayer(
            gates=matrix(gates * inner, width),
            out=matrix(width, inner),
            mix=matrix(width, width) if convolved else None,
            up=matrix(hidden, width) if hidden > 0 else None,
            down=matrix(width, hidden) if hidden > 0 else None,
        )
        for _ in range(2)
    ]
    head, stream = matrix(vocabulary, width), matrix(1, width)[0]
    streams = Streams(wide_step.packed(layers, head, gates))
    for layer in layers:
        if layer.mix is not None:
            check_part(streams, layer.mix)
        check_gates(streams, layer.gates, gates, stream)
        check_part(streams, layer.out)
        if layer.up is not None and layer.down is not None:
            check_up(streams, layer.up, stream)
            check_part(streams, layer.down)
    without = Streams(wide_step.packed(layers, None, gates))
    assert torch.equal(without._packed, streams._packed[:, :, : without._packed.shape[2]])
    check_head(streams, head, stream)
    assert streams.are_read()
