"""ClusterDecode: which models it takes; how weights are packed; that its steps are the chain's."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.models.backends import cluster_decode, fused_gemm
from engine.models.backends.cluster_decode import ClusterDecode, takes
from engine.models.backends.hopper import HopperBackend
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.ops import cluster_decode as cluster_step
from engine.ops.cluster_decode import ClusterLayer, ClusterProgram
from tests.models.test_hopper import build, copied, exact_of, only
from tests.models.variants import blocks_of, int32, relative_error

BASE = MinRnnConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=3)


def config(**changes: object) -> MinRnnConfig:
    return dataclasses.replace(BASE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"conv_kernel": 4, "cell": "minlstm"}, True),
        ({"mlp_ratio": 0.0}, True),
        ({"d_model": 512, "n_layers": 2}, True),
        ({"quantization": "int8"}, False),
        ({"d_model": 192, "expansion": 4 / 3, "mlp_ratio": 4 / 3}, False),  # 12 for each block
        ({"d_model": 640, "n_layers": 1, "expansion": 1.2}, False),
        ({"expansion": 1.5}, False),  # 576 channels: 36 for each block
        ({"mlp_ratio": 3.0}, False),  # 1152
        ({"conv_kernel": 5}, False),
        ({"n_layers": 32, "d_model": 128}, True),
        ({"n_layers": 33, "d_model": 128}, False),
        ({"vocab_size": 32000}, True),
        ({"vocab_size": 100_000}, True),  # whose head is none of its business
        ({"n_layers": 32}, True),
        ({"d_model": 512, "n_layers": 20}, False),  # too many for each cluster to read them
    ],
)
def test_which_models_it_takes(changes: dict[str, object], taken: bool) -> None:
    assert takes(blocks_of(config(**changes))) == taken


def numbered(rows: int, inputs: int) -> Tensor:
    """A matrix whose numbers say where they are."""
    return (torch.arange(rows).unsqueeze(1) * 10000 + torch.arange(inputs)).double()


def tile_of(weight: Tensor, rows: list[int], first_input: int) -> Tensor:
    """16 rows (-1: zeros) by 16 inputs as lanes hold them, by the definition of mma.m16n8k16."""
    found = torch.zeros(32, 8).double()
    for lane in range(32):
        for number in range(8):
            row = rows[lane // 4 + 8 * (number // 2 % 2)]
            column = first_input + 2 * (lane % 4) + number % 2 + 8 * (number // 4)
            found[lane, number] = 0 if row < 0 else weight[row, column]
    return found.flatten()


@pytest.mark.parametrize("gates", [2, 3])
def test_gates_of_eight_channels_are_packed_together(gates: int) -> None:
    weight = numbered(gates * 768, 128)
    pairs = cluster_step._gate_rows(weight, gates)
    assert len(pairs) == 6
    per_unit = (gates + 1) // 2 * 8
    for block, unit in ((0, 0), (3, 1), (15, 5)):
        first = block * 48 + unit * 8
        rows = [gate * 768 + first + n for gate in range(gates) for n in range(8)]
        rows += [-1] * (-len(rows) % 16)
        own = pairs[unit % 6][block, unit // 6 * per_unit :]
        for tile in range(len(rows) // 16):
            for step in (0, 7):
                expected = tile_of(weight, rows[16 * tile :][:16], 16 * step)
                assert torch.equal(own[8 * tile + step], expected)


@pytest.mark.parametrize("rows", [384, 512])
def test_parts_are_packed_for_the_warps_that_multiply_them(rows: int) -> None:
    weight, turns = numbered(rows, 768), -(-rows // 16 // 12)
    pairs = cluster_step._parts(weight)
    for block, pair, warp, turn, step in (
        (0, 0, 0, 0, 0),
        (7, 4, 1, 1, 2),
        (15, 5, 1, turns - 1, 1),
    ):
        tile = 12 * turn + 2 * pair + warp
        of_tile = list(range(16 * tile, 16 * tile + 16)) if 16 * tile < rows else [-1] * 16
        expected = tile_of(weight, of_tile, 48 * block + 16 * step)
        assert torch.equal(pairs[pair][block, (step * turns + turn) * 2 + warp], expected)


def test_rows_of_the_head_go_round_the_blocks() -> None:
    weight = numbered(257, 128)
    pairs = cluster_step._head_rows(weight)
    assert torch.equal(pairs[0][3, 5], tile_of(weight, list(range(48, 64)), 80))
    assert torch.equal(pairs[1][0, 2], tile_of(weight, [256, *[-1] * 15], 32))
    assert not pairs[1][1:].any() and all(pair.numel() == 0 for pair in pairs[2:])


def test_a_stream_has_products_in_the_order_in_which_they_are_computed() -> None:
    """As ClusterShape::run in csrc/cluster_decode/args.h has them: by layers, and the head."""
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, inputs: int) -> Tensor:
        return torch.randn(rows, inputs, generator=draw).bfloat16()

    layers = [
        ClusterLayer(
            gates=matrix(1024, 384),
            out=matrix(384, 512),
            taps=matrix(384, 2),
            mix=matrix(384, 384),
            up=matrix(256, 384),
            down=matrix(384, 256),
        )
        for _ in range(2)
    ]
    head = matrix(40, 384)
    program = ClusterProgram(
        matrix(5, 384),
        layers,
        head,
        None,
        cell="mingru",
        linear_candidate=False,
        normalize_gates=True,
        eps=1e-6,
    )
    for block, pair in ((0, 0), (1, 1), (15, 3), (2, 5)):
        expected: list[Tensor] = []

        def rows_of(weight: Tensor, rows: list[int], expected: list[Tensor] = expected) -> None:
            expected += [tile_of(weight.double(), rows, 16 * step) for step in range(24)]

        def part_of(
            weight: Tensor,
            block: int = block,
            pair: int = pair,
            expected: list[Tensor] = expected,
        ) -> None:
            steps = weight.shape[1] // 256
            for step in range(steps):
                for tile in (2 * pair, 2 * pair + 1, 2 * pair + 12, 2 * pair + 13):
                    rows = list(range(16 * tile, 16 * tile + 16))
                    first = 16 * (steps * block + step)
                    expected.append(tile_of(weight.double(), rows, first))

        for layer in layers:
            assert layer.mix is not None and layer.up is not None and layer.down is not None
            if pair < 2:  # 24 rows of a block: a tile and a half
                rows_of(
                    layer.mix,
                    [24 * block + n if n < 24 else -1 for n in range(16 * pair, 16 * pair + 16)],
                )
            if pair < 4:  # units of eight channels
                first = 32 * block + 8 * pair
                rows_of(layer.gates, [512 * gate + first + n for gate in (0, 1) for n in range(8)])
            part_of(layer.out)
            if pair == 0:
                rows_of(layer.up, list(range(16 * block, 16 * block + 16)))
            part_of(layer.down)
        if pair == 0:
            rows_of(head, [n if n < 40 else -1 for n in range(16 * block, 16 * block + 16)])
        stream = program._weights[block, pair].double()
        together = torch.cat(expected)
        assert torch.equal(stream[: len(together)], together)
        assert not stream[len(together) :].any()


MODELS = {
    "mingru": config(),
    "minlstm": config(cell="minlstm", cell_bias=True, out_bias=True, head_bias=True),
    "conv": config(conv_kernel=4, vocab_size=257),
    "minlstm conv": config(cell="minlstm", conv_kernel=2, vocab_size=300, tie_embeddings=True),
    "own-gates": config(
        cell="minlstm", normalize_gates=False, candidate="linear", mlp_bias=False, n_layers=2
    ),
    "no-mlp": config(mlp_ratio=0.0, conv_kernel=3, candidate="linear"),
    "one layer": config(d_model=128, n_layers=1, vocab_size=5),
    "256": config(d_model=256, n_layers=5, vocab_size=2000),
    "32 layers": config(d_model=128, n_layers=32),
    "wide": config(d_model=512, n_layers=2, cell="minlstm", conv_kernel=4),
    "256 conv": config(d_model=256, n_layers=2, expansion=5.0, mlp_ratio=1.0, conv_kernel=2),
    "512": config(d_model=512, n_layers=1, expansion=2.5, mlp_ratio=9.0),
}


# Of clusters: 8, 16 and, where there is room, 32 sequences each, and in turns.
BATCHES = (1, 7, 8, 9, 56, 57, 64, 100, 112, 113, 224, 225, 256, 399, *[40] * 20)


@dataclass(frozen=True)
class Form:
    """A head of its own, whatever the vocabulary, or none."""

    head: bool

    def of(self, model: LM) -> ClusterDecode:
        most = len(model.embedding.weight) if self.head else 0
        with patch("engine.models.backends.cluster_decode.SMALL_VOCABULARY", most):
            return ClusterDecode(model)

    def logits(self, got: Tensor, model: LM) -> Tensor:
        """What a step has left to others is the model's."""
        assert got.dtype == (torch.float32 if self.head else torch.bfloat16)
        return got if self.head else model.logits(got)


FORMS = [
    pytest.param(Form(True), id="with a head"),
    pytest.param(Form(False), id="to a head"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_as_the_chain_does(name: str, form: Form) -> None:
    """Many steps of changing batches. Ids that the model does not have are rows of zeros to
    both."""
    model = build(MODELS[name], torch.bfloat16)
    exact, chain = exact_of(model), only(HopperBackend(model), fused_gemm.NAME)
    clusters, chance = form.of(model), random.Random(name)
    most = max(BATCHES)
    ours = model.new_state(most)
    for rows in BATCHES:
        slots = chance.sample(range(most), rows)
        if rows > 3:
            slots[chance.randrange(rows)] = -1
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        ids = int32([chance.randrange(model.config.vocab_size) for _ in slots], "cuda")
        at = int32(slots, "cuda")
        theirs, reference = copied(ours), copied(ours)
        got = form.logits(clusters.step(ids, ours, at), model)
        expected = chain.step(ids, theirs, at)
        right = exact.logits(exact.step(ids, reference, at))
        assert got.shape == expected.shape and got.dtype == torch.float32
        for mine, other, best in (
            (got[live], expected[live], right[live]),
            *zip(ours.tensors(), theirs.tensors(), reference.tensors(), strict=True),
        ):
            error, usual = relative_error(mine, best), relative_error(other, best)
            assert error < 2 * usual + 5e-3
        dead = [row for row in range(most) if row not in slots]
        assert torch.equal(ours["cell"][:, dead], theirs["cell"][:, dead])
        if ours.get("conv") is not None and theirs.get("conv") is not None:
            assert torch.equal(ours["conv"][:, dead], theirs["conv"][:, dead])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_ids_and_slots_that_are_not_there(form: Form) -> None:
    """An id out of range is a row of zeros; a slot out of range is padding."""
    model = build(MODELS["conv"], torch.bfloat16)
    chain, clusters = only(HopperBackend(model), fused_gemm.NAME), form.of(model)
    state = model.new_state(20)
    ids = int32([3, -1, 257, 100_000, 5], "cuda")
    theirs = copied(state)
    got = form.logits(clusters.step(ids, state, int32([0, 1, 2, 3, 20], "cuda")), model)
    expected = chain.step(ids, theirs, int32([0, 1, 2, 3, -1], "cuda"))
    assert relative_error(got[:4], expected[:4]) < 0.02
    assert relative_error(state["cell"], theirs["cell"]) < 0.02


@pytest.mark.gpu
def test_without_room_for_a_cluster_the_chain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.backends.cluster_decode.works", lambda run: False)
    model = build(MODELS["mingru"], torch.bfloat16)
    quick, state = HopperBackend(model), model.new_state(16)
    assert cluster_decode.NAME not in [path.name for path in quick.paths]
    quick.prepare([16], [], [])
    rows = int32(list(range(16)), "cuda")
    assert quick.step(rows, state, rows).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mingru", "minlstm conv"])
def test_a_row_has_the_same_bits_in_every_place_beside_every_other(name: str, form: Form) -> None:
    model = build(MODELS[name], torch.bfloat16)
    clusters = form.of(model)
    before = model.new_state(1000)
    before["cell"].normal_()
    for rows in (20, 100, 200):
        ids = torch.randint(0, 60, (rows,), dtype=torch.int32, device="cuda")
        slots = torch.randperm(1000, device="cuda")[:rows].to(torch.int32)
        whole, state = copied(before), copied(before)
        logits = clusters.step(ids, whole, slots)
        order = torch.randperm(rows, device="cuda")
        others = slots[order].where(torch.rand(rows, device="cuda") < 0.7, -1)
        got = clusters.step(ids[order], state, others)
        assert torch.equal(got[others >= 0], logits[order][others >= 0])
        live = others[others >= 0].long()
        for mine, other in zip(state.tensors(), whole.tensors(), strict=True):
            assert torch.equal(mine[:, live], other[:, live])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["minlstm", "conv", "256 conv", "no-mlp"])
def test_equal_steps_have_the_same_bits(name: str, form: Form) -> None:
    """Whatever has come when: weights, channels, sums."""
    model = build(MODELS[name], torch.bfloat16)
    clusters = form.of(model)
    for rows in (40, 100, 200):
        start = model.new_state(rows)
        start["cell"].normal_()
        ids = torch.randint(0, 60, (rows,), dtype=torch.int32, device="cuda")
        slots = torch.randperm(rows, device="cuda").to(torch.int32)
        first = copied(start)
        expected = clusters.step(ids, first, slots)
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(300):
            state = copied(start)
            same &= (clusters.step(ids, state, slots) == expected).all()
            same &= (state["cell"] == first["cell"]).all()
            if state.get("conv") is not None and first.get("conv") is not None:
                same &= (state["conv"] == first["conv"]).all()
        assert same


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_graphs_of_several_batches_take_turns(form: Form) -> None:
    """What one step leaves behind in the blocks' memory, or still has on its way, reaches none."""
    model = build(MODELS["conv"], torch.bfloat16)
    clusters, chance = form.of(model), random.Random(3)
    batches = (16, 64, 128)
    state = model.new_state(batches[-1])
    captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    for batch in batches:
        tokens, slots = int32([0] * batch, "cuda"), int32([-1] * batch, "cuda")
        clusters.step(tokens, state, slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = clusters.step(tokens, state, slots)
        captured[batch] = (graph, tokens, slots, logits)
    for _ in range(200):
        batch = chance.choice(batches)
        graph, tokens, slots, logits = captured[batch]
        tokens.copy_(torch.randint(0, 66, (batch,), dtype=torch.int32))
        slots.copy_(int32(chance.sample(range(batches[-1]), batch), "cpu"))
        apart = copied(state)
        graph.replay()
        assert torch.equal(clusters.step(tokens, apart, slots), logits)
        assert torch.equal(apart["cell"], state["cell"])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_said(form: Form) -> None:
    model = build(MODELS["mingru"], torch.bfloat16)
    program = form.of(model)._program
    cell, one = model.new_state(4)["cell"], int32([1], "cuda")
    with pytest.raises(RuntimeError, match="slots"):
        program.run(one, int32([1, 2], "cuda"), cell, None)
    with pytest.raises(RuntimeError, match="cell"):
        program.run(one, one, cell.bfloat16(), None)
    with pytest.raises(RuntimeError, match="layers"):
        program.run(one, one, cell[:2], None)
    with pytest.raises(RuntimeError, match="conv"):
        program.run(one, one, cell, torch.zeros(3, 4, 3, 384, device="cuda"))
    with pytest.raises(RuntimeError, match="tokens"):
        program.run(one[:0], one[:0], cell, None)


def layer_of(**changes: Tensor | None) -> ClusterLayer:
    shapes = {"gates": (512, 128), "out": (128, 256), "up": (256, 128), "down": (128, 256)}
    matrices = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    return ClusterLayer(**{**matrices, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layer_of(out=torch.zeros(128, 384).bfloat16()), "multiples of 256, got 384"),
        (layer_of(gates=torch.zeros(768, 128).bfloat16()), r"gates of layer 0 must .*\[512, 128\]"),
        (layer_of(down=None), "down of layer 0 is missing"),
        (
            layer_of(mix=torch.zeros(128, 128).bfloat16()),
            "mix of layer 0 is .* does not belong in such a model",
        ),
        (layer_of(up_bias=torch.zeros(256)), "up_bias of layer 0 must be contiguous bfloat16"),
    ],
)
def test_layers_that_do_not_fit_are_named(layer: ClusterLayer, message: str) -> None:
    table = torch.zeros(5, 128).bfloat16()
    with pytest.raises(RuntimeError, match=message):
        ClusterProgram(
            table,
            [layer],
            table,
            None,
            cell="mingru",
            linear_candidate=False,
            normalize_gates=True,
            eps=1e-6,
        )


def test_a_step_has_a_head_or_a_norm() -> None:
    table, norm = torch.zeros(5, 128).bfloat16(), torch.ones(128).bfloat16()
    kind: dict[str, Any] = {"cell": "mingru", "linear_candidate": False, "normalize_gates": True}
    for head, given in ((table, norm), (None, None)):
        with pytest.raises(RuntimeError, match="either a head or a norm is required"):
            ClusterProgram(table, [layer_of()], head, None, norm=given, eps=1e-6, **kind)
    with pytest.raises(RuntimeError, match=r"norm must be contiguous bfloat16 \[128\]"):
        ClusterProgram(table, [layer_of()], None, None, norm=norm[:64], eps=1e-6, **kind)
