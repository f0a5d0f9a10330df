"""PersistentDecode of HGRN: each of its phases against float64; steps of whole models; limits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.config import ModelConfig, Quantization
from engine.models import registry
from engine.models.backends import persistent_decode
from engine.models.backends.blocks import compile_blocks
from engine.models.backends.lm_head import LmHead
from engine.models.backends.persistent_decode import PersistentDecode, _phases, _shapes, most_rows
from engine.models.hgrn.config import HgrnConfig
from engine.models.language_model import LanguageModel
from engine.models.loader import quantize_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.quantize import QUANTIZED_DTYPES, dequantize
from engine.models.state import ModelState
from engine.ops import persistent_decode as ops
from engine.ops.persistent_decode import Phase, PhaseShape, Program
from tests.models.test_hopper import copied
from tests.models.test_whole_step import H100, SLOTS, as_near, chain_of, chances, whole_of
from tests.models.variants import blocks_of, int32, relative_error


def config(**changes: object) -> HgrnConfig:
    base = HgrnConfig(vocab_size=66, d_model=384, n_layers=3, inner=384, mlp_hidden=1024)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def own_block(**changes: object) -> MinRnnConfig:
    base = MinRnnConfig(cell="hgrn", vocab_size=66, d_model=384, n_layers=2, expansion=1.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (config(), 16),
        (config(d_model=1024, inner=1024, mlp_hidden=2816), 16),
        (config(d_model=1024, inner=1536), 16),  # outputs of the cell come in pieces
        (config(d_model=2048, inner=2048, mlp_hidden=5632), 8),  # sums of three gates leave no room
        (config(d_model=2304, inner=6144), 5),  # three tiles of a block: no pieces
        (config(d_model=1024, inner=1024, mlp_hidden=2816, quantization="int8"), 8),
        (config(quantization="fp8"), 8),
        (config(d_model=192, inner=192, quantization="int8"), 0),  # a block and a half of inputs
        (config(d_model=64, inner=72), 0),
        (config(d_model=4096), 0),  # more units than the blocks keep
        (own_block(conv_kernel=4), 16),
        (own_block(mlp_ratio=0.0, cell_bias=True), 16),
    ],
)
def test_which_models_it_takes(asked: ModelConfig, rows: int) -> None:
    assert most_rows(blocks_of(asked), H100) == rows


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (config(), 8),
        (config(d_model=1024, inner=4096), 8),
        (config(d_model=1024, inner=8192), 0),  # more sums of squares than there is room for
        (config(d_model=1024, inner=1024, mlp_hidden=6144), 8),  # no norm: may come in pieces
    ],
)
def test_in_a_fixed_order_outputs_come_at_once(asked: ModelConfig, rows: int) -> None:
    assert most_rows(blocks_of(asked), H100, fixed_order=True) == rows


def refusal_of(shapes: Sequence[PhaseShape], cell: str) -> str:
    rows, refusal = ops.most_rows(
        shapes, weight_type=torch.bfloat16, cell=cell, processors=H100, fixed_order=True
    )
    assert rows == 0
    return refusal


def test_a_refusal_has_a_reason() -> None:
    wide = list(_shapes(blocks_of(config(inner=8192))))
    assert "must be at most 4096 channels, got 8192" in refusal_of(wide, "hgrn")
    shapes = list(_shapes(blocks_of(config())))
    assert "phase 3 is swiglu, which comes with" in refusal_of(shapes, "minlstm")
    gated = [shape for shape in shapes if shape.kind != "residual"]
    gated[2] = dataclasses.replace(gated[2], kind="gelu")
    assert "phase 2 must be residual, after gates of" in refusal_of(gated, "hgrn")


@pytest.mark.parametrize("asked", [config(), config(lower_bounds=False), own_block(conv_kernel=3)])
def test_limits_are_asked_for_the_phases_that_a_model_has(asked: ModelConfig) -> None:
    model = build(asked, "cpu", torch.float32)
    phases = list(_phases(compile_blocks(model), LmHead.of(model)))
    shapes = list(_shapes(blocks_of(asked)))
    assert len(shapes) == len(phases)
    for phase, shape in zip(phases, shapes, strict=True):
        rows, columns = phase.weight.shape
        of_channel = {"gates": 3, "swiglu": 2}.get(phase.kind, 1)
        embed = phase.kind == "embed"
        assert shape == PhaseShape(
            kind=phase.kind,
            channels=columns if embed else rows // of_channel,
            inputs=rows if embed else columns,
            taps=0 if phase.taps is None else phase.taps.shape[1],
            layer=phase.layer,
            normed=phase.norm is not None,
        )
        bounded = phase.kind == "gates" and getattr(asked, "lower_bounds", True)
        assert (phase.lower_bound is not None) == bounded
        assert (phase.output_norm is not None) == (phase.kind == "gates")


def test_a_norm_of_outputs_without_weights_is_left_out() -> None:
    """Those are ones where they have been moved into the out projection."""
    model = build(config(), "cpu", torch.float32)
    blocks = compile_blocks(model)
    for block in blocks.blocks:
        assert block.gated_norm is not None
        torch.nn.init.ones_(block.gated_norm.weight)
    assert all(phase.output_norm is None for phase in _phases(blocks, LmHead.of(model)))


def build(
    asked: ModelConfig, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> LanguageModel:
    """A random model whose every parameter matters."""
    torch.manual_seed(1)
    model = registry.build(asked).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "lower_bounds")):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(device, dtype)


def exact_of(model: LanguageModel) -> LanguageModel:
    """The same weights, rounded as they are, computed with in fp32."""
    exact = registry.build(model.config).to("cuda").eval().requires_grad_(False)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return exact


def cell_of(model: LanguageModel) -> str:
    """The name of the state of its recurrences."""
    return compile_blocks(model).recurrence.state


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def expected_of(
    phases: Sequence[Phase], tokens: Tensor, slots: Tensor, cell: Tensor, eps: float
) -> Iterator[Tensor]:
    """What each phase makes [batch, channels], in float64, rounded where the kernel rounds.

    Updates `cell` [layers, slots, inner] in place. There are no convolutions.
    """
    x, outputs = torch.empty(0), None  # the residual stream; the cell's, if they come next

    def rms(values: Tensor) -> Tensor:
        return (values.square().mean(dim=1, keepdim=True) + eps).sqrt()

    for phase in phases:
        scale = phase.scale
        weight = (phase.weight if scale is None else dequantize(phase.weight, scale)).double()
        if phase.kind == "embed":
            x = value = rounded(weight[tokens.long()])
            yield value
            continue
        assert phase.taps is None
        divisor = torch.ones_like(value[:, :1])
        if phase.norm is not None:
            divisor, value = rms(value), rounded(value * phase.norm.double())
        elif outputs is not None:
            divisor, outputs = rms(outputs), None
        y = value @ weight.t() / divisor
        if phase.bias is not None:
            y = y + phase.bias.double()
        if phase.kind == "gates":
            i, f, g = rounded(y).chunk(3, dim=1)
            bound = 0.0 if phase.lower_bound is None else phase.lower_bound.double()
            forget = bound + (1 - bound) * f.sigmoid()
            before = cell[phase.layer, slots.clamp(min=0).long()]
            outputs = forget * before + (1 - forget) * functional.silu(i)
            outputs[slots < 0] = 0
            cell[phase.layer, slots[slots >= 0].long()] = outputs[slots >= 0]
            weights = 1.0 if phase.output_norm is None else phase.output_norm.double()
            value = rounded(outputs * functional.silu(g) * weights)
        elif phase.kind == "gelu":
            value = rounded(functional.gelu(y))
        elif phase.kind == "swiglu":
            gate, up = rounded(y).chunk(2, dim=1)
            value = rounded(functional.silu(gate) * up)
        elif phase.kind == "residual":
            x = value = rounded(y + x)
        else:
            value = y
        yield value


@pytest.mark.parametrize(
    "asked",
    [
        config(d_model=64, inner=96, mlp_hidden=80),
        config(d_model=64, inner=64, mlp_hidden=80, lower_bounds=False),
        own_block(d_model=64, cell_bias=True, out_bias=True),
    ],
)
def test_the_reference_is_the_model_but_for_rounding(asked: ModelConfig) -> None:
    model = build(asked, "cpu", torch.bfloat16)
    exact = build(asked, "cpu", torch.float32)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    phases, eps = list(_phases(compile_blocks(model), LmHead.of(model))), asked.norm_eps
    tokens, slots, state = int32([3, 65, 9]), int32([2, 0, -1]), exact.new_state(4)
    hidden = state[cell_of(model)].normal_()
    mine = hidden.double()
    *_, got = expected_of(phases, tokens, slots, mine, eps)
    expected = exact.logits(exact.step(tokens, state, slots))
    assert relative_error(got[:2, :66], expected[:2]) < 0.02
    assert relative_error(mine, hidden) < 0.01


def shown(channels: int) -> slice:
    """Which channels of a phase a head shows: so few that their inputs may come in pieces."""
    return slice(None, None, -(-channels // 1024))


def identity(channels: int, like: Tensor) -> Phase:
    """A head whose logits are the `shown` channels of the phase before."""
    one = torch.eye(channels, device="cuda", dtype=torch.float32)[shown(channels)].contiguous()
    one = one[: len(one) // 8 * 8]
    scale = None if like.dtype == torch.bfloat16 else torch.ones(len(one), device="cuda")
    return Phase(kind="logits", weight=one.to(like.dtype), scale=scale)


def wrong_rows(got: Tensor, expected: Tensor, tolerance: float) -> dict[int, float]:
    """Rows that are further off than `tolerance` of their length, and by how much."""
    errors = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    return {
        row: round(float(error), 5) for row, error in enumerate(errors) if not error < tolerance
    }


#: Of which there are: no lower bounds, more channels of state than d_model, blocks without units,
#: several blocks of inputs for a warp, GELU, biases.
PHASES: dict[str, ModelConfig] = {
    "usual": config(n_layers=2),
    "narrow": config(d_model=128, inner=128, mlp_hidden=256, n_layers=1),
    "expanded": config(d_model=256, inner=768, mlp_hidden=512, n_layers=2, lower_bounds=False),
    "pieces": config(d_model=1024, inner=1536, mlp_hidden=2816, n_layers=1),
    "wide": config(d_model=2048, inner=2048, mlp_hidden=5632, n_layers=1),
    "own block": own_block(cell_bias=True, out_bias=True),
    "no mlp": own_block(mlp_ratio=0.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8", "fixed order"])
@pytest.mark.parametrize("name", PHASES)
def test_every_phase_is_that_of_float64(name: str, kind: str) -> None:
    """A program of the first phases and a head of ones, one phase more at a time. States of a unit
    are up to a thousand times larger than those of another: no unit's squares may be missing."""
    model = build(PHASES[name])
    if kind in QUANTIZED_DTYPES:
        model = quantize_model(model, "int8" if kind == "int8" else "fp8")
    blocks, eps = compile_blocks(model), model.config.norm_eps
    phases = list(_phases(blocks, LmHead.of(model)))
    most = PersistentDecode.most_rows(model, fixed_order=kind == "fixed order")
    assert most >= 8
    wrong: dict[str, dict[int, float]] = {}
    for batch in (1, 2, 3, 8, 9, 15, 16):
        if batch > most:
            continue
        chance = random.Random(batch)
        slots = int32(chance.sample(range(SLOTS), batch), "cuda")
        if batch > 2:
            slots[chance.randrange(batch)] = -1
        tokens = int32([chance.randrange(66) for _ in range(batch)], "cuda")
        live = slots >= 0
        start = model.new_state(SLOTS)[blocks.recurrence.state]
        units = torch.randn(*start.shape[:2], start.shape[2] // 8, device="cuda")
        start += torch.randn_like(start) * (2 * units).exp().repeat_interleave(8, dim=2)
        exact = start.double()
        expected = list(expected_of(phases, tokens, slots, exact, eps))
        for count in range(1, len(phases) + 1):
            some = phases[:count]
            last = some[-1]
            if last.kind == "gates":
                continue  # no head may follow: seen in the states, and in what `residual` makes
            wanted = expected[count - 1]
            if last.kind != "logits":
                head = identity(wanted.shape[1], phases[1].weight)
                some = [*some, head]
                wanted = wanted[:, shown(wanted.shape[1])][:, : len(head.weight)]
            program = Program(
                some,
                cell="hgrn",
                linear_candidate=False,
                normalize_gates=True,
                fixed_order=kind == "fixed order",
            )
            cell = start.clone()
            ran = [phase.layer for phase in some if phase.kind == "gates"]
            own = cell[: len(ran)] if ran else cell[:0, :, :0]
            for _ in range(2):  # the second one clears what the first has used
                cell.copy_(start)
                got = program.run(tokens, slots, own, None, eps)
            where = f"batch {batch}, phase {count - 1} of {len(phases)} ({last.kind})"
            of_rows = wrong_rows(got[live], wanted[live], 6e-3)
            if of_rows:
                wrong[where] = of_rows
            for layer in ran:
                of_states = wrong_rows(own[layer], exact[layer], 6e-3)
                if of_states:
                    wrong[f"{where}, state of layer {layer} by slot"] = of_states
            dead = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
            assert torch.equal(cell[:, dead], start[:, dead]), where
    assert not wrong, "\n".join(f"{where}: {rows}" for where, rows in wrong.items())


#: Besides those of single phases: more layers, a convolution before the first norm.
STEPS = PHASES | {
    "three layers": config(),
    "one block of inputs": config(d_model=64, inner=64, mlp_hidden=192, n_layers=1),
    "convolution": own_block(conv_kernel=4, cell_bias=True),
    "many layers": config(d_model=256, inner=256, mlp_hidden=768, n_layers=20),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_steps_as_the_model_does(name: str) -> None:
    """Many steps of changing batches: what one leaves behind must not reach the next."""
    model = build(STEPS[name])
    assert persistent_decode.supports(model, torch.device("cuda")) is None
    exact, whole = exact_of(model), PersistentDecode(model, LmHead.of(model))
    vocabulary, cell = model.config.vocab_size, cell_of(model)
    ours = model.new_state(SLOTS)
    for turn, (slots, seed) in enumerate(islice(chances(name, whole.rows), 60)):
        chance = random.Random(seed)
        ids = int32([chance.randrange(vocabulary) for _ in slots], "cuda")
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        theirs, reference, at = copied(ours), copied(ours), int32(slots, "cuda")
        got = whole.step(ids, ours, at)[:, :vocabulary]
        plain = model.logits(model.step(ids, theirs, at))
        right = exact.logits(exact.step(ids, reference, at))
        where = f"step {turn} of {len(slots)} rows"
        if live:
            assert as_near(got[live], plain[live], right[live]), where
        for of_ours, of_theirs, of_right in zip(
            ours.tensors(), theirs.tensors(), reference.tensors(), strict=True
        ):
            assert as_near(of_ours, of_theirs, of_right), where
        dead = [row for row in range(SLOTS) if row not in slots]
        assert torch.equal(ours[cell][:, dead], theirs[cell][:, dead])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", [name for name in STEPS if name != "one block of inputs"])
def test_quantised_weights_are_as_exact(name: str, kind: Quantization) -> None:
    model = quantize_model(build(STEPS[name]), kind)
    whole, chance = PersistentDecode(model, LmHead.of(model)), random.Random(name)
    vocabulary, state, cell = model.config.vocab_size, model.new_state(SLOTS), cell_of(model)
    for batch in (1, 2, 3, whole.rows) * 3:
        slots = int32(chance.sample(range(SLOTS), batch), "cuda")
        ids = int32([chance.randrange(vocabulary) for _ in range(batch)], "cuda")
        theirs = copied(state)
        got = whole.step(ids, state, slots)[:, :vocabulary]
        plain = model.logits(model.step(ids, theirs, slots))
        assert relative_error(got, plain) < 0.04, f"{batch} rows"
        assert relative_error(state[cell], theirs[cell]) < 0.04, f"{batch} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("name", ["usual", "pieces", "many layers", "no mlp"])
def test_a_thousand_steps_have_the_same_bits(name: str, fixed_order: bool) -> None:
    """Whatever has come when: weights, inputs of others, their sums of squares."""
    model = build(STEPS[name])
    whole = PersistentDecode(model, LmHead.of(model), fixed_order=fixed_order)
    cell = cell_of(model)
    for batch in (1, 8, 9, 16):
        if batch > whole.rows:
            continue
        ids, slots = int32(list(range(batch)), "cuda"), int32(list(range(batch)), "cuda")
        state, start = model.new_state(batch), model.new_state(batch)
        expected = whole.step(ids, state, slots).clone()
        after, differing = copied(state), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            state[cell].copy_(start[cell])
            differing += (whole.step(ids, state, slots) != expected).sum()
            differing += (state[cell] != after[cell]).sum()
        assert int(differing) == 0, f"{batch} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_in_a_fixed_order_a_row_is_the_same_in_any_batch(name: str) -> None:
    model = build(STEPS[name])
    whole = PersistentDecode(model, LmHead.of(model), fixed_order=True)
    tokens, slots = int32([5, 9, 3, 7, 2, 8, 1, 6], "cuda"), int32([4, 0, 6, 1, 3, 7, 2, 5], "cuda")
    state = model.new_state(8)
    for tensor in state.tensors():
        tensor.normal_()
    for batch in range(2, whole.rows + 1):
        many, one = copied(state), copied(state)
        logits = whole.step(tokens[:batch], many, slots[:batch])
        row = batch - 1
        alone = whole.step(tokens[row : row + 1], one, slots[row : row + 1])
        assert torch.equal(logits[row], alone[0]), f"{batch} rows"
        for of_many, of_one in zip(many.tensors(), one.tensors(), strict=True):
            assert torch.equal(of_many[:, slots[row]], of_one[:, slots[row]]), f"{batch} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_in_a_fixed_order_steps_have_the_bits_of_the_chain(name: str) -> None:
    model = build(STEPS[name])
    chain, whole = (of(model, deterministic=True) for of in (chain_of, whole_of))
    ours, theirs = model.new_state(SLOTS), model.new_state(SLOTS)
    for turn, (slots, seed) in enumerate(islice(chances(name, 8), 100)):
        chance = random.Random(seed)
        ids = int32([chance.randrange(model.config.vocab_size) for _ in slots], "cuda")
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        got, expected = (
            quick.step(ids, state, int32(slots, "cuda"))
            for quick, state in ((whole, ours), (chain, theirs))
        )
        where = f"step {turn} of {len(slots)} rows"
        for of_ours, of_theirs in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(of_ours, of_theirs), where
        assert torch.equal(got[live], expected[live]), where


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_order", [False, True])
def test_graphs_of_several_batches_take_turns(fixed_order: bool) -> None:
    model = build(STEPS["three layers"])
    whole = PersistentDecode(model, LmHead.of(model), fixed_order=fixed_order)
    cell, state = cell_of(model), model.new_state(SLOTS)
    captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    batches = [1, 2, 4, 8] if fixed_order else [1, 2, 8, 12, 16]
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
        tokens.copy_(torch.randint(0, 66, (batch,), dtype=torch.int32))
        slots.copy_(int32(chance.sample(range(SLOTS), batch), "cpu"))
        eager = copied(state)
        graph.replay()
        assert torch.equal(whole.step(tokens, eager, slots), logits), f"{batch} rows"
        assert torch.equal(eager[cell], state[cell]), f"{batch} rows"


def values_that_are_not_numbers(state: ModelState, cell: str, rows: Sequence[int]) -> None:
    """All bits set, which is what a word says that has not been written; NaN; infinity."""
    bits = torch.tensor([-1, 0x7FC00000, 0x7F800000], dtype=torch.int32, device="cuda")
    for n, row in enumerate(rows):
        state[cell].view(torch.int32)[:, row] = bits[n % 3]


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_order", [False, True])
def test_states_that_are_not_numbers_stay_with_their_rows(fixed_order: bool) -> None:
    """They come out as NaNs rather than be waited for, and reach no other row."""
    model = build(STEPS["three layers"])
    whole = PersistentDecode(model, LmHead.of(model), fixed_order=fixed_order)
    cell = cell_of(model)
    for batch in (1, 2, 3, 8) if fixed_order else (1, 2, 3, 8, 12, 16):
        state = model.new_state(batch + 2)
        # Of neighbours, which are not in the batch, and of every third row.
        bad = [row for row in range(batch) if row % 3 == 0]
        values_that_are_not_numbers(state, cell, [batch, batch + 1, *bad])
        before = state[cell][:, batch:].view(torch.int32).clone()
        slots, ids = int32(list(range(batch)), "cuda"), int32([3] * batch, "cuda")
        clean = model.new_state(batch + 2)
        expected = whole.step(ids, clean, slots)
        logits = whole.step(ids, state, slots)
        good = [row for row in range(batch) if row not in bad]
        assert not torch.isfinite(logits[bad]).any()
        assert torch.equal(logits[good], expected[good])
        assert torch.equal(state[cell][:, batch:].view(torch.int32), before)


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_order", [False, True])
def test_padding_and_ids_that_do_not_exist_are_passed_over(fixed_order: bool) -> None:
    model = build(STEPS["three layers"])
    whole = PersistentDecode(model, LmHead.of(model), fixed_order=fixed_order)
    cell = cell_of(model)
    for batch in (4, 8) if fixed_order else (4, 8, 11, 16):
        state, clean = model.new_state(batch), model.new_state(batch)
        slots = list(range(batch))
        slots[1], slots[2] = -1, batch + 5
        ids = [3] * batch
        ids[3] = 66
        logits = whole.step(int32(ids, "cuda"), state, int32(slots, "cuda"))
        expected = whole.step(int32([3], "cuda"), clean, int32([0], "cuda"))
        same = [0, *range(4, batch)]
        assert torch.isfinite(logits[[3, *same]]).all()
        assert relative_error(logits[same], expected.expand(len(same), -1)) < 0.02
        assert not state[cell][:, [1, 2]].any()
