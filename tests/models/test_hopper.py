"""HopperBackend steps as LM does, within the rounding of bfloat16."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from engine.config import SCAN_CHUNK, ModelConfig
from engine.models import registry
from engine.models.backends import (
    cluster_decode,
    cublas,
    dispatch,
    fused_gemm,
    persistent_decode,
)
from engine.models.backends.dispatch import ExecutionPath, PathBackend
from engine.models.backends.hopper import HopperBackend, supports
from engine.models.hgrn.config import HgrnConfig
from engine.models.language_model import LanguageModel
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState
from engine.ops import library
from engine.ops.gemm import PART, best_of, ids_of
from tests.models.variants import int32, relative_error

pytestmark = pytest.mark.gpu

Prepare = Callable[[HopperBackend, Sequence[int]], None]
Backend = TypeVar("Backend", bound=PathBackend)
CUDA = torch.device("cuda")

_BASE = MinRnnConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=3)
_HGRN = HgrnConfig(vocab_size=66, d_model=384, n_layers=3, inner=384, mlp_hidden=1024)
CONFIGS = {
    "mingru": _BASE,
    "minlstm": dataclasses.replace(_BASE, cell="minlstm"),
    "conv": dataclasses.replace(_BASE, conv_kernel=4, head_bias=True),
    "biases": dataclasses.replace(_BASE, cell="minlstm", cell_bias=True, out_bias=True),
    "own-gates": dataclasses.replace(
        _BASE, cell="minlstm", normalize_gates=False, candidate="linear", mlp_bias=False
    ),
    "no-mlp": dataclasses.replace(_BASE, mlp_ratio=0.0, conv_kernel=3, out_bias=True),
    "tied": dataclasses.replace(_BASE, tie_embeddings=True, learned_initial_state=True),
    "medium": dataclasses.replace(_BASE, d_model=768, n_layers=2, expansion=1.5),
    "large": dataclasses.replace(_BASE, d_model=2048, n_layers=1, expansion=1.5, vocab_size=20000),
}
# These and models with output gates, which not every kernel computes.
ALL_CONFIGS: dict[str, ModelConfig] = {
    **CONFIGS,
    "hgrn": _HGRN,
    "hgrn-wide": dataclasses.replace(_HGRN, inner=768, mlp_hidden=1000, lower_bounds=False),
    "hgrn-large": dataclasses.replace(
        _HGRN, d_model=2048, n_layers=1, inner=2048, mlp_hidden=5632, vocab_size=20000
    ),
    "hgrn-in-our-block": dataclasses.replace(
        _BASE, cell="hgrn", conv_kernel=4, cell_bias=True, out_bias=True
    ),
}


def build(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    torch.manual_seed(1)
    model = registry.build(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "lower_bounds")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to("cuda", dtype)


def exact_of(model: LanguageModel) -> LanguageModel:
    """The same weights, rounded as they are, computed with in fp32."""
    exact = registry.build(model.config).to("cuda").eval()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return exact


def only(backend: Backend, *names: str) -> Backend:
    """`backend` without paths of other names; it must have these."""
    backend.paths = [path for path in backend.paths if path.name in names]
    assert [path.name for path in backend.paths] == list(names)
    return backend


def path_of(backend: PathBackend, name: str) -> ExecutionPath:
    return next(path for path in backend.paths if path.name == name)


def hidden_of(state: ModelState) -> Tensor:
    """The states of the recurrences [layers, rows, channels], the first of a family's tensors."""
    return next(iter(state.named.values()))


def copied(state: ModelState) -> ModelState:
    return ModelState({name: tensor.clone() for name, tensor in state.named.items()})


@pytest.fixture(params=["unprepared", "chain", "second", "third", "fourth", "last"])
def prepare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Has sizes read as they are without measurements, or each in one of the ways."""

    def apply(quick: HopperBackend, sizes: Sequence[int]) -> None:
        if request.param == "unprepared":
            return
        number = {"chain": 0, "second": 1, "third": 2, "fourth": 3, "last": 4}[request.param]
        monkeypatch.setattr(
            dispatch, "quickest_graph_of", lambda ways, lasting: min(number, len(ways) - 1)
        )
        powers = {1 << n for n in range(11)}  # the ways of others follow from theirs
        quick.prepare(*[sorted(powers.union(sizes))] * 3)

    return apply


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_steps_as_the_model_does(name: str, prepare: Prepare) -> None:
    config = ALL_CONFIGS[name]
    model = build(config, torch.bfloat16)
    assert supports(model, CUDA) is None
    exact = exact_of(model)  # before weights move
    quick = HopperBackend(model)
    batches = (1, 5, 8, 16, 50, 100, 300, 600)
    prepare(quick, batches)
    for batch in batches:
        ours, theirs, reference = (model.new_state(batch + 2) for _ in range(3))
        slots = torch.randperm(batch + 2)[:batch].to("cuda", torch.int32)
        if batch > 1:
            slots[1] = -1
        live = slots >= 0
        for _ in range(3):
            tokens = torch.randint(0, config.vocab_size, (batch,), device="cuda", dtype=torch.int32)
            got = quick.step(tokens, ours, slots)
            plain = model.logits(model.step(tokens, theirs, slots))
            assert got.shape == plain.shape and got.dtype == torch.float32
            right = exact.logits(exact.step(tokens, reference, slots))
            # Not much further from the exact logits than the plain model is.
            allowed = 2 * relative_error(plain[live], right[live]) + 2e-3
            assert relative_error(got[live], right[live]) < allowed
        dead = [row for row in range(batch + 2) if row not in slots.tolist()]
        assert torch.equal(hidden_of(ours)[:, dead], hidden_of(theirs)[:, dead])


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_reads_prompts_as_the_model_does(name: str, prepare: Prepare) -> None:
    config = ALL_CONFIGS[name]
    model = build(config, torch.bfloat16)
    exact = exact_of(model)  # before weights move
    quick = HopperBackend(model)
    prompts = ([1], [3, 0, 40, 1], [130, 7], [600, 900])
    prepare(quick, [sum(lengths) for lengths in prompts])
    for lengths in prompts:
        cu_seqlens = int32([0, *torch.tensor(lengths).cumsum(0).tolist()], "cuda")
        rows = len(lengths) + 2
        slots = torch.randperm(rows)[: len(lengths)].to("cuda", torch.int32)
        ours, theirs, reference = (model.new_state(rows) for _ in range(3))
        for _ in range(2):  # the second time from where the first has stopped
            count = sum(lengths)
            tokens = torch.randint(0, config.vocab_size, (count,), device="cuda", dtype=torch.int32)
            got = quick.logits(quick.prefill(tokens, cu_seqlens, ours, slots))
            plain = model.logits(model.prefill(tokens, cu_seqlens, theirs, slots))
            right = exact.logits(exact.prefill(tokens, cu_seqlens, reference, slots))
            assert got.shape == plain.shape
            assert relative_error(got, right) < 2 * relative_error(plain, right) + 2e-3
        allowed = 2 * relative_error(hidden_of(theirs), hidden_of(reference)) + 2e-3
        assert relative_error(hidden_of(ours), hidden_of(reference)) < allowed


def test_what_is_prepared_is_measured() -> None:
    """All ways run, or it would raise; other sizes go the way of the nearest."""
    for name in ("medium", "mingru"):  # which clusters read too
        quick = HopperBackend(build(CONFIGS[name], torch.bfloat16))
        quick.prepare([1, 16, 64, 512], [16, 512], [4])
        timed = {workload: set(chosen) for workload, chosen in quick.chosen.items()}
        # Of few rows there is one path, and a small vocabulary has no head that finds the best.
        assert timed == {"few": set(), "step": {16, 64, 512}, "prompt": {512}, "argmax": set()}


@pytest.mark.parametrize(
    "name",
    [fused_gemm.NAME_TO_HEAD, cublas.NAME_AROUND, cublas.NAME, cluster_decode.NAME],
)
@pytest.mark.parametrize(("vocabulary", "bias"), [(3001, True), (3008, False)])
def test_bests_of_steps(vocabulary: int, bias: bool, name: str) -> None:
    """Those of the logits that `step` has."""
    config = dataclasses.replace(
        CONFIGS["mingru" if name == cluster_decode.NAME else "medium"],
        vocab_size=vocabulary,
        head_bias=bias,
    )
    model = build(config, torch.bfloat16)
    quick, rows = HopperBackend(model), 150
    quick.chosen["step"][rows] = path_of(quick, name)
    tokens = torch.randint(0, vocabulary, (rows,), dtype=torch.int32, device="cuda")
    slots = torch.arange(-1, rows - 1, dtype=torch.int32, device="cuda")
    mine, its = model.new_state(rows), model.new_state(rows)
    logits = quick.step(tokens, mine, slots)
    to_bests = quick.step_to_bests(rows)
    assert to_bests is not None
    ids = ids_of(to_bests(tokens, its, slots))
    assert torch.equal(hidden_of(mine), hidden_of(its))
    at_best = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    assert relative_error(at_best[1:], logits.amax(1)[1:]) < 0.005
    assert (ids == logits.argmax(1))[1:].float().mean() > 0.95


@pytest.mark.parametrize("bias", [True, False])
def test_bests_in_a_fixed_order(bias: bool) -> None:
    """Those of the logits to the bit, whatever the number of rows."""
    config = dataclasses.replace(CONFIGS["medium"], vocab_size=7001, head_bias=bias)
    model = build(config, torch.bfloat16)
    quick, most = HopperBackend(model, deterministic=True), 1030
    tokens = torch.randint(0, 7001, (most,), dtype=torch.int32, device="cuda")
    of_all = None
    for rows in (33, 64, 200, most):
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        mine, its = model.new_state(rows), model.new_state(rows)
        logits = quick.step(tokens[:rows], mine, slots)
        to_bests = quick.step_to_bests(rows)
        assert to_bests is not None
        best = to_bests(tokens[:rows], its, slots)
        assert torch.equal(hidden_of(mine), hidden_of(its))
        assert torch.equal(best[:, : -(-7001 // PART)], best_of(logits))
        of_all = best[:33] if of_all is None else of_all
        assert torch.equal(best[:33], of_all)


def test_the_head_of_the_chain_is_left_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIGS["medium"], vocab_size=3001)
    for number in (0, 1):  # of two ways that are timed, the one that is said to be the quickest

        def quickest(runs: Sequence[object], lasting: bool, of_two: int = number) -> int:
            return of_two if len(runs) == 2 else 0  # or of the chain and one kernel

        quick = HopperBackend(build(config, torch.bfloat16))
        monkeypatch.setattr(dispatch, "quickest_graph_of", quickest)
        quick.prepare([1, 16, 64, 512], [16], [4])
        one = persistent_decode.NAME if number else fused_gemm.NAME
        names = {rows: path.name for rows, path in quick.chosen["step"].items()}
        assert names == {16: one, 64: fused_gemm.NAME, 512: fused_gemm.NAME}
        served = {rows: quick.step_to_bests(rows) is not None for rows in (1, 16, 32, 48, 64, 512)}
        assert served == {rows: bool(number) and rows > 32 for rows in served}


def test_few_rows_take_the_path_that_was_measured_for_them() -> None:
    """A head that finds the best, behind clusters, does not draw away what is not its business."""
    config = dataclasses.replace(CONFIGS["mingru"], vocab_size=3001, n_layers=1)
    quick = HopperBackend(build(config, torch.bfloat16))
    whole, clusters, library, chain, to_head = (
        path_of(quick, name)
        for name in (
            *(persistent_decode.NAME, cluster_decode.NAME, cublas.NAME),
            *(fused_gemm.NAME, fused_gemm.NAME_TO_HEAD),
        )
    )
    quick.chosen["step"] = {16: whole, 32: clusters, 64: chain}
    quick.chosen["argmax"] = {64: to_head}
    assert [quick.step_to_bests(rows) for rows in (1, 8, 9, 16, 32)] == [None] * 5
    taken = {rows: quick.step_to_bests(rows) for rows in (33, 45, 46, 64, 100)}
    paths = {rows: step.args[0] for rows, step in taken.items()}  # type: ignore[union-attr]
    assert paths == {33: clusters, 45: clusters, 46: to_head, 64: to_head, 100: to_head}
    quick.chosen["step"][64] = library  # which ends before the head by itself
    last = quick.step_to_bests(64)
    assert last is not None and last.args[0] is library  # type: ignore[attr-defined]


def test_clusters_compete_for_a_head_that_finds_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[list[str]] = []

    def first(runs: Sequence[Callable[[], object]], lasting: bool) -> int:
        compared.append([run.args[0].name for run in runs])  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(dispatch, "quickest_graph_of", first)
    config = dataclasses.replace(CONFIGS["mingru"], vocab_size=3001, n_layers=1)
    HopperBackend(build(config, torch.bfloat16)).prepare([64], [], [])
    to_head, clusters = fused_gemm.NAME_TO_HEAD, cluster_decode.NAME
    assert compared == [
        [fused_gemm.NAME, to_head, cublas.NAME_AROUND, cublas.NAME, clusters],
        [fused_gemm.NAME, to_head, clusters],
    ]


@pytest.mark.parametrize(("vocabulary", "apart"), [(1024, False), (1030, True)])
def test_large_vocabularies_have_a_head_behind_clusters(vocabulary: int, apart: bool) -> None:
    """Few rows and many."""
    config = dataclasses.replace(CONFIGS["mingru"], vocab_size=vocabulary, head_bias=True)
    model = build(config, torch.bfloat16)
    exact, quick = exact_of(model), HopperBackend(model)
    clusters = path_of(quick, cluster_decode.NAME)
    assert (clusters.step_to_bests is not None) is apart
    for rows in (3, 20, 32, 33, 70):
        tokens = torch.randint(0, vocabulary, (rows,), dtype=torch.int32, device="cuda")
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        mine, its = model.new_state(rows), model.new_state(rows)
        got = clusters.step(tokens, mine, slots)
        right = exact.logits(exact.step(tokens, its, slots))
        assert got.shape == right.shape and got.dtype == torch.float32
        assert relative_error(got, right) < 0.02
        assert relative_error(hidden_of(mine), hidden_of(its)) < 0.02


def test_where_logits_are_as_quick_no_bests_are_told() -> None:
    """In the chain, of few rows, of small vocabularies, which are not so small where a row's bits
    are its own."""
    for rows, vocabulary, exactly in (
        (40, 3001, False),
        (3, 3001, False),
        (400, 900, False),
        (400, 3001, True),
        (3, 7001, True),
    ):
        config = dataclasses.replace(CONFIGS["medium"], vocab_size=vocabulary)
        quick = HopperBackend(build(config, torch.bfloat16), deterministic=exactly)
        assert quick.step_to_bests(rows) is None


@pytest.mark.parametrize("name", ["conv", "hgrn", "hgrn-in-our-block"])
def test_a_prompt_and_its_steps_agree(name: str) -> None:
    model = build(ALL_CONFIGS[name], torch.bfloat16)
    quick = HopperBackend(model)
    tokens, slots = (
        torch.randint(0, 66, (30,), device="cuda", dtype=torch.int32),
        int32([1], "cuda"),
    )
    read, stepped = model.new_state(2), model.new_state(2)
    hidden = quick.prefill(tokens, int32([0, 30], "cuda"), read, slots)
    for at in range(30):
        logits = quick.step(tokens[at : at + 1], stepped, slots)
    assert relative_error(logits, quick.logits(hidden[-1:])) < 0.02
    assert relative_error(hidden_of(stepped), hidden_of(read)) < 0.02


@pytest.mark.parametrize("name", ["conv", "hgrn"])
def test_a_graph_of_it_replays(name: str) -> None:
    config = ALL_CONFIGS[name]
    model = build(config, torch.bfloat16)
    quick = HopperBackend(model)
    tokens, slots = int32([3, 5, 7], "cuda"), int32([2, 0, 1], "cuda")
    eager, replayed = model.new_state(3), model.new_state(3)
    expected = [quick.step(tokens, eager, slots).clone() for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    quick.step(tokens, model.new_state(3), slots)
    with torch.cuda.graph(graph):
        logits = quick.step(tokens, replayed, slots)
    for one in expected:
        graph.replay()
        assert torch.equal(logits, one)


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_deterministic_steps_have_the_bits_of_a_row_alone(name: str) -> None:
    config = ALL_CONFIGS[name]
    model = build(config, torch.bfloat16)
    quick = HopperBackend(model, deterministic=True)
    most = 1100
    start = model.new_state(most)
    hidden_of(start).add_(torch.rand_like(hidden_of(start)))
    if start.get("conv") is not None:
        start["conv"].add_(torch.randn_like(start["conv"]))
    tokens = torch.randint(0, config.vocab_size, (2, most), device="cuda", dtype=torch.int32)

    def read(slots: list[int]) -> tuple[Tensor, Tensor]:
        """Logits after two steps and the state then, of these rows."""
        state = copied(start)
        at = int32(slots, "cuda")
        for step in range(2):
            logits = quick.step(tokens[step, slots].contiguous(), state, at)
        return logits, hidden_of(state)[:, slots]

    logits, cell = read(list(range(most)))
    for batch in (1, 3, 8, 13, 32, 60, 130, 400, 1000):
        slots = random.sample(range(most), batch)
        got, moved = read(slots)
        assert torch.equal(got, logits[slots]) and torch.equal(moved, cell[:, slots])


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_deterministic_prompts_have_the_bits_of_one_alone_and_whole(name: str) -> None:
    config = ALL_CONFIGS[name]
    model = build(config, torch.bfloat16)
    quick = HopperBackend(model, deterministic=True)
    lengths = [700, 1, 40, 3 * SCAN_CHUNK, 1500, 129]
    prompts = [
        torch.randint(0, config.vocab_size, (length,), device="cuda", dtype=torch.int32)
        for length in lengths
    ]
    slots = [4, 0, 6, 3, 1, 5]
    together = model.new_state(7)
    edges = int32([0, *torch.tensor(lengths).cumsum(0).tolist()], "cuda")
    hidden = quick.prefill(torch.cat(prompts), edges, together, int32(slots, "cuda"))
    logits = quick.logits(hidden).split(lengths)
    for prompt, slot, expected in zip(prompts, slots, logits, strict=True):
        for pieces in ([prompt], prompt.split(SCAN_CHUNK), prompt.split(4 * SCAN_CHUNK)):
            state = model.new_state(2)
            got = [
                quick.logits(
                    quick.prefill(piece, int32([0, len(piece)], "cuda"), state, int32([1], "cuda"))
                )
                for piece in pieces
            ]
            assert torch.equal(torch.cat(got), expected)
            assert torch.equal(quick.logits(hidden[edges[slots.index(slot)] :][:1]), expected[:1])
            assert torch.equal(hidden_of(state)[:, 1], hidden_of(together)[:, slot])
            if state.get("conv") is not None and together.get("conv") is not None:
                assert torch.equal(state["conv"][:, 1], together["conv"][:, slot])


@pytest.mark.parametrize("name", ["mingru", "minlstm", "conv", "large", "hgrn", "hgrn-large"])
def test_deterministic_reads_and_steps_as_the_model_does(name: str) -> None:
    config = ALL_CONFIGS[name]
    model = build(config, torch.bfloat16)
    exact, as_it_was = exact_of(model), build(config, torch.bfloat16)  # before weights move
    quick = HopperBackend(model, deterministic=True)
    for tokens in (1, 20, 300, 3000):
        ids = torch.randint(0, config.vocab_size, (tokens,), device="cuda", dtype=torch.int32)
        edges, slots = int32([0, tokens], "cuda"), int32([0], "cuda")
        states = [model.new_state(tokens) for _ in range(3)]
        ours, plain, right = (
            one.logits(one.prefill(ids, edges, state, slots))
            for one, state in zip((quick, as_it_was, exact), states, strict=True)
        )
        assert relative_error(ours, right) < 2 * relative_error(plain, right) + 2e-3
        slots = torch.arange(tokens, device="cuda", dtype=torch.int32)
        stepped = quick.step(ids, states[0], slots)
        plain = as_it_was.logits(as_it_was.step(ids, states[1], slots))
        right = exact.logits(exact.step(ids, states[2], slots))
        assert relative_error(stepped, right) < 2 * relative_error(plain, right) + 2e-3


def test_a_build_for_other_gpus_does_not_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(_BASE, torch.bfloat16)
    assert supports(model, CUDA) is None
    monkeypatch.setattr(library, "cuda_archs", lambda: "80,90")
    assert supports(model, CUDA) == "the operators were not built for Hopper (90a)"


def test_what_it_does_not_run() -> None:
    for dtype in (torch.float32, torch.float16):
        assert "not bfloat16" in str(supports(build(_BASE, dtype), CUDA))
    wide = build(dataclasses.replace(_BASE, d_model=200), torch.bfloat16)
    assert "d_model a multiple of" in str(supports(wide, CUDA))
    narrow = dataclasses.replace(_HGRN, inner=200)
    assert "with an output gate" in str(supports(build(narrow, torch.bfloat16), CUDA))
    convolved = build(dataclasses.replace(_HGRN, conv_kernel=4), torch.bfloat16)
    assert supports(convolved, CUDA) == "convolutions between gates and recurrence"
    narrow = dataclasses.replace(_BASE, expansion=1.0, out_projection=False)
    assert supports(build(narrow, torch.bfloat16), CUDA) == "no out projection"
    assert supports(LM(_BASE).bfloat16(), torch.device("cpu")) == "not on a GPU"
