"""PersistentDecode: which models it takes; that its steps are the chain's, whatever the values."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from engine.config import Quantization
from engine.models.backends import fused_gemm, persistent_decode
from engine.models.backends.blocks import compile_blocks
from engine.models.backends.dispatch import PathBackend
from engine.models.backends.eager import EagerBackend
from engine.models.backends.hopper import HopperBackend
from engine.models.backends.lm_head import LmHead
from engine.models.backends.persistent_decode import PersistentDecode, _phases, _shapes, most_rows
from engine.models.backends.selector import select_backend
from engine.models.backends.weight_transforms import bytes_of_copy
from engine.models.language_model import LanguageModel
from engine.models.loader import quantize_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.quantize import QUANTIZED_DTYPES
from engine.ops import persistent_decode as ops
from engine.ops.persistent_decode import Phase, PhaseShape, Program
from tests.models.test_hopper import CONFIGS, build, copied, exact_of, only
from tests.models.variants import blocks_of, int32, relative_error

H100 = 132  # multiprocessors
SLOTS = 20


def config(**changes: object) -> MinRnnConfig:
    base = MinRnnConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=3)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 16),
        ({"d_model": 768, "n_layers": 12, "expansion": 1.5}, 16),
        ({"d_model": 2048, "n_layers": 24, "expansion": 1.5}, 16),  # 8192 inputs in four pieces
        ({"d_model": 2560, "mlp_ratio": 2.0}, 6),  # 5,120 inputs, which may not come in pieces
        ({"d_model": 2048, "expansion": 1.5, "quantization": "int8"}, 8),
        ({"cell": "minlstm", "d_model": 1024}, 16),
        ({"cell": "minlstm", "d_model": 1280}, 8),  # sums of three gates leave no room for 16
        ({"d_model": 2304}, 3),  # three tiles of a block, whose sums cannot wait for more inputs
        ({"d_model": 1024, "mlp_ratio": 20.0, "quantization": "int8"}, 1),
        ({"d_model": 192, "quantization": None}, 16),
        ({"d_model": 192, "quantization": "int8"}, 0),  # a block and a half of 8-bit inputs
        ({"quantization": "fp8"}, 8),
        ({"conv_kernel": 4}, 16),
        ({"mlp_ratio": 0.0}, 16),
        ({"conv_kernel": 5}, 0),
        ({"d_model": 64, "expansion": 1.125}, 0),  # 72 inputs
        ({"d_model": 4096}, 0),  # more units than the blocks keep
        ({"n_layers": 200, "d_model": 64}, 0),
    ],
)
def test_which_models_it_takes(changes: dict[str, object], rows: int) -> None:
    assert most_rows(blocks_of(config(**changes)), H100) == rows


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 8),
        ({"d_model": 2048, "expansion": 1.5}, 8),
        ({"d_model": 2048, "mlp_ratio": 12.0}, 4),  # quarters of 6,144 inputs
        ({"d_model": 1216}, 6),  # 4,864 inputs are no whole blocks for each part
    ],
)
def test_inputs_in_pieces_are_whole_parts_in_a_fixed_order(
    changes: dict[str, object], rows: int
) -> None:
    assert most_rows(blocks_of(config(**changes)), H100, fixed_order=True) == rows


def test_phases_are_counted_as_they_are_made() -> None:
    assert most_rows(blocks_of(config(n_layers=44, conv_kernel=4)), H100) == 16  # 222 phases of 224
    assert most_rows(blocks_of(config(n_layers=45, conv_kernel=4)), H100) == 0


@pytest.mark.parametrize("changes", [{}, {"conv_kernel": 3}, {"mlp_ratio": 0.0, "cell": "minlstm"}])
def test_limits_are_asked_for_the_phases_that_a_model_has(changes: dict[str, object]) -> None:
    model = LM(config(**changes))
    phases = list(_phases(compile_blocks(model), LmHead.of(model)))
    shapes = list(_shapes(blocks_of(model.config)))
    assert len(shapes) == len(phases)
    for phase, shape in zip(phases, shapes, strict=True):
        rows, columns = phase.weight.shape
        gates = compile_blocks(model).gates if phase.kind == "gates" else 1
        embed = phase.kind == "embed"
        assert shape == PhaseShape(
            kind=phase.kind,
            channels=columns if embed else rows // gates,
            inputs=rows if embed else columns,
            taps=0 if phase.taps is None else phase.taps.shape[1],
            layer=phase.layer,
            normed=phase.norm is not None,
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d_model": 4096}, "too wide for 132 multiprocessors"),
        ({"conv_kernel": 5}, "2 to 4 taps, got 5"),
        ({"d_model": 64, "expansion": 1.125}, "a multiple of 64, got 72"),
        ({"n_layers": 200, "d_model": 64}, "2 to 224 phases, got"),
    ],
)
def test_a_refusal_has_a_reason(changes: dict[str, object], reason: str) -> None:
    asked = config(**changes)
    rows, refusal = ops.most_rows(
        list(_shapes(blocks_of(asked))),
        weight_type=torch.bfloat16,
        cell=asked.cell,
        processors=H100,
    )
    assert rows == 0 and reason in refusal


def chain_of(model: LanguageModel, *, deterministic: bool = False) -> HopperBackend:
    return only(HopperBackend(model, deterministic=deterministic), fused_gemm.NAME)


def whole_of(model: LanguageModel, *, deterministic: bool = False) -> HopperBackend:
    whole = HopperBackend(model, deterministic=deterministic)
    return only(whole, fused_gemm.NAME, persistent_decode.NAME)


def most_of(whole: PathBackend, name: str = persistent_decode.NAME) -> int:
    """Rows of a step that the path of this name takes."""
    path = next(path for path in whole.paths if path.name == name)
    return max(sizes.stop for sizes in path.sizes.values()) - 1


def as_near(got: Tensor, other: Tensor, right: Tensor) -> bool:
    """Not much further from the exact numbers than another sum in bfloat16 is."""
    return relative_error(got, right) < 2 * relative_error(other, right) + 5e-3


#: Besides those of the chain's tests: most blocks have nothing to do, one block of inputs; the
#: shortest convolution.
NARROW = {
    "narrow": config(d_model=64, n_layers=1),
    "two taps": config(d_model=128, n_layers=4, conv_kernel=2, cell="minlstm", expansion=1.5),
}
#: More weights than the ring holds, several pairs of tiles of many stages, blocks without units.
WIDE = {
    "wide": config(d_model=2048, n_layers=2, expansion=1.5, vocab_size=2000),
    "wide minlstm": config(d_model=1280, n_layers=2, cell="minlstm", vocab_size=2000),
}
#: Inputs that come in pieces: thirds or quarters; pieces that are not as long as each other, or do
#: not end where a stage of weights does.
DIVIDED = {
    "divided": config(d_model=512, n_layers=2, mlp_ratio=24.0),
    "divided unevenly": config(d_model=1152, n_layers=2, cell="minlstm", conv_kernel=3),
}
OTHERS = NARROW | WIDE | DIVIDED


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_steps_as_the_chain_does(name: str) -> None:
    """Many steps of changing batches: what one leaves behind must not reach the next."""
    model = build((CONFIGS | OTHERS)[name], torch.bfloat16)
    exact = exact_of(model)  # before weights move
    chain, whole = chain_of(model), whole_of(model)
    most = most_of(whole)
    ours = model.new_state(SLOTS)
    for slots, seed in islice(chances(name, most), 60):
        chance = random.Random(seed)
        ids = int32([chance.randrange(model.config.vocab_size) for _ in slots], "cuda")
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        theirs, reference = copied(ours), copied(ours)
        at = int32(slots, "cuda")
        got, expected = whole.step(ids, ours, at), chain.step(ids, theirs, at)
        right = exact.logits(exact.step(ids, reference, at))
        assert got.shape == expected.shape and got.dtype == torch.float32
        if live:
            assert as_near(got[live], expected[live], right[live])
        assert as_near(ours["cell"], theirs["cell"], reference["cell"])
        if (
            ours.get("conv") is not None
            and theirs.get("conv") is not None
            and reference.get("conv") is not None
        ):
            assert as_near(ours["conv"], theirs["conv"], reference["conv"])
        dead = [row for row in range(SLOTS) if row not in slots]
        assert torch.equal(ours["cell"][:, dead], theirs["cell"][:, dead])


def chances(seed: str, most: int) -> Iterator[tuple[list[int], int]]:
    """Slots of a batch, one of which may be padding, and a seed for its ids."""
    chance = random.Random(seed)
    while True:
        slots = chance.sample(range(SLOTS), chance.randint(1, most))
        if chance.random() < 0.3:
            slots[chance.randrange(len(slots))] = -1
        yield slots, chance.getrandbits(30)


#: Inputs that groups of warps have in turn, one group more or alone; of three gates.
REPEATED = {
    "three stages": config(d_model=1152, n_layers=2, vocab_size=2000),
    "two blocks for a warp": WIDE["wide"],
    "one stage": config(d_model=512, n_layers=2, cell="minlstm", expansion=4.0, vocab_size=2000),
    "three gates": config(d_model=1024, n_layers=2, cell="minlstm", vocab_size=2000),
    "convolution": config(conv_kernel=4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
def test_a_thousand_steps_have_the_same_bits(name: str) -> None:
    """Whatever has come when: weights, inputs of others, rooms for sums."""
    model = build(REPEATED[name], torch.bfloat16)
    whole = PersistentDecode(model, LmHead.of(model))
    assert whole.rows == 16
    for batch in (1, 8, 9, 16):
        ids, slots = int32(list(range(batch)), "cuda"), int32(list(range(batch)), "cuda")
        state, start = model.new_state(batch), model.new_state(batch)
        expected = whole.step(ids, state, slots).clone()
        after, differing = copied(state), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            state["cell"].copy_(start["cell"])
            if state.get("conv") is not None and start.get("conv") is not None:
                state["conv"].copy_(start["conv"])
            differing += (whole.step(ids, state, slots) != expected).sum()
            differing += (state["cell"] != after["cell"]).sum()
        assert int(differing) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_in_a_fixed_order_steps_have_the_bits_of_the_chain(name: str) -> None:
    """Over many steps of changing batches, whoever of the warps comes first."""
    model = build((CONFIGS | OTHERS)[name], torch.bfloat16)
    chain, whole = (of(model, deterministic=True) for of in (chain_of, whole_of))
    most = most_of(whole)
    ours, theirs = model.new_state(SLOTS), model.new_state(SLOTS)
    for slots, seed in islice(chances(name, most), 300):
        chance = random.Random(seed)
        ids = int32([chance.randrange(model.config.vocab_size) for _ in slots], "cuda")
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        got, expected = (
            quick.step(ids, state, int32(slots, "cuda"))
            for quick, state in ((whole, ours), (chain, theirs))
        )
        assert torch.equal(got[live], expected[live])
        assert torch.equal(ours["cell"], theirs["cell"])
        if ours.get("conv") is not None and theirs.get("conv") is not None:
            assert torch.equal(ours["conv"], theirs["conv"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_quantised_weights_are_as_exact(name: str, kind: Quantization) -> None:
    model = quantize_model(build((CONFIGS | OTHERS)[name], torch.bfloat16), kind)
    quick, chance = EagerBackend(model), random.Random(name)
    names = [path.name for path in quick.paths]
    # 64 and 192 inputs: half blocks
    assert (persistent_decode.NAME_8_BIT in names) == (name not in NARROW)
    if name in NARROW:
        return
    state = model.new_state(SLOTS)
    for batch in (1, 2, 3, most_of(quick, persistent_decode.NAME_8_BIT)) * 3:
        slots = int32(chance.sample(range(SLOTS), batch), "cuda")
        ids = int32([chance.randrange(model.config.vocab_size) for _ in range(batch)], "cuda")
        theirs = copied(state)
        got = quick.step(ids, state, slots)
        plain = model.logits(model.step(ids, theirs, slots))
        assert got.shape == plain.shape
        assert relative_error(got, plain) < 0.04
        assert relative_error(state["cell"], theirs["cell"]) < 0.04


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["conv", "wide"])
def test_many_tokens_of_quantised_weights_are_read_with_a_copy(
    name: str, kind: Quantization
) -> None:
    """Steps of up to eight rows with the 8-bit weights where they are quicker, all else with those
    of 16 bits."""
    model = quantize_model(build((CONFIGS | OTHERS)[name], torch.bfloat16), kind)
    cuda, vocabulary = torch.device("cuda"), model.config.vocab_size
    served, few = select_backend(model, cuda), EagerBackend(model)
    assert isinstance(served, HopperBackend)
    chance, state = random.Random(name), model.new_state(40)
    served.prepare([1, 8, 40], [30], [])
    by_name = {path.name: path for path in served.paths}
    in_8_bits, whole = (
        by_name[name] for name in (persistent_decode.NAME_8_BIT, persistent_decode.NAME)
    )
    assert set(served.chosen["few"].values()) <= {in_8_bits, whole}
    served.chosen["few"] = {1: whole, 8: in_8_bits}
    for batch in (1, 8, 9, 16, 17, 40):
        slots = int32(chance.sample(range(40), batch), "cuda")
        ids = int32([chance.randrange(vocabulary) for _ in range(batch)], "cuda")
        theirs, plain = copied(state), copied(state)
        got, expected = served.step(ids, state, slots), few.step(ids, theirs, slots)
        assert torch.equal(got, expected) == (batch == 8)
        assert relative_error(got, model.logits(model.step(ids, plain, slots))) < 0.04
        assert relative_error(state["cell"], plain["cell"]) < 0.04
    ids, bounds = int32(list(range(30)), "cuda"), int32([0, 30], "cuda")
    theirs, slots = copied(state), int32([3], "cuda")
    hidden, expected = (
        quick.prefill(ids, bounds, rows, slots)
        for quick, rows in ((served, state), (model, theirs))
    )
    assert relative_error(served.logits(hidden), model.logits(expected)) < 0.04
    assert relative_error(state["cell"], theirs["cell"]) < 0.04


@pytest.mark.gpu
def test_quantised_weights_have_no_copy_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantize_model(build(CONFIGS["conv"], torch.bfloat16), "int8")
    cuda, enough = torch.device("cuda"), 2 * bytes_of_copy(model)
    for free, kind in ((enough + 9, EagerBackend), (enough + 10, HopperBackend)):
        monkeypatch.setattr(
            "engine.models.backends.selector.available_memory", lambda device, free=free: free
        )
        assert isinstance(select_backend(model, cuda, reserve=10), kind)
    narrow = quantize_model(build(NARROW["narrow"], torch.bfloat16), "int8")
    assert isinstance(select_backend(narrow, cuda), EagerBackend)  # no kernel reads its weights


def ones_times(weight: Tensor, kind: Quantization, batch: int) -> Tensor:
    """Products of 8-bit `weight` [rows, inputs] and, one after the other, all inputs that are one 1
    and zeros else: half of `weight`, turned."""
    rows, inputs = weight.shape
    phases = [
        Phase(kind="embed", weight=torch.eye(inputs, device="cuda", dtype=torch.bfloat16)),
        Phase(
            kind="logits",
            weight=weight.view(QUANTIZED_DTYPES[kind]),
            scale=torch.full((rows,), 0.5, device="cuda"),
        ),
    ]
    program = Program(phases, cell="mingru", linear_candidate=False, normalize_gates=True)
    no_state = torch.zeros(0, 2, 2, device="cuda")[..., :0]
    slots = int32([-1] * batch, "cuda")
    ids = torch.arange(inputs, dtype=torch.int32, device="cuda")
    return torch.cat([program.run(some, slots, no_state, None, 1e-5) for some in ids.split(batch)])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_every_8_bit_value_is_exact_at_every_input(kind: Quantization, batch: int) -> None:
    """Products without rounding, however many tokens share the columns of the tensor cores."""
    generator = torch.Generator("cuda").manual_seed(batch)
    values = torch.arange(256, dtype=torch.int16, device="cuda").to(torch.uint8).view(torch.int8)
    finite = values[values.view(QUANTIZED_DTYPES[kind]).float().isfinite()]
    for rows, inputs in ((256, 128), (72, 384), (8 * (132 * 3 + 5), 2176)):
        chosen = torch.randint(len(finite), (rows, inputs), device="cuda", generator=generator)
        weight = finite[chosen]
        weight[: len(finite), 0] = finite[:rows]
        got = ones_times(weight, kind, batch)
        assert torch.equal(got, 0.5 * weight.view(QUANTIZED_DTYPES[kind]).float().t())


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_graphs_of_several_batches_take_turns(deterministic: bool) -> None:
    model = build(CONFIGS["conv"], torch.bfloat16)
    whole = whole_of(model, deterministic=deterministic)
    captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    batches = [1, 2, 4, 8] if deterministic else [1, 2, 8, 12]
    state = model.new_state(SLOTS)
    for batch in batches:
        tokens, slots = int32([0] * batch, "cuda"), int32([-1] * batch, "cuda")
        whole.step(tokens, state, slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = whole.step(tokens, state, slots)
        captured[batch] = (graph, tokens, slots, logits)
    chance = random.Random(2)
    for _ in range(200):
        batch = chance.choice(batches)
        graph, tokens, slots, logits = captured[batch]
        chosen = chance.sample(range(SLOTS), batch)
        tokens.copy_(torch.randint(0, 66, (batch,), dtype=torch.int32))
        slots.copy_(int32(chosen, "cpu"))
        eager = copied(state)
        graph.replay()
        assert torch.equal(whole.step(tokens, eager, slots), logits)
        assert torch.equal(eager["cell"], state["cell"])


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bits", [-1, 0x7FC0, 0x7F80], ids=["all bits", "NaN", "infinity"])
def test_no_value_is_taken_for_one_that_is_missing(bits: int, deterministic: bool) -> None:
    """All bits set says "not written yet" between blocks, and is a NaN: a model's own NaNs must
    come out as NaNs rather than be waited for."""
    model = build(CONFIGS["conv"], torch.bfloat16)
    rows = model.embedding.weight.data.view(torch.int16)
    rows[7] = bits
    whole = whole_of(model, deterministic=deterministic)
    for batch in (3,) if deterministic else (3, 12):
        state, slots = model.new_state(batch), int32(list(range(batch)), "cuda")
        bad = [row for row in (1, 10) if row < batch]
        good = [row for row in range(batch) if row not in bad]
        ids = [3, 6, 5, 4] * 3
        clean = whole.step(int32(ids[:batch], "cuda"), copied(state), slots)
        for row in bad:
            ids[row] = 7
        logits = whole.step(int32(ids[:batch], "cuda"), state, slots)
        assert not torch.isfinite(logits[bad]).any()
        assert torch.equal(logits[good], clean[good])


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_neighbours_state_and_padding_are_left_alone(deterministic: bool) -> None:
    model = build(CONFIGS["minlstm"], torch.bfloat16)
    whole = whole_of(model, deterministic=deterministic)
    for live in (2,) if deterministic else (2, 11):
        state = model.new_state(live + 2)
        state["cell"][:, [0, -1]] = float("nan")
        slots = [1, -1, *range(2, live + 1)]
        logits = whole.step(int32([1] * len(slots), "cuda"), state, int32(slots, "cuda"))
        assert torch.isfinite(logits[[0, *range(2, len(slots))]]).all()
        assert (
            state["cell"][:, [0, -1]].isnan().all() and torch.isfinite(state["cell"][:, 1:-1]).all()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_ids_and_slots_that_do_not_exist_are_passed_over(deterministic: bool) -> None:
    model = build(CONFIGS["conv"], torch.bfloat16)
    whole, state = whole_of(model, deterministic=deterministic), model.new_state(3)
    ids, slots = int32([3, 66, -5, 4], "cuda"), int32([0, 1, 2, 3], "cuda")
    clean = model.new_state(3)
    logits = whole.step(ids, state, slots)
    expected = whole.step(ids[:1], clean, slots[:1])
    assert torch.isfinite(logits[:3]).all() and torch.equal(logits[:1], expected)
    assert torch.equal(state["cell"][:, 0], clean["cell"][:, 0])


@pytest.mark.gpu
def test_tensor_maps_go_with_their_program() -> None:
    """TMA keeps what it has read of a tensor map by the map's address. A program whose maps lie
    where another's were reads its own weights all the same."""
    table = torch.eye(128, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randint(-99, 99, (512, 128), device="cuda").bfloat16() for _ in range(3)]
    ids, slots = int32(list(range(16)), "cuda"), int32([-1] * 16, "cuda")
    no_state = torch.zeros(0, 2, 2, device="cuda")[..., :0]
    places: set[int] = set()
    for turn in range(60):
        weight = weights[turn % 3]
        phases = [Phase(kind="embed", weight=table), Phase(kind="logits", weight=weight)]
        program = Program(phases, cell="mingru", linear_candidate=False, normalize_gates=True)
        places.add(program._maps.data_ptr())
        for _ in range(2):
            got = program.run(ids, slots, no_state, None, 1e-5)
            assert torch.equal(got, weight.float().t()[:16])
        del program
    assert len(places) < 20, "memory was not used again: nothing was tested"


@pytest.mark.gpu
def test_refuses_what_does_not_fit() -> None:
    model = build(CONFIGS["mingru"], torch.bfloat16)
    program = PersistentDecode(model, LmHead.of(model))._program
    state = model.new_state(16)
    tokens = torch.zeros(17, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="batch must be 1 to 16, got 17"):
        program.run(tokens, tokens, state["cell"], None, 1e-5)
    with pytest.raises(RuntimeError, match="tokens must be"):
        program.run(tokens[:2].long(), tokens[:2], state["cell"], None, 1e-5)
    with pytest.raises(RuntimeError, match="cell must be"):
        program.run(tokens[:2], tokens[:2], state["cell"][:2], None, 1e-5)
    with pytest.raises(RuntimeError, match="conv must be given"):
        program.run(tokens[:2], tokens[:2], state["cell"], torch.zeros(3, 16, 3, 384).cuda(), 1e-5)
    with pytest.raises(RuntimeError, match="cell must have a slot"):
        program.run(tokens[:2], tokens[:2], state["cell"][:, :0], None, 1e-5)
    table = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    how = {"cell": "mingru", "linear_candidate": False, "normalize_gates": True}
    ends = Phase(kind="logits", weight=torch.zeros(8, 128, dtype=torch.bfloat16, device="cuda"))
    with pytest.raises(RuntimeError, match="inputs of phase 1 must be the channels"):
        Program([Phase(kind="embed", weight=table), ends], **how).run(
            tokens[:1], tokens[:1], state["cell"][:0], None, 1e-5
        )
    with pytest.raises(RuntimeError, match="8-bit weights must have a scale"):
        narrow = Phase(kind="logits", weight=table.to(torch.int8))
        Program([Phase(kind="embed", weight=table), narrow], **how)
    with pytest.raises(RuntimeError, match=r"norm must be contiguous torch.bfloat16 \[64\]"):
        normed = Phase(kind="logits", weight=table, norm=torch.ones(64, device="cuda"))
        Program([Phase(kind="embed", weight=table), normed], **how)
    with pytest.raises(RuntimeError, match="fixed_order is for weights in bfloat16"):
        scale = torch.ones(8, device="cuda")
        narrow = Phase(kind="logits", weight=ends.weight.to(torch.int8), scale=scale)
        Program([Phase(kind="embed", weight=ends.weight), narrow], **how, fixed_order=True)
    with pytest.raises(RuntimeError, match="a multiple of 64 and at most 4096 wide, got 72"):
        odd = Phase(kind="embed", weight=torch.zeros(8, 72, dtype=torch.bfloat16, device="cuda"))
        Program([odd, ends], **how, fixed_order=True)
    with pytest.raises(RuntimeError, match="rows a multiple of 8"):
        wide = torch.zeros(12, 64, dtype=torch.bfloat16, device="cuda")
        Program([Phase(kind="embed", weight=table), Phase(kind="logits", weight=wide)], **how)
