"""DeviceBatch and the runner's rounds: rows that draw, go on and end on the device give what the
host, which looks at every token, would have given."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.models.loader import load_model, save_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.logprobs import MOST_TOP, PackedLogprobs, TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import (
    MOST_STOP_IDS,
    Grammar,
    SamplingParams,
    is_adjusted,
    is_plain,
)
from engine.protocol.token_ids import pack_ids, unpack_ids
from engine.runner import cuda_graphs
from engine.runner.cuda_graphs import buckets
from engine.runner.model_runner import ModelRunner
from engine.scheduler import decode_scheduler as rounds_module
from engine.step_plan import Admission, DecodeRow, PrefillChunk, StepPlan, StepResult
from tests.engine.runner.test_model_runner import (
    SLOTS,
    VOCAB,
    chunk_of,
    load,
    random_prompt,
    request_of,
)
from tests.engine.scheduler.test_decode_scheduler import tokens_of

EOS = VOCAB - 1
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def save_steep_model(folder: Path) -> Path:
    """A random model whose answers vary: its head is steep, and end-of-text not rare."""
    torch.manual_seed(3)
    config = MinRnnConfig(
        cell="mingru",
        vocab_size=VOCAB,
        d_model=32,
        n_layers=2,
        conv_kernel=3,
        tie_embeddings=False,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = LM(config)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight *= 4
    save_model(folder, model, config, "float32")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_steep_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=DEVICES)
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    runner = load(folder, device=request.param)
    if request.param == "cuda":
        runner.warm_up()
    return runner


class Overlapping(ModelRunner):
    """On the CPU a round is over when it has been started; that does no harm."""

    @property
    def overlaps(self) -> bool:
        return True


def various(count: int, seed: int) -> list[Request]:
    """Requests of every kind, most of them plain."""
    chance = random.Random(seed)
    requests = []
    for id in range(count):
        fields: dict[str, Any] = {
            "temperature": chance.choice([0.0, 0.7, 1.0, 3.0]),
            "top_k": chance.choice([0, 0, 3, 20, VOCAB, 10**9]),
            "top_p": chance.choice([1.0, 1.0, 0.8, 0.3]),
            "min_p": chance.choice([0.0, 0.0, 0.1]),
            "seed": chance.randrange(2**63),
            "choice": chance.randrange(3),
            "max_tokens": chance.choice([1, 2, 9, 33, 80]),
            "ignore_eos": chance.random() < 0.5,
            "stop_token_ids": tuple(chance.sample(range(VOCAB), chance.choice([0, 0, 1, 7]))),
        }
        if id % 3 == 1:
            fields |= chance.choice(
                [
                    {"repetition_penalty": 1.3},
                    {"repetition_penalty": 1.5, "presence_penalty": 0.3, "logit_bias": {5: -1.5}},
                    {"frequency_penalty": 0.9, "temperature": 0.0},
                    {"logit_bias": dict.fromkeys(range(0, VOCAB, 2), 2.0)},
                    {"min_tokens": min(30, fields["max_tokens"]), "ignore_eos": False},
                ]
            )
        if id % 4 == 2:
            fields |= chance.choice([{"logprobs": 0}, {"logprobs": 1}, {"logprobs": MOST_TOP}])
        if id % 9 == 8:
            fields |= chance.choice(
                [
                    {"logprobs": MOST_TOP + 1},
                    {"stop_token_ids": tuple(range(MOST_STOP_IDS))},
                    {"stop_token_ids": tuple(range(MOST_STOP_IDS)), "presence_penalty": 1.0},
                ]
            )
        prompt = random_prompt(chance.choice([1, 5, 140]), id)
        one = request_of(id, prompt, **fields)
        requests.append(Request(**_fields(one), stream=chance.random() < 0.7))
    return requests


def _fields(request: Request) -> dict[str, Any]:
    return {"id": request.id, "prompt": request.prompt, "sampling": request.sampling}


Answer = tuple[list[int], str]
CLOSE = 2e-4  # log-probabilities of one text, read in different ways


def check_logprobs(
    runner: ModelRunner, request: Request, answer: list[int], told: list[TokenLogprobs]
) -> None:
    """They are the model's own, whatever was laid on its logits before the draws."""
    top = request.sampling.logprobs
    if top is None:
        assert told == []
        return
    assert len(told) == len(answer)
    if not answer:
        return
    text = [*unpack_ids(request.prompt), *answer]
    scored = score_all(runner, text, max(2, top))[-len(answer) :]
    for one, other in zip(told, scored, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
        assert one.top_logprobs == pytest.approx(other.top_logprobs[:top], abs=CLOSE)
        sure = {id for id, value in zip(one.top_ids, one.top_logprobs, strict=True)
                if value > one.top_logprobs[-1] + CLOSE}  # fmt: skip
        assert sure <= set(other.top_ids)
        best, second = other.top_logprobs[:2]
        assert one.is_greedy == other.is_greedy or best - second < CLOSE


def score_all(runner: ModelRunner, text: list[int], top: int) -> list[TokenLogprobs]:
    """Of all tokens of a text but the first."""
    request = Request(id=0, prompt=pack_ids(text), sampling=SamplingParams(max_tokens=0))
    chunk = PrefillChunk(
        -2, 0, 0, array("i", text), array("i", [*text[1:], -1]), score_top=top, sample=False
    )
    admission = Admission(request, -2, 0, None, 0)
    (scored,) = runner.run(StepPlan(admit=[admission], prefill=[chunk])).scored
    runner.run(StepPlan(release=[-2]))
    return scored.reports.unpack()


def serve(
    runner: ModelRunner, requests: Sequence[Request], aborts: dict[int, int] | None = None
) -> dict[int, Answer]:
    """What an engine answers. They come a few at a time; aborts[id] is after how many tokens, at
    the earliest, a streamed request is aborted."""
    engine = Engine(runner)
    tokens: dict[int, list[int]] = {one.id: [] for one in requests}
    logprobs: dict[int, list[TokenLogprobs]] = {one.id: [] for one in requests}
    reasons: dict[int, str] = {}
    coming = list(requests)
    while coming or engine.has_work:
        for _ in range(2):
            if coming:
                engine.add("c", coming.pop(0))
        for id, least in (aborts or {}).items():
            if len(tokens[id]) >= least:
                engine.abort("c", [id])
        events = engine.step().get("c")
        if events is None:
            continue
        for id, ids in tokens_of(events).items():
            tokens[id] += ids
        for id, _, several in events.in_runs():
            logprobs[id] += several
        assert events.failed == []
        for end in events.finished:
            tokens[end.request] += end.tokens
            logprobs[end.request] += end.logprobs
            assert end.completion_tokens == len(tokens[end.request])
            reasons[end.request] = end.reason
    runner.run(StepPlan(release=list(range(len(requests)))))  # the next engine's keys begin anew
    for one in requests:
        check_logprobs(runner, one, tokens[one.id], logprobs[one.id])
    return {id: (ids, reasons[id]) for id, ids in tokens.items()}


@pytest.mark.parametrize("most_steps", [2, 5, 32])
def test_answers_do_not_depend_on_how_many_steps_a_round_takes(
    runner: ModelRunner, most_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, ended by length and by stop ids, streamed and not; with one step, every
    token passes through the host and the sampler."""
    requests = various(45, seed=most_steps + 1)
    monkeypatch.setattr(rounds_module, "ROUND_SECONDS", 60.0)  # however slow the machine is
    monkeypatch.setattr(runner, "most_steps", 1)
    expected = serve(runner, requests)
    assert {reason for _, reason in expected.values()} == {"stop", "length"}
    monkeypatch.setattr(runner, "most_steps", most_steps)
    rounds: list[StepPlan] = []
    start = runner.start

    def noting(plan: StepPlan) -> Any:
        rounds.append(plan)
        return start(plan)

    monkeypatch.setattr(runner, "start", noting)
    assert serve(runner, requests) == expected
    assert any(plan.steps > 1 for plan in rounds) and any(plan.again for plan in rounds)
    assert any(plan.decode and not plan.plain for plan in rounds)
    assert any(plan.decode and plan.again for plan in rounds)


def test_answers_do_not_depend_on_overlap_and_on_aborted_neighbours(folder: Path) -> None:
    requests = [
        Request(**_fields(one), stream=True)
        for one in various(40, seed=1)
        if one.sampling.max_tokens > 2
    ]
    sequential = load(folder)
    sequential.most_steps = 1
    expected = serve(sequential, requests)
    overlapping = Overlapping(sequential.config)
    assert serve(overlapping, requests) == expected
    aborts = {one.id: 5 for one in requests[::3]}
    cut = serve(overlapping, requests, aborts)
    assert any(reason == "abort" for _, reason in cut.values())
    for id, (ids, reason) in cut.items():
        if reason == "abort":
            assert id in aborts and ids == expected[id][0][: len(ids)]
        else:
            assert (ids, reason) == expected[id]


def begin(runner: ModelRunner, prompts: dict[int, list[int]], **sampling: Any) -> dict[int, int]:
    """Reads prompts into the slots that their keys name: each one's first token."""
    plan = StepPlan()
    for key, prompt in prompts.items():
        plan.admit.append(Admission(request_of(key, prompt, **sampling), key, key, None, 0))
        plan.prefill.append(chunk_of(key, key, prompt, 0, len(prompt)))
    return {one.key: one.token for one in runner.run(plan).sampled}


def drawn_by(plan: StepPlan, result: StepResult, keys: Sequence[int]) -> dict[int, list[int]]:
    """Each key's tokens, those of ended rows up to their end."""
    assert result.drawn is not None
    ids = memoryview(result.drawn.tokens).cast("i").tolist()
    return {
        key: ids[row * plan.steps :][: result.drawn.ended.get(row, plan.steps)]
        for row, key in enumerate(keys)
    }


def batch_of(rows: list[DecodeRow], steps: int = 1, **fields: Any) -> StepPlan:
    """The first round of a batch."""
    return StepPlan(decode=rows, at=list(range(len(rows))), plain=True, steps=steps, **fields)


def more(steps: int = 1, **fields: Any) -> StepPlan:
    """A further round of the batch that is there."""
    return StepPlan(plain=True, again=True, steps=steps, **fields)


def test_rows_end_at_max_tokens_and_stay_ended_while_the_others_go_on(runner: ModelRunner) -> None:
    prompts = {key: random_prompt(4, key) for key in range(5)}
    sampling = {"temperature": 1e4, "ignore_eos": True}
    first = begin(runner, prompts, max_tokens=12, **sampling)
    state = runner._pool.state["cell"].clone()
    rows = [DecodeRow(key, key, first[key], 1) for key in (3, 0, 4)]
    long = batch_of(rows, steps=9)
    tokens = drawn_by(long, runner.run(long), (3, 0, 4))
    assert [len(ids) for ids in tokens.values()] == [9, 9, 9]
    ending = more(steps=4)
    result = runner.run(ending)
    assert result.drawn is not None and result.drawn.ended == {0: 2, 1: 2, 2: 2}
    for key, ids in drawn_by(ending, result, (3, 0, 4)).items():
        tokens[key] += ids
    assert all(len(set(ids)) > 5 for ids in tokens.values()), "positions move on"
    moved = (runner._pool.state["cell"] != state).any(dim=(0, 2)).nonzero().flatten().tolist()
    assert moved == [0, 3, 4]
    state = runner._pool.state["cell"].clone()
    result = runner.run(more(steps=3))
    assert result.drawn is not None and result.drawn.ended == {0: 0, 1: 0, 2: 0}
    assert torch.equal(runner._pool.state["cell"], state)


def test_a_batch_beside_a_prompt_takes_its_step(runner: ModelRunner) -> None:
    prompts = {key: random_prompt(6, key) for key in (1, 2)}
    first = begin(runner, prompts)
    rows = [DecodeRow(key, key, first[key], 1) for key in (1, 2)]
    alone = batch_of(rows, steps=2)
    expected = drawn_by(alone, runner.run(alone), (1, 2))
    runner.run(StepPlan(release=[1, 2]))
    assert begin(runner, prompts) == first
    prompt = random_prompt(9, 7)
    mixed = batch_of(
        rows,
        admit=[Admission(request_of(7, prompt), 7, 7, None, 0)],
        prefill=[chunk_of(7, 7, prompt, 0, 9)],
    )
    result = runner.run(mixed)
    assert [one.key for one in result.sampled] == [7]
    assert result.prefill_seconds > 0 and result.decode_seconds > 0
    tokens = drawn_by(mixed, result, (1, 2))
    for key, ids in drawn_by(more(), runner.run(more()), (1, 2)).items():
        tokens[key] += ids
    assert tokens == expected


def test_rows_join_and_leave_while_others_go_on(runner: ModelRunner) -> None:
    """Whoever joins, with a token that is known or one that is drawn in the same round, draws what
    it draws alone, and so do those that were there; whether the batch has room or has to grow."""
    lengths = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    prompts = {key: random_prompt(3 + key, key) for key in range(7)}

    def alone(key: int) -> list[int]:
        first = begin(runner, {key: prompts[key]}, **lengths)
        plan = batch_of([DecodeRow(key, key, first[key], 1)], steps=13)
        tokens = [first[key], *drawn_by(plan, runner.run(plan), [key])[key]]
        runner.run(StepPlan(release=[key]))
        return tokens

    expected = {key: alone(key) for key in prompts}
    first = begin(runner, {key: prompts[key] for key in (0, 1, 2)}, **lengths)
    told = {key: [token] for key, token in first.items()}

    def run(plan: StepPlan, keys: list[int]) -> None:
        result = runner.run(plan)
        for one in result.sampled:
            told[one.key] = [one.token]
        for key, ids in drawn_by(plan, result, keys).items():
            if key >= 0:
                told.setdefault(key, []).extend(ids)

    run(batch_of([DecodeRow(key, key, first[key], 1) for key in (0, 1)], steps=2), [0, 1])
    # 2 is known, 3 and 4 are drawn in this round; 0 leaves its row to 4.
    joining = StepPlan(plain=True, again=True, leave=[0], at=[2, 3, 0])
    joining.decode = [DecodeRow(2, 2, first[2], 1), DecodeRow(3, 3, -1, 1), DecodeRow(4, 4, -1, 1)]
    for key in (3, 4):
        request = request_of(key, prompts[key], **lengths)
        joining.admit.append(Admission(request, key, key, None, 0))
        joining.prefill.append(chunk_of(key, key, prompts[key], 0, len(prompts[key])))
    run(joining, [4, 1, 2, 3])
    run(more(steps=4), [4, 1, 2, 3])
    # 5 and 6 make the batch grow, in the slots of sequences that have left.
    growing = StepPlan(plain=True, again=True, leave=[2], at=[4, 2], steps=1)
    for key, slot in ((5, 0), (6, 2)):
        growing.decode.append(DecodeRow(key, slot, -1, 1))
        request = request_of(key, prompts[key], **lengths)
        growing.admit.append(Admission(request, key, slot, None, 0))
        growing.prefill.append(chunk_of(key, slot, prompts[key], 0, len(prompts[key])))
    run(growing, [4, 1, 6, 3, 5])
    run(more(steps=5), [4, 1, 6, 3, 5])
    assert {key: len(tokens) for key, tokens in told.items()} == {
        0: 3, 1: 14, 2: 6, 3: 12, 4: 12, 5: 7, 6: 7
    }  # fmt: skip
    assert told == {key: expected[key][: len(tokens)] for key, tokens in told.items()}


def test_who_ends_with_its_first_token_never_decodes(runner: ModelRunner) -> None:
    prompt = random_prompt(6, 3)
    (token,) = begin(runner, {3: prompt}).values()
    runner.run(StepPlan(release=[3]))
    state = runner._pool.state["cell"].clone()
    plan = batch_of([DecodeRow(3, 3, -1, 1)], steps=3)
    request = request_of(3, prompt, stop_token_ids=(token,))
    plan.admit.append(Admission(request, 3, 3, None, 0))
    plan.prefill.append(chunk_of(3, 3, prompt, 0, 6))
    result = runner.run(plan)
    assert [one.token for one in result.sampled] == [token]
    assert result.drawn is not None and result.drawn.ended == {0: 0}
    assert torch.equal(runner._pool.state["cell"][:, 3], state[:, 3])


def test_a_row_whose_logits_are_not_finite_fails_in_its_round_and_no_other(
    folder: Path, tmp_path: Path
) -> None:
    model, config = load_model(folder, "cpu", "float32")
    with torch.no_grad():
        model.embedding.weight[7] = math.nan  # whoever reads token 7
    save_model(tmp_path, model, config, "float32")
    engine = Engine(load(tmp_path, max_slots=4))
    hot = {"temperature": 1e4, "ignore_eos": True, "max_tokens": 200}  # draws 7 sooner or later
    for id in range(3):
        engine.add("c", request_of(id, [1, 2], seed=id, **hot))
    engine.add("c", request_of(3, [1, 2], stop_token_ids=(7,), **hot))
    ends: dict[int, Finished | Failed] = {}
    tokens: dict[int, list[int]] = {id: [] for id in range(4)}
    while engine.has_work:
        events = engine.step()["c"]
        for id, ids in tokens_of(events).items():
            tokens[id] += ids
        ends |= {end.request: end for end in (*events.finished, *events.failed)}
    for id in range(3):
        end = ends[id]
        assert isinstance(end, Failed) and end.code == "step_failed"
        assert 7 not in tokens[id][:-1]
    last = ends[3]
    assert isinstance(last, Finished) and last.reason in ("stop", "length")


def test_parameters_that_float32_cannot_hold_are_taken_as_the_sampler_takes_them(
    folder: Path,
) -> None:
    runner = load(folder)
    for temperature in (1e-300, 1e300):
        requests = [request_of(1, [4, 5, 6], temperature=temperature, max_tokens=20)]
        runner.most_steps = 1
        expected = serve(runner, requests)
        runner.most_steps = 8
        assert serve(runner, requests) == expected


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e-5, 8), (1.2e-4, 8), (1.3e-4, 4), (4.9e-4, 2), (5.1e-4, 1), (1.0, 1)]
)
def test_short_steps_share_a_graph(seconds: float, steps: int) -> None:
    assert cuda_graphs.steps_of_graph(seconds) == steps


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 8, 11])
def test_a_round_has_the_steps_that_it_is_asked_for(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of graphs of four steps and of one."""
    graphs = cuda_graphs.StepGraphs(lambda size: None, lambda size: None, [2, 3])
    taken: list[tuple[str, int]] = []

    class Graphs:
        def __init__(self, name: str) -> None:
            self.name = name

        def replay(self, size: int) -> None:
            taken.append((self.name, size))

    monkeypatch.setattr(graphs, "_single", Graphs("one"))
    monkeypatch.setattr(graphs, "_several", Graphs("four"))
    monkeypatch.setattr(graphs, "_steps_of", {2: 4})
    graphs.replay(2, steps)
    assert taken == [("four", 2)] * (steps // 4) + [("one", 2)] * (steps % 4)
    taken.clear()
    graphs.replay(3, steps)  # of which none has several
    assert taken == [("one", 3)] * steps


@pytest.mark.gpu
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
        {"logprobs": 4},
        {"logprobs": 0, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
    ],
)
def test_rounds_in_graphs_give_what_eager_rounds_give(folder: Path, asked: dict[str, Any]) -> None:
    """Every batch size, so that every bucket is used, full and padded; two rounds under way."""
    eager = load(folder, device="cuda", cuda_graphs=False)
    graphed = load(folder, device="cuda")
    eager.warm_up()
    graphed.warm_up()
    captured = graphed._batch._graphs
    assert len(captured) == 5 and not eager._batch._graphs
    for kind, graphs in captured.items():
        if not kind.greedy:  # all of its steps are short
            assert set(graphs._steps_of) == set(buckets(SLOTS))
    kind = {"adjusted": "logit_bias" in asked, "top": asked.get("logprobs", -1)}
    for count in range(1, SLOTS + 1):
        prompts = {key: random_prompt(3 + key, key) for key in range(count)}
        sampling = {"temperature": 1.0, "max_tokens": 35 + count}  # ends within a graph of many
        told = []
        for runner in (eager, graphed):
            first = begin(runner, prompts, **sampling, **asked)
            rows = [DecodeRow(key, key, first[key], 1) for key in range(count)]
            plans = [batch_of(rows, steps=21, **kind), more(steps=21, **kind)]
            pending = [runner.start(plan) for plan in plans]
            results = [runner.finish(one) for one in pending]
            pairs = list(zip(plans, results, strict=True))
            tokens = [drawn_by(*pair, range(count)) for pair in pairs]
            reports = [reports_by(result, ids) for result, ids in zip(results, tokens, strict=True)]
            told.append((tokens, reports))
            runner.run(StepPlan(release=list(prompts)))
        assert told[0] == told[1]


def reports_by(result: StepResult, tokens: dict[int, list[int]]) -> list[PackedLogprobs]:
    """Each row's, up to its end."""
    drawn = result.drawn
    assert drawn is not None
    if drawn.reports is None:
        return []
    top = drawn.reports.shape[2] // 2 - 1
    return [drawn.reports_of(row, len(ids), top) for row, ids in enumerate(tokens.values())]


@pytest.mark.gpu
def test_an_engine_on_the_gpu_overlaps_its_rounds(folder: Path) -> None:
    runner = load(folder, device="cuda")
    runner.warm_up()
    engine = Engine(runner)
    engine.add("c", request_of(1, [1, 2, 3], max_tokens=400, ignore_eos=True))
    ahead = 0
    while engine.has_work:
        engine.step()
        ahead += engine._started is not None and engine._started.plan.again
    assert ahead > 3


def test_sampling_params_of_requests_are_plain_or_not() -> None:
    assert is_plain(SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=4), (EOS,))
    assert is_plain(SamplingParams(stop_token_ids=tuple(range(MOST_STOP_IDS - 1))), (EOS,))
    for adjusted in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(logit_bias={1: 0.0}),
        SamplingParams(min_tokens=1),
    ):
        assert is_plain(adjusted, (EOS,)) and is_adjusted(adjusted)
    assert not is_adjusted(SamplingParams(temperature=0.5, top_k=3, logprobs=1))
    for top in (0, MOST_TOP):
        assert is_plain(SamplingParams(logprobs=top), (EOS,))
    for special in (
        SamplingParams(logprobs=MOST_TOP + 1),
        SamplingParams(grammar=Grammar("regex", "a+")),
        SamplingParams(stop_token_ids=tuple(range(MOST_STOP_IDS))),
    ):
        assert not is_plain(special, (EOS,))
    # The device looks for so many, whoever named them; for more the host does.
    usual, many = (EOS, EOS - 1, EOS - 2), tuple(range(MOST_STOP_IDS + 1))
    for ends, ids, plain in (
        (usual, MOST_STOP_IDS - 3, True),
        (usual, MOST_STOP_IDS - 2, False),
        (many[1:], 0, True),
        (many[1:], 1, False),
        (many, 0, False),
        ((), MOST_STOP_IDS, True),
    ):
        asked = SamplingParams(stop_token_ids=tuple(range(ids)))
        assert is_plain(asked, ends) is plain
