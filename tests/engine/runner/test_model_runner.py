"""Runner, end to end over small random models: what a step gives does not depend on its company."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Hashable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.config import SCAN_CHUNK, EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.models.backends.cpu import CpuBackend
from engine.models.backends.dispatch import PathBackend
from engine.models.loader import load_model, save_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids, unpack_ids
from engine.runner import prompt_logprobs as scoring
from engine.runner import state_pool as state
from engine.runner.cuda_graphs import buckets
from engine.runner.model_runner import ModelRunner
from engine.step_plan import Admission, Copy, DecodeRow, PrefillChunk, StepPlan, StepResult

VOCAB = 61
SLOTS = 12
MODELS = {
    "mingru": {"cell": "mingru", "conv_kernel": 0},
    "minlstm conv": {"cell": "minlstm", "conv_kernel": 4, "learned_initial_state": True},
    "hgrn": {"cell": "hgrn", "conv_kernel": 3},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def save_random_model(folder: Path, **fields: Any) -> Path:
    torch.manual_seed(1)
    config = MinRnnConfig(
        **{"cell": "mingru", "vocab_size": VOCAB, "d_model": 32, "n_layers": 2, **fields},
        eos_token_id=VOCAB - 1,
        dtype="float32",
    )
    save_model(folder, LM(config), config, "float32")
    return folder


def load(folder: Path, **fields: Any) -> ModelRunner:
    given = {"max_slots": SLOTS, "share_slots": 4, "threads": 1, "device": "cpu", **fields}
    # Some tests say themselves what is the quickest, which no other start may believe.
    return ModelRunner(EngineConfig(model=str(folder), tuning_cache="off", **given))


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_random_model(tmp_path, **request.param)


@pytest.fixture(params=DEVICES)
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    return load(folder, device=request.param)


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def request_of(key: int, prompt: list[int], **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **sampling})
    return Request(id=key, prompt=pack_ids(prompt), sampling=params)


def chunk_of(
    key: int, slot: int, prompt: list[int], start: int, stop: int, score_top: int | None = None
) -> PrefillChunk:
    """Prompt tokens start to stop; every successor is scored, and nothing drawn, unless score_top
    is None."""
    targets = None if score_top is None else array("i", [*prompt, -1][start + 1 : stop + 1])
    return PrefillChunk(
        key=key,
        slot=slot,
        start=start,
        tokens=array("i", prompt[start:stop]),
        targets=targets,
        score_top=score_top or 0,
        sample=stop == len(prompt) and score_top is None,
    )


def generate(
    runner: ModelRunner,
    requests: Sequence[Request],
    steps: int,
    slots: Sequence[int] | None = None,
    cuts: Sequence[int] = (),
) -> dict[int, list[int]]:
    """Serves requests in one batch, prompts cut at `cuts`: each key's tokens."""
    slots = slots or range(len(requests))
    rows = dict(zip((request.id for request in requests), slots, strict=True))
    admit = [Admission(one, one.id, rows[one.id], None, 0) for one in requests]
    answers: dict[int, list[int]] = {request.id: [] for request in requests}
    edges = [0, *cuts, 10**9]
    for start, stop in pairwise(edges):
        prompts = {one.id: list(unpack_ids(one.prompt)) for one in requests}
        chunks = [
            chunk_of(key, rows[key], prompt, start, min(stop, len(prompt)))
            for key, prompt in prompts.items()
            if start < len(prompt)
        ]
        take(answers, runner.run(StepPlan(admit=admit, prefill=chunks)))
        admit = []
    for position in range(1, steps):
        decode = [
            DecodeRow(key, rows[key], answer[-1], position) for key, answer in answers.items()
        ]
        take(answers, runner.run(StepPlan(decode=decode)))
    runner.run(StepPlan(release=list(answers)))
    return answers


def take(answers: dict[int, list[int]], result: StepResult) -> None:
    assert result.non_finite == []
    for sampled in result.sampled:
        answers[sampled.key].append(sampled.token)


def test_a_batch_gives_each_prompt_what_it_gives_alone(runner: ModelRunner) -> None:
    """Greedy and drawn, in other slots, other company and after other requests."""
    requests = [
        request_of(key, random_prompt(length, key), temperature=0.8 * (key % 2), seed=key)
        for key, length in enumerate([1, 2, 40, 129, 300, 7, 64, 3])
    ]
    alone: dict[int, list[int]] = {}
    for request in requests:
        alone |= generate(runner, [request], steps=12, slots=[request.id % 3])
    together = generate(runner, requests, steps=12, slots=[11, 2, 3, 0, 5, 7, 6, 1])
    assert together == alone
    assert all(len(tokens) == 12 for tokens in together.values())
    assert len({tuple(tokens) for tokens in together.values()}) == len(requests)


def test_a_prompt_read_in_chunks_goes_on_as_if_read_whole(runner: ModelRunner) -> None:
    requests = [request_of(key, random_prompt(300 + key, key)) for key in range(2)]
    whole = generate(runner, requests, steps=10)
    for cuts in ([SCAN_CHUNK], [1, 2, 3, 150], [SCAN_CHUNK, 2 * SCAN_CHUNK], [299]):
        assert generate(runner, requests, steps=10, cuts=cuts) == whole


def test_prefill_and_decode_share_a_step(runner: ModelRunner) -> None:
    """`sampled` has the chunks that end their prompt first, then the decoded rows."""
    first, second = (request_of(key, random_prompt(20 + key, key)) for key in (1, 2))
    expected = generate(runner, [first], 3) | generate(runner, [second], 1)
    prompts = [list(unpack_ids(request.prompt)) for request in (first, second)]
    answer = []
    admit = [Admission(first, 1, 4, None, 0)]
    result = runner.run(StepPlan(admit=admit, prefill=[chunk_of(1, 4, prompts[0], 0, 21)]))
    answer.append(result.sampled[0].token)
    admit = [Admission(second, 2, 9, None, 0)]
    unfinished = runner.run(
        StepPlan(
            admit=admit,
            prefill=[chunk_of(2, 9, prompts[1], 0, 5)],
            decode=[DecodeRow(1, 4, answer[-1], 1)],
        )
    )
    assert [sampled.key for sampled in unfinished.sampled] == [1]
    answer.append(unfinished.sampled[0].token)
    both = runner.run(
        StepPlan(
            prefill=[chunk_of(2, 9, prompts[1], 5, 22)], decode=[DecodeRow(1, 4, answer[-1], 2)]
        )
    )
    assert [sampled.key for sampled in both.sampled] == [2, 1]
    assert both.prefill_seconds > 0 and both.decode_seconds > 0
    answer.append(both.sampled[1].token)
    assert {1: answer, 2: [both.sampled[0].token]} == expected


def test_every_position_draws_anew(runner: ModelRunner) -> None:
    """So hot that the logits hardly matter: what is left is the position's own number."""
    request = request_of(1, random_prompt(5, 1), temperature=1e4)
    assert len(set(generate(runner, [request], steps=30)[1])) > 10


def test_a_forked_prefix_is_as_good_as_reading_it(runner: ModelRunner) -> None:
    """Rows behind the slots hold what `after` copied; they survive the sequence and serve many."""
    prefix, row = random_prompt(SCAN_CHUNK, 0), SLOTS + 3
    requests = [request_of(key, [*prefix, key], logprobs=VOCAB) for key in (7, 8)]
    prompts = [list(unpack_ids(request.prompt)) for request in requests]
    slots = (2, 0)

    def first_draws(start: int, source: int | None) -> list[TokenLogprobs]:
        plan = StepPlan(release=[5, 6, 7, 8])
        for request, prompt, slot in zip(requests, prompts, slots, strict=True):
            plan.admit.append(Admission(request, request.id, slot, source, start))
            plan.prefill.append(chunk_of(request.id, slot, prompt, start, len(prompt)))
        reports = [sampled.report for sampled in runner.run(plan).sampled]
        return [logprobs for report in reports if report for logprobs in report.unpack()]

    read_whole = first_draws(0, None)
    without_prefix = first_draws(SCAN_CHUNK, None)
    runner.run(
        StepPlan(
            release=[7, 8],
            admit=[Admission(request_of(5, prompts[0]), 5, 2, None, 0)],
            prefill=[chunk_of(5, 2, prompts[0], 0, SCAN_CHUNK)],
            after=[Copy(2, row)],
        )
    )
    generate(runner, [request_of(6, random_prompt(30, 6))], steps=2, slots=[2])
    for forked in (first_draws(SCAN_CHUNK, row), first_draws(SCAN_CHUNK, row)):
        for own, whole, other in zip(forked, read_whole, without_prefix, strict=True):
            assert own.top_ids[0] == whole.top_ids[0]
            assert own.top_logprobs == pytest.approx(whole.top_logprobs, abs=2e-5)
            assert own.top_logprobs != pytest.approx(other.top_logprobs, abs=2e-3)


def direct_logprobs(folder: Path, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities after each prompt token, by the training forward pass: [tokens, vocab]."""
    model, _ = load_model(folder, "cpu", "float32")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt]))
    return logits[0].double().log_softmax(-1)


def check_scores(tokens: list[TokenLogprobs], reference: torch.Tensor, prompt: list[int]) -> None:
    """`tokens` are the scores of prompt[1:], each with three alternatives."""
    assert len(tokens) == len(prompt) - 1
    for token, row, id in zip(tokens, reference[:-1], prompt[1:], strict=True):
        assert token.logprob == pytest.approx(float(row[id]), abs=2e-5)
        best, ids = row.topk(3)
        assert token.top_logprobs == pytest.approx(best.tolist(), abs=2e-5)
        if float(best[0] - best[1]) > 1e-4:
            assert token.top_ids[0] == int(ids[0])
            assert token.is_greedy == (id == int(ids[0]))


def test_scores_are_those_of_the_training_forward_pass(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks of a few rows, over chunks, and with unscored chunks in between."""
    monkeypatch.setattr(scoring, "BLOCK_BYTES", 4 * VOCAB * 7)
    prompt, other = random_prompt(90, 1), random_prompt(20, 2)
    reference = direct_logprobs(folder, prompt)
    admit = [
        Admission(request_of(1, prompt, max_tokens=0), 1, 3, None, 0),
        Admission(request_of(2, other), 2, 5, None, 0),
    ]
    scores: list[TokenLogprobs] = []
    for start, stop in ((0, 10), (10, 64), (64, 90)):
        part = start // 10
        plan = StepPlan(
            admit=admit,
            prefill=[
                chunk_of(2, 5, other, part, part + 1),
                chunk_of(1, 3, prompt, start, stop, score_top=3),
            ],
        )
        (scored,) = runner.run(plan).scored
        assert (scored.key, scored.start) == (1, start + 1)
        scores += scored.reports.unpack()
        admit = []
    check_scores(scores, reference, prompt)


def test_each_chunk_is_scored_with_its_own_number_of_best(runner: ModelRunner) -> None:
    prompts = {key: random_prompt(6, key) for key in (1, 2, 3)}
    admit = [
        Admission(request_of(key, prompt), key, key, None, 0) for key, prompt in prompts.items()
    ]
    tops: dict[int, int | None] = {1: 0, 2: None, 3: 4}
    chunks = [
        chunk_of(key, key, prompt, 0, 6, score_top=tops[key]) for key, prompt in prompts.items()
    ]
    result = runner.run(StepPlan(admit=admit, prefill=chunks))
    scores = {scored.key: scored.reports.unpack() for scored in result.scored}
    assert {key: len(tokens) for key, tokens in scores.items()} == {1: 5, 3: 5}
    assert {len(token.top_ids) for token in scores[1]} == {0}
    assert {len(token.top_ids) for token in scores[3]} == {4}


def test_scoring_never_holds_more_logits_than_a_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number of rows that the head is given, over a prompt much longer than a block."""
    monkeypatch.setattr(scoring, "BLOCK_BYTES", 4 * VOCAB * 16)
    rows: list[int] = []

    def count(backend: type[CpuBackend] | type[PathBackend]) -> None:
        logits: Any = backend.logits

        def counting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden))
            return cast("torch.Tensor", logits(self, hidden))

        monkeypatch.setattr(backend, "logits", counting)

    count(CpuBackend)
    count(PathBackend)
    runner = load(folder)
    prompt = random_prompt(200, 1)
    plan = StepPlan(
        admit=[Admission(request_of(1, prompt, max_tokens=0), 1, 0, None, 0)],
        prefill=[chunk_of(1, 0, prompt, 0, 150, score_top=1)],
    )
    (scored,) = runner.run(plan).scored
    assert len(scored.reports.unpack()) == 150 == sum(rows) and max(rows) == 16
    rows.clear()
    runner.run(StepPlan(prefill=[chunk_of(1, 0, prompt, 150, 199)]))
    assert rows == []  # neither scored nor sampled


def test_drawn_tokens_carry_log_probabilities_where_asked(
    folder: Path, runner: ModelRunner
) -> None:
    prompt = random_prompt(30, 3)
    requests = [
        request_of(1, prompt),
        request_of(2, prompt, logprobs=2, temperature=1.0),
        request_of(3, prompt, logprobs=0),
    ]
    admit = [Admission(one, one.id, one.id, None, 0) for one in requests]
    chunks = [chunk_of(one.id, one.id, prompt, 0, 30) for one in requests]
    result = runner.run(StepPlan(admit=admit, prefill=chunks))
    reference = direct_logprobs(folder, prompt)[-1]
    plain, drawn, greedy = result.sampled
    assert plain.report is None
    assert drawn.report is not None and greedy.report is not None
    (of_drawn,), (of_greedy,) = drawn.report.unpack(), greedy.report.unpack()
    assert of_drawn.logprob == pytest.approx(float(reference[drawn.token]), abs=2e-5)
    assert of_drawn.top_logprobs == pytest.approx(reference.topk(2).values.tolist(), abs=2e-5)
    assert of_greedy.is_greedy and of_greedy.top_ids == []


def test_a_request_whose_logits_are_not_finite_fails_and_no_other(folder: Path) -> None:
    """Drawing and scoring; the engine lives on, also in the slot that held NaN."""
    model, config = load_model(folder, "cpu", "float32")
    with torch.no_grad():
        model.embedding.weight[7] = math.nan  # whoever reads token 7
    save_model(folder, model, config, "float32")
    engine = Engine(load(folder, max_slots=2))
    for round in range(2):
        prompts = [[1, 2, 3], [1, 7, 3], [4, 5]]
        for id, prompt in enumerate(prompts):
            engine.add("drawing", request_of(id, prompt, max_tokens=3, logit_bias={7: -100.0}))
            score_only = SamplingParams(max_tokens=0)
            packed = pack_ids(prompt)
            engine.add("scoring", Request(id=id, prompt=packed, sampling=score_only, score=True))
        finished: set[tuple[Hashable, int]] = set()
        failed: set[tuple[Hashable, int, str]] = set()
        while engine.has_work:
            for client, events in engine.step().items():
                finished |= {(client, one.request) for one in events.finished}
                failed |= {(client, one.request, one.code) for one in events.failed}
        assert finished == {(client, id) for client in ("drawing", "scoring") for id in (0, 2)}
        assert failed == {(client, 1, "step_failed") for client in ("drawing", "scoring")}, round


def test_warming_up_leaves_no_trace(runner: ModelRunner) -> None:
    requests = [request_of(key, random_prompt(30, key)) for key in range(3)]
    before = generate(runner, requests, steps=5)
    runner.warm_up()
    assert generate(runner, requests, steps=5) == before


@pytest.mark.gpu
def test_graphs_give_what_the_eager_step_gives(folder: Path) -> None:
    """Every batch size, so that every bucket is used, full and padded."""
    eager = load(folder, device="cuda", cuda_graphs=False)
    graphed = load(folder, device="cuda")
    eager.warm_up()
    graphed.warm_up()
    for count in range(1, SLOTS + 1):
        requests = [
            request_of(key, random_prompt(5 + key, key), seed=key, temperature=0.5 * (key % 2))
            for key in range(count)
        ]
        slots = list(range(SLOTS - count, SLOTS))
        expected = generate(eager, requests, steps=8, slots=slots)
        assert generate(graphed, requests, steps=8, slots=slots) == expected


def test_buckets_rise_to_the_largest_batch() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert buckets(300)[-3:] == [192, 256, 300]
    assert buckets(5000)[-1] == 4096


def test_the_resolved_config_has_no_open_choice(tmp_path: Path) -> None:
    runner = load(save_random_model(tmp_path / "my-model"), threads=None)
    config, info = runner.config, runner.info
    assert (config.device, config.dtype) == ("cpu", "float32")
    assert config.max_step_tokens == SCAN_CHUNK
    assert config.threads is not None and 1 <= config.threads <= len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == config.threads
    assert (info.name, info.folder) == ("my-model", str(tmp_path / "my-model"))
    assert (info.cell, info.vocab_size, info.eos_token_id) == ("mingru", VOCAB, VOCAB - 1)
    assert (info.slots, info.device, info.dtype) == (SLOTS, "cpu", "float32")
    model, model_config = load_model(tmp_path / "my-model", "cpu")
    assert info.parameters == sum(weight.numel() for weight in model.parameters())
    assert info.state_bytes == model_config.state_bytes
    assert info.device_name and len(info.fingerprint) == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_serves_in_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    runner = load(save_random_model(tmp_path), dtype=dtype)
    assert runner.info.dtype == dtype
    answers = generate(runner, [request_of(1, [1, 2, 3])], steps=3)
    assert len(answers[1]) == 3


def test_what_cannot_be_loaded_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError):
        load(tmp_path / "nothing")
    monkeypatch.setattr(state, "available_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match="max_slots"):
        load(save_random_model(tmp_path))
