"""CublasPath reads as the LM that it was made from did."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import ModelConfig
from engine.models.backends.blocks import compile_blocks
from engine.models.backends.cublas import CublasPath, supports
from engine.models.backends.eager import EagerBackend
from engine.models.backends.lm_head import LmHead
from engine.models.hgrn.config import HgrnConfig
from engine.models.minrnn.config import MinRnnConfig
from engine.models.state import ModelState
from tests.models.test_hopper import ALL_CONFIGS, build, exact_of, hidden_of
from tests.models.variants import int32, relative_error

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CASES: dict[str, ModelConfig] = {
    **ALL_CONFIGS,
    "narrow": MinRnnConfig(cell="minlstm", vocab_size=29, d_model=40, n_layers=3, out_bias=True),
    "hgrn-narrow": HgrnConfig(vocab_size=29, d_model=40, n_layers=3, inner=72, mlp_hidden=104),
}


@pytest.mark.parametrize("tuning", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_reads_and_steps_as_the_model_did(name: str, tuning: bool) -> None:
    config = CASES[name]
    model = build(config, torch.bfloat16)
    exact = exact_of(model)  # of the weights as they were
    plain = build(config, torch.bfloat16)
    assert supports(model, CUDA) is None
    quick = CublasPath(model, LmHead.of(model))
    for block in compile_blocks(model).blocks:
        norms = [block.norm, block.gated_norm, None if block.mlp is None else block.mlp.norm]
        assert all(bool((norm.weight == 1).all()) for norm in norms if norm is not None)
    lengths = [130, 0, 7, 40, 1]
    rows = len(lengths) + 2
    if tuning:
        quick.tune([len(lengths), sum(lengths) + 3], [len(lengths), sum(lengths) + 3])
    cu_seqlens = int32([0, *torch.tensor(lengths).cumsum(0).tolist()], "cuda")
    slots = torch.randperm(rows)[: len(lengths)].to("cuda", torch.int32)
    ours, theirs, reference = (model.new_state(rows) for _ in range(3))
    tokens = torch.randint(0, config.vocab_size, (sum(lengths),), device="cuda", dtype=torch.int32)
    padding = int32([0, 0, 0], "cuda")  # beyond the last sequence
    got = quick.logits(quick.prefill(torch.cat([tokens, padding]), cu_seqlens, ours, slots))
    right = exact.logits(exact.prefill(tokens, cu_seqlens, reference, slots))
    usual = plain.logits(plain.prefill(tokens, cu_seqlens, theirs, slots))
    allowed = 2 * relative_error(usual, right) + 2e-3
    assert relative_error(got[: len(tokens)], right) < allowed
    slots[1] = -1
    live = slots >= 0
    for _ in range(3):
        one = torch.randint(0, config.vocab_size, (len(slots),), device="cuda", dtype=torch.int32)
        got = quick.logits(quick.step(one, ours, slots))
        assert got.shape == (len(one), config.vocab_size)
        assert got.stride(0) % 8 == 0  # rows begin where kernels read the quickest
        right = exact.logits(exact.step(one, reference, slots))
        usual = plain.logits(plain.step(one, theirs, slots))
        allowed = 2 * relative_error(usual[live], right[live]) + 2e-3
        assert relative_error(got[live], right[live]) < allowed
    allowed = 2 * relative_error(hidden_of(theirs), hidden_of(reference)) + 2e-3
    assert relative_error(hidden_of(ours), hidden_of(reference)) < allowed
    dead = [row for row in range(rows) if row not in slots.tolist()]
    fresh = model.new_state(rows)
    never = [
        row for row in dead if torch.equal(hidden_of(theirs)[:, row], hidden_of(fresh)[:, row])
    ]
    assert torch.equal(hidden_of(ours)[:, never], hidden_of(fresh)[:, never])


@pytest.mark.parametrize("name", ["medium", "hgrn"])
def test_a_graph_of_it_replays(name: str) -> None:
    model = build(CASES[name], torch.bfloat16)
    quick = CublasPath(model, LmHead.of(model))
    tokens, slots = int32([3, 5, 7], "cuda"), int32([2, 0, 1], "cuda")
    eager, replayed = model.new_state(3), model.new_state(3)
    expected = [quick.step(tokens, eager, slots).clone() for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = quick.step(tokens, replayed, slots)
    for one in expected:
        graph.replay()
        assert torch.equal(hidden, one)


def test_widths_that_kernels_do_not_take_are_read_plainly() -> None:
    config = dataclasses.replace(CASES["narrow"], d_model=20)
    model = build(config, torch.bfloat16)
    norm = compile_blocks(model).blocks[0].norm.weight.clone()
    assert supports(model, CUDA) == "widths are not multiples of 8"
    assert "float16" in str(supports(build(config, torch.float16), CUDA))
    EagerBackend(model)
    assert torch.equal(compile_blocks(model).blocks[0].norm.weight, norm)


@pytest.mark.parametrize("name", ["narrow", "conv", "hgrn-narrow"])
def test_models_without_kernels_of_their_own_use_it(name: str) -> None:
    model = build(CASES[name], torch.bfloat16)
    exact = exact_of(model)
    served = EagerBackend(model)
    ours, reference = model.new_state(40), model.new_state(40)
    slots = torch.arange(40, dtype=torch.int32, device="cuda")
    tokens = torch.randint(0, 29, (40,), dtype=torch.int32, device="cuda")
    got = served.step(tokens, ours, slots)
    assert relative_error(got, exact.logits(exact.step(tokens, reference, slots))) < 0.03
    assert (
        isinstance(ours, ModelState)
        and relative_error(hidden_of(ours), hidden_of(reference)) < 0.03
    )
