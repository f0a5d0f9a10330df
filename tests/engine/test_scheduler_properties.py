"""Whatever arrives, leaves, fails or expires in whatever order: the scheduler's promises.

A fake runner holds the very tokens in each state row and fails when a row is not what its
sequence should have read. The machine adds the rest: budget, chunk ends, events and leaks.
"""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from engine.config import SCAN_CHUNK
from engine.engine import Engine
from engine.messages import (
    Failed,
    Finished,
    Request,
    SamplingParams,
    StepEvents,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from engine.plan import Plan, StepResult
from tests.engine.fake import FakeClock, FakeRunner, log_probabilities, successor

VOCAB, EOS = 8, 7
CLIENTS = ("left", "right")
# Prompts are prefixes of three texts, so that many of them begin alike.
TEXTS = [[(i * step + i // 5) % VOCAB for i in range(700)] for step in (1, 3)]
SHARED = (2, 5, 300)  # the lengths that most of them share


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Injected failures log a traceback each."""
    caplog.set_level(logging.CRITICAL, logger="engine.engine")


class StrictRunner(FakeRunner):
    """Also checks what a plan promises beyond its rows."""

    def __init__(self, **options: int) -> None:
        super().__init__(vocab_size=VOCAB, eos=EOS, **options)
        self._begun: dict[int, int] = {}
        self.violations: list[AssertionError] = []  # the engine would take them for a bad step

    def run(self, plan: Plan) -> StepResult:
        try:
            return self._run(plan)
        except AssertionError as violation:
            self.violations.append(violation)
            raise

    def _run(self, plan: Plan) -> StepResult:
        budget, slots = self.config.max_step_tokens, self.config.max_slots
        assert budget is not None
        assert not plan.empty
        assert sum(len(chunk.tokens) for chunk in plan.prefill) <= budget
        assert len(plan.prefill) + len(plan.decode) <= slots
        assert len({copy.target for copy in plan.after}) == len(plan.after)
        assert all(copy.target >= slots > copy.source for copy in plan.after)
        for admission in plan.admit:
            assert 0 <= admission.slot < slots
            assert admission.source is None or admission.source >= slots
            self._begun[admission.key] = admission.cached_tokens
        result = super().run(plan)
        for chunk in plan.prefill:
            self._check_end(self.requests[chunk.key], chunk.key, chunk.start + len(chunk.tokens))
        return result

    def _check_end(self, request: Request, key: int, end: int) -> None:
        length = len(unpack_ids(request.prompt))
        anchor = max([self._begun[key], *(mark for mark in request.share_at if mark < end)])
        if end == length or end in request.share_at:
            return
        budget = self.config.max_step_tokens
        assert budget is not None
        assert budget < SCAN_CHUNK or (end - anchor) % SCAN_CHUNK == 0


def full_answer(request: Request) -> tuple[list[int], str]:
    """What greedy decoding gives when nothing interrupts it."""
    params, tokens = request.sampling, list(unpack_ids(request.prompt))
    answer: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while len(answer) < params.max_tokens:
        row = log_probabilities((tokens + answer)[-1], VOCAB, EOS)
        banned = stops if len(answer) < params.min_tokens else set()
        token = min(set(range(VOCAB)) - banned, key=lambda one: (-row[one], one))
        if token in stops:
            return answer, "stop"
        answer.append(token)
    return answer, "length"


def full_scores(request: Request) -> list[float]:
    if not request.score:
        return []
    prompt = unpack_ids(request.prompt)
    pairs = list(itertools.pairwise(prompt))[request.score_from - 1 :]
    return [log_probabilities(a, VOCAB, EOS)[b] for a, b in pairs]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    text = draw(st.sampled_from(TEXTS))
    length = draw(st.one_of(st.integers(1, 8), st.integers(301, 310), st.integers(1, 700)))
    limit = draw(st.integers(0, 6))
    max_tokens = draw(st.integers(0, limit))
    shared = [mark for mark in SHARED if mark <= length] or [1]
    marks = st.one_of(st.sampled_from(shared), st.integers(1, length))
    return Request(
        id=0,
        prompt=pack_ids(text[:length]),
        sampling=SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        ),
        stream=draw(st.booleans()),
        score=draw(st.booleans()),
        score_from=draw(marks),
        share_at=tuple(draw(st.lists(marks, max_size=2))),
        timeout=draw(st.one_of(st.none(), st.none(), st.integers(1, 5))),
    )


class Serving(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and time; the model of what is to come is `full_answer`."""

    sent = Bundle("sent")

    @initialize(
        slots=st.integers(1, 4),
        share_slots=st.integers(0, 3),
        max_step_tokens=st.sampled_from([1, 50, 128, 200, 256, 700]),
        max_waiting=st.integers(0, 8),
    )
    def start(self, **options: int) -> None:
        self.clock = FakeClock()
        self.runner = StrictRunner(**options)
        self.engine = Engine(self.runner, self.clock)
        self.requests: dict[tuple[str, int], Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.scores: dict[tuple[str, int], list[float]] = {}
        self.ends: dict[tuple[str, int], Finished | Failed] = {}
        self.failures = 0
        self.cut: set[tuple[str, int]] = set()  # aborted with the reason "stop"

    @rule(target=sent, client=st.sampled_from(CLIENTS), request=requests())
    def submit(self, client: str, request: Request) -> tuple[str, int]:
        id = len(self.requests)
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        request = Request(**(fields | {"id": id}))
        self.requests[client, id] = request
        self.tokens[client, id], self.scores[client, id] = [], []
        self.engine.add(client, request)
        return client, id

    @rule(request=requests())
    def submit_nonsense(self, request: Request) -> None:
        id = len(self.requests)
        bad = Request(id=id, prompt=request.prompt + pack_ids([VOCAB]))
        self.requests["left", id] = bad
        self.tokens["left", id], self.scores["left", id] = [], []
        self.engine.add("left", bad)

    @rule(whom=sent)
    def abort(self, whom: tuple[str, int]) -> None:
        self.engine.abort(whom[0], [whom[1]])

    @rule(whom=sent)
    def step_with_abort_meanwhile(self, whom: tuple[str, int]) -> None:
        self.cut.add(whom)
        self._read(self.engine.step(lambda: self.engine.abort(whom[0], [whom[1]], "stop")))
        assert whom in self.ends

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._read(self.engine.step())

    @rule()
    def failing_step(self) -> None:
        self.runner.failures = [RuntimeError("boom")]
        messages = self.engine.step()
        self.failures += not self.runner.failures
        self.runner.failures = []
        self._read(messages)

    @rule(whom=sent)
    def spoil(self, whom: tuple[str, int]) -> None:
        self.runner.spoiled.add(whom[1])

    @rule()
    def time_passes(self) -> None:
        self.clock.now += 2

    @invariant()
    def work_is_known(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.has_work or set(self.ends) == set(self.requests)

    def _read(self, messages: dict[object, StepEvents]) -> None:
        if self.runner.violations:
            raise self.runner.violations[0]
        for client, events in messages.items():
            assert isinstance(client, str)
            for id, token in zip(events.requests, events.tokens, strict=True):
                assert (client, id) not in self.ends
                self.tokens[client, id].append(token)
            for run in events.scores:
                told, request = self.scores[client, run.request], self.requests[client, run.request]
                assert run.start == request.score_from + len(told), "runs arrive without gaps"
                told.extend(report.logprob for report in run.tokens)
                assert all(isinstance(report, TokenLogprobs) for report in run.tokens)
            for end in (*events.finished, *events.failed):
                assert (client, end.request) not in self.ends, "a second terminal event"
                self.ends[client, end.request] = end
                self._check(self.requests[client, end.request], client, end)

    def _check(self, request: Request, client: str, end: Finished | Failed) -> None:
        if isinstance(end, Failed):
            assert end.code in ("queue_full", "invalid_request", "step_failed")
            assert end.code != "step_failed" or self.failures or request.id in self.runner.spoiled
            return
        told = self.tokens[client, request.id] or end.tokens
        answer, reason = full_answer(request)
        assert end.completion_tokens == len(told)
        assert end.prompt_tokens == len(unpack_ids(request.prompt))
        assert min(end.timing.queue, end.timing.prefill, end.timing.decode) >= 0
        scores = self.scores[client, request.id]
        assert told == answer[: len(told)]
        assert scores == full_scores(request)[: len(scores)]
        if end.reason == "length" or (
            end.reason == "stop" and (client, request.id) not in self.cut
        ):
            assert (told, end.reason) == (answer, reason)
            assert scores == full_scores(request)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Every step reads a token of somebody, so this many steps are enough if nobody starves.
        left = sum(
            len(request.prompt) // 4 + request.sampling.max_tokens + 2
            for whom, request in self.requests.items()
            if whom not in self.ends
        )
        for _ in range(left):
            if not self.engine.has_work:
                break
            self._read(self.engine.step())
        assert set(self.ends) == set(self.requests), "someone was forgotten"
        assert not self.engine.has_work
        # Nothing leaks: a last request finds every slot free and nothing pending.
        last = len(self.requests)
        self.engine.add("left", Request(id=last, prompt=pack_ids([1]), sampling=ONE_TOKEN))
        stats = self.engine.step()["left"].stats
        assert (stats.slots_used, stats.running, stats.waiting, stats.waiting_tokens) == (0,) * 4
        assert len(self.runner.requests) == 1, "every sequence was released"


ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

Serving.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True
)
TestServing = Serving.TestCase


def test_the_reference_can_stop_and_go_on() -> None:
    """The model of the answer above is itself right in the plain cases."""
    assert successor(EOS - 1, VOCAB, EOS) == EOS
    plain = Request(id=0, prompt=pack_ids([4]), sampling=SamplingParams(max_tokens=9))
    assert full_answer(plain) == ([5, 6], "stop")
    longer = Request(
        id=0, prompt=pack_ids([4]), sampling=SamplingParams(max_tokens=5, ignore_eos=True)
    )
    assert full_answer(longer) == ([5, 6, 7, 0, 1], "length")
