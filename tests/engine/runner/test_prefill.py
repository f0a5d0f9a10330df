"""PrefillRunner: padded up to a bucket and replayed, chunks give what they give eagerly, and no
state but theirs is touched. On the CPU something that runs eagerly stands for CUDA graphs."""

from __future__ import annotations

import math
import random
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from engine.config import Quantization
from engine.engine import Engine
from engine.models.backends.eager import EagerBackend
from engine.models.backends.hopper import HopperBackend
from engine.models.backends.selector import ModelBackend
from engine.models.loader import load_model, quantize_model, save_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState
from engine.ops.upload import UploadRing
from engine.runner import prefill as prompts
from engine.runner.context import RunnerContext
from engine.runner.cuda_graphs import MOST_PADDING, BucketGraphs, long_prompts, prompt_buckets
from engine.runner.prefill import PrefillRunner, Read
from engine.runner.sampling.batch_params import BatchSamplingParams
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.runner.sampling.sampler import Sampler
from engine.step_plan import Admission, DecodeRow, PrefillChunk, StepPlan
from tests.engine.runner.test_model_runner import (
    SLOTS,
    VOCAB,
    chunk_of,
    load,
    random_prompt,
    request_of,
    save_random_model,
)
from tests.models.test_hopper import CONFIGS
from tests.models.test_hopper import build as build_bfloat16
from tests.models.variants import DEVICES, VARIANTS, build, relative_error

ROWS = 40


class EagerGraphs(BucketGraphs):
    """Its replays run anew, over whatever the last run has left behind."""

    def capture(self, pool: Any) -> None:
        for size in reversed(self._sizes):
            self._clear(size)
            self._run(size)

    def replay(self, size: int) -> None:
        assert size in self._sizes
        self._run(size)


@pytest.fixture(autouse=True)
def replayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the graphs replayed."""
    sizes: list[int] = []
    base: Any = BucketGraphs if "gpu" in request.keywords else EagerGraphs

    class Counting(base):  # type: ignore[misc]
        def replay(self, size: int) -> None:
            sizes.append(size)
            super().replay(size)

    monkeypatch.setattr(prompts, "BucketGraphs", Counting)
    return sizes


class Checking(EagerBackend):
    """Sees to it that padding names no state row, and no row is named twice, where it can look."""

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        if tokens.device.type == "cpu":
            named = slots[slots >= 0].tolist()
            assert len(named) == len(set(named))
            assert (slots[cu_seqlens.diff() == 0] < 0).all()
        return super().prefill(tokens, cu_seqlens, state, slots)


class Pair:
    """One model, twice: eager, and with its prompts in graphs. `poisoned` rows of both hold NaN."""

    def __init__(self, model: LM, serving: ModelBackend, device: str) -> None:
        self.model = model
        vocab = model.config.vocab_size
        self.states = [model.new_state(ROWS) for _ in range(2)]
        uploads = UploadRing(torch.device(device))
        self.params = BatchSamplingParams(ROWS, vocab, ())
        self.processors = LogitsProcessors(ROWS, vocab, (), uploads)
        sampler = Sampler(self.params, self.processors, uploads)
        self.steps = [
            PrefillRunner(
                RunnerContext(serving, one, sampler, self.params, self.processors, uploads)
            )
            for one in self.states
        ]
        pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
        with torch.inference_mode():
            self.steps[1].capture(prompt_buckets(300, ROWS), vocab, pool)

    def begin(self, live: list[int]) -> None:
        """Initial states for these slots, NaN wherever none of theirs may look or write."""
        fresh = tensors(self.model.new_state(ROWS))
        dead = [row for row in range(ROWS) if row not in live]
        for state in self.states:
            for tensor, initial in zip(tensors(state), fresh, strict=True):
                tensor.copy_(initial)
                tensor[:, dead] = math.nan

    @torch.inference_mode()
    def read(self, chunks: list[PrefillChunk], sample: bool = False) -> list[Read]:
        return [
            Read(*(None if part is None else part.clone() for part in step(chunks, sample)))
            for step in self.steps
        ]


def prefill_of(model: LM) -> PrefillRunner:
    """Of ROWS slots, eager on the CPU."""
    uploads, vocab = UploadRing(torch.device("cpu")), model.config.vocab_size
    params = BatchSamplingParams(ROWS, vocab, ())
    processors = LogitsProcessors(ROWS, vocab, (), uploads)
    sampler = Sampler(params, processors, uploads)
    state = model.new_state(ROWS)
    return PrefillRunner(
        RunnerContext(EagerBackend(model), state, sampler, params, processors, uploads)
    )


def tensors(state: ModelState) -> list[Tensor]:
    return [state["cell"]] if state.get("conv") is None else [state["cell"], state["conv"]]


def random_chunks(
    lengths: list[int], slots: list[int], vocab: int, chance: random.Random
) -> list[PrefillChunk]:
    """Some of them end their prompt, the first one does."""
    return [
        PrefillChunk(
            key=index,
            slot=slot,
            start=0,
            tokens=array("i", chance.choices(range(vocab), k=length)),
            targets=None,
            score_top=0,
            sample=index == 0 or chance.random() < 0.6,
        )
        for index, (length, slot) in enumerate(zip(lengths, slots, strict=True))
    ]


COMPANIES = [[1], [16], [17], [128], [300], [5, 1, 2], [1] * 4, [3] * 5, [64, 129, 100], [7] * 40]


def check_company(pair: Pair, lengths: list[int], tolerance: float) -> None:
    """Twice, so that the second reading goes on from the states of the first."""
    chance = random.Random(sum(lengths))
    slots = chance.sample(range(ROWS), len(lengths))
    pair.begin(slots)
    for _ in range(2):
        chunks = random_chunks(lengths, slots, pair.model.config.vocab_size, chance)
        eager, graphed = pair.read(chunks)
        assert eager.logits is not None and graphed.logits is not None
        assert graphed.logits.shape == eager.logits.shape
        assert relative_error(graphed.logits, eager.logits) < tolerance
        for ours, theirs in zip(tensors(pair.states[1]), tensors(pair.states[0]), strict=True):
            assert relative_error(ours[:, slots], theirs[:, slots]) < tolerance
            dead = [row for row in range(ROWS) if row not in slots]
            assert ours[:, dead].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_padded_prompts_give_what_eager_ones_give(
    options: dict[str, object], device: str, replayed: list[int]
) -> None:
    model = build(options, device)
    pair = Pair(model, Checking(model), device)
    for lengths in COMPANIES:
        check_company(pair, lengths, tolerance=2e-5)
    assert replayed == [
        size for size in (16, 16, 32, 128, 300, 16, 16, 32, 300, 300) for _ in range(2)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_in_graphs_on_hopper(name: str, replayed: list[int]) -> None:
    model = build_bfloat16(CONFIGS[name], torch.bfloat16)
    pair = Pair(model, HopperBackend(model), "cuda")
    for lengths in COMPANIES:
        check_company(pair, lengths, tolerance=0.03)  # each form of a product has its rounding
    assert len(replayed) == 2 * len(COMPANIES)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", get_args(Quantization))
def test_quantised_prompts_in_graphs(kind: Quantization) -> None:
    options: dict[str, object] = {"cell": "mingru", "conv_kernel": 3, "tie_embeddings": True}
    model = quantize_model(build(options, "cuda").to(torch.bfloat16), kind)
    pair = Pair(model, EagerBackend(model), "cuda")
    for lengths in COMPANIES:
        check_company(pair, lengths, tolerance=0.03)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_scored_is_read_in_a_graph_too(device: str, replayed: list[int]) -> None:
    model = build({"cell": "mingru"}, device)
    pair = Pair(model, EagerBackend(model), device)
    prompt = list(range(20))
    scored = chunk_of(1, 3, prompt, 0, 20, score_top=0)
    for chunks in ([scored], [chunk_of(2, 5, prompt, 0, 20), scored]):
        pair.begin([3, 5])
        eager, graphed = pair.read(chunks)
        assert graphed.hidden.shape == (20 * len(chunks), model.config.d_model)
        assert relative_error(graphed.hidden, eager.hidden) < 2e-5
    assert replayed == [32, 64]


def test_what_is_long_is_read_without_a_graph(replayed: list[int]) -> None:
    model = build({"cell": "mingru"})
    pair = Pair(model, EagerBackend(model), "cpu")
    prompt = list(range(20))
    long = prompt * 16
    read = pair.read([chunk_of(1, 3, long, 0, len(long))])[1]
    assert read.logits is not None and len(read.logits) == 1
    assert replayed == []
    read = pair.read([chunk_of(1, 3, prompt, 0, 19)])[1]
    assert len(read.hidden) == 19 and read[1:] == (None, None)
    assert replayed == [32]


@pytest.mark.parametrize(
    ("launching", "largest", "free"), [(1.0, 0, 0), (3.0, 4, 2), (4.0, 4, 4), (10.0, 8, 8)]
)
def test_graphs_pay_while_the_device_does_not_take_much_longer(
    launching: float, largest: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that takes a second a token, and a host that takes as long for any prompt."""
    now, busy_until = 0.0, 0.0

    def run(step: PrefillRunner, inputs: Any, sample: bool) -> None:
        nonlocal now, busy_until
        busy_until = max(now + launching, max(now, busy_until) + len(inputs.tokens))
        now += launching

    def synchronize(device: torch.device) -> None:
        nonlocal now
        now = max(now, busy_until)

    monkeypatch.setattr(PrefillRunner, "_run", run)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(prompts, "perf_counter", lambda: now)
    model = build({"cell": "mingru"})
    step = prefill_of(model)
    assert step.worth_graphs([2, 4, 8]) == largest
    assert step._launch_bound == free


@pytest.mark.parametrize("launch_bound", [False, True])
def test_long_prompts_are_filled_up_where_padding_costs_nothing(
    launch_bound: bool, replayed: list[int]
) -> None:
    model = build({"cell": "mingru"})
    step = prefill_of(model)
    step._launch_bound = 2048 if launch_bound else 0
    tokens = list(range(20)) * 90  # 1,800
    with torch.inference_mode():
        step.capture(prompt_buckets(2048, 1, longest=2048), model.config.vocab_size, None)
        for length in (1400, 1792, 1793, 1800):
            step([chunk_of(1, 3, tokens, 0, length)], sample=False)
    assert replayed == ([1536, 2048, 2048, 2048] if launch_bound else [1536, 2048, 2048])


def test_prompt_buckets_rise_to_what_can_come() -> None:
    assert prompt_buckets(1, 50) == {1: [1]}
    assert prompt_buckets(20, 3) == {3: [16, 20]}
    assert prompt_buckets(100, 40) == {
        4: [16, 32, 64, 96, 100],
        31: [32, 64, 96, 100],
        40: [64, 96, 100],
    }
    most = prompt_buckets(8192, 4096)
    assert max(b - a for a, b in pairwise(most[4])) == MOST_PADDING + 1
    assert list(most) == [4, 31, 127]
    assert {tokens[-1] for tokens in most.values()} == {1536}
    assert len(most[4]) + len(most[31]) + len(most[127]) <= 40


def test_long_prompts_have_graphs_up_to_where_they_pay() -> None:
    assert long_prompts(1536) == []
    assert long_prompts(2000) == [2000]
    assert long_prompts(8192) == [2048, 3072, 4096, 6144, 8192] == long_prompts(20_000)
    assert prompt_buckets(5000, 4, longest=3072)[4][-3:] == [1536, 2048, 3072]
    assert prompt_buckets(5000, 4, longest=5000)[4][-2:] == [4096, 5000]
    assert prompt_buckets(1000, 4, longest=5000) == prompt_buckets(1000, 4)


# --- through the Runner


@pytest.fixture(params=DEVICES)
def runners(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Eager and graphed; the model's answers vary, for its head is steep."""
    torch.manual_seed(3)
    config = MinRnnConfig(
        cell="minlstm", vocab_size=VOCAB, d_model=32, n_layers=2, conv_kernel=3, dtype="float32"
    )
    model = LM(config)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight *= 4
    save_model(tmp_path, model, config, "float32")
    eager = load(tmp_path, device=request.param, cuda_graphs=False)
    graphed = load(tmp_path, device=request.param)
    if request.param == "cuda":
        eager.warm_up()
        graphed.warm_up()
    else:
        with torch.inference_mode():
            graphed._prefill.capture(prompt_buckets(1024, SLOTS), VOCAB, None)
    return [eager, graphed]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 7, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.8, "choice": 2},
]


def first_tokens(runner: Any, slots: list[int], decode: bool, **fields: Any) -> list[int]:
    """Of one request per slot, alone or in a step in which another sequence decodes."""
    keys = [100 + slot for slot in slots]
    requests = [
        request_of(
            key, random_prompt(3 + 5 * key % 23, key), seed=key, **SAMPLINGS[key % 4], **fields
        )
        for key in keys
    ]
    other = request_of(1, [1, 2, 3])
    runner.run(StepPlan(admit=[Admission(other, 1, SLOTS - 1, None, 0)]))
    plan = StepPlan(decode=[DecodeRow(1, SLOTS - 1, 4, 1)] if decode else [])
    for request, slot in zip(requests, slots, strict=True):
        prompt = array("i")
        prompt.frombytes(request.prompt)
        plan.admit.append(Admission(request, request.id, slot, None, 0))
        plan.prefill.append(chunk_of(request.id, slot, prompt.tolist(), 0, len(prompt)))
    result = runner.run(plan)
    assert result.non_finite == []
    runner.run(StepPlan(release=[1, *keys]))
    tokens = {sampled.key: sampled.token for sampled in result.sampled}
    assert set(tokens) == {*keys, *([1] if decode else [])}
    return [tokens[key] for key in keys]


def test_first_tokens_do_not_depend_on_who_draws_them(runners: list[Any]) -> None:
    """In a graph or not, by the device or, beside rows that the host draws for, by the sampler."""
    chance = random.Random(5)
    seen = set()
    for count in (1, 2, 4, 5, 10):
        slots = chance.sample(range(SLOTS - 1), count)
        expected = first_tokens(runners[0], slots, decode=True)
        for runner in runners:
            assert first_tokens(runner, slots, decode=False) == expected
            assert first_tokens(runner, slots, decode=True) == expected
        assert first_tokens(runners[1], slots, decode=False, logit_bias={0: 0.0}) == expected
        seen.update(expected)
    assert len(seen) > 5


@pytest.mark.parametrize("graphed", [False, True])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(tmp_path: Path, graphed: bool) -> None:
    """Where the device draws; also in the slot that held NaN."""
    save_random_model(tmp_path)
    model, config = load_model(tmp_path, "cpu", "float32")
    with torch.no_grad():
        model.embedding.weight[7] = math.nan  # whoever reads token 7
    save_model(tmp_path, model, config, "float32")
    runner = load(tmp_path, max_slots=3)
    if graphed:
        with torch.inference_mode():
            runner._prefill.capture(prompt_buckets(64, 3), VOCAB, None)
    engine = Engine(runner)
    for _ in range(2):
        for id, prompt in enumerate([[1, 2, 3], [1, 7, 3], [4, 5]]):
            engine.add("c", request_of(id, prompt, max_tokens=1, stop_token_ids=(7,)))
        finished, failed = set(), set()
        while engine.has_work:
            events = engine.step().get("c")
            if events is not None:
                finished |= {one.request for one in events.finished}
                failed |= {(one.request, one.code) for one in events.failed}
        assert (finished, failed) == ({0, 2}, {(1, "step_failed")})
