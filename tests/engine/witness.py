"""Witness: sees everything that an engine with a fake runner does, and checks all that it promises.

The runner holds the very tokens in each state row and fails when a row is not what its sequence
should have read; `StrictRunner` adds budget and chunk ends. The witness adds the events: every
request ends once, with the tokens and scores that `full_answer` and `full_scores` foretell, and in
the end nothing has leaked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import SCAN_CHUNK
from engine.engine import Engine
from engine.protocol.events import Finished, StepEvents
from engine.protocol.failed import Failed
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids, unpack_ids
from engine.step_plan import StepPlan, StepResult
from tests.engine.fake import FakeClock, FakeRunner, log_probabilities

VOCAB, EOS = 8, 7
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class StrictRunner(FakeRunner):
    """Also checks what a plan promises beyond its rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=VOCAB, eos=EOS, **options)
        self._begun: dict[int, int] = {}
        self._seen: list[tuple[Sequence[int], list[int], set[int]]] = []  # prompts, answers, marks
        self.violations: list[AssertionError] = []  # the engine would take them for a bad step

    def _carry_out(self, plan: StepPlan) -> StepResult:
        try:
            return self._checked(plan)
        except AssertionError as violation:
            self.violations.append(violation)
            raise

    def _checked(self, plan: StepPlan) -> StepResult:
        budget, slots = self.config.max_step_tokens, self.config.max_slots
        assert budget is not None
        assert not plan.empty
        assert sum(len(chunk.tokens) for chunk in plan.prefill) <= budget
        assert len(plan.prefill) <= slots and len(self.batch) <= slots
        assert plan.steps == 1 or plan.plain
        # The host does not know yet who has met a stop id in the round before.
        left = max((row.left for row in self.batch), default=0)
        assert not plan.again or plan.decode or plan.steps <= left
        assert len({copy.target for copy in plan.after}) == len(plan.after)
        assert all(0 <= copy.source < slots for copy in plan.after)
        assert all(copy.target >= slots or copy.target < 0 for copy in plan.after)
        for admission in plan.admit:
            assert 0 <= admission.slot < slots
            assert admission.source is None or not 0 <= admission.source < slots
            self._begun[admission.key] = admission.cached_tokens
        result = super()._carry_out(plan)
        for admission in plan.admit:
            if admission.request.no_cache:
                assert admission.cached_tokens == 0 and admission.source is None
                continue  # it leaves nothing, so no other is cut because of it
            prompt, marks = unpack_ids(admission.request.prompt), self._marks(admission.request)
            self._seen.append((prompt, self.answers[admission.key], marks))
        for chunk in plan.prefill:
            self._check_end(self.requests[chunk.key], chunk.key, chunk.start + len(chunk.tokens))
        return result

    def _marks(self, request: Request) -> set[int]:
        """Where its prompt may be cut: at its own points and where it may leave what the prefix
        cache knows, which is of others' texts all that they share, or no more than to a mark; of an
        answer the last token may not have been read."""
        if request.no_cache:
            return set()
        prompt, marks = unpack_ids(request.prompt), set(request.cache_points)
        for text, answer, others in self._seen:
            shared = _common(prompt, [*text, *answer])
            marks |= {shared, min(shared, len(text) + len(answer) - 1)}
            marks |= {mark for mark in others if mark < shared}
        return marks

    def _check_end(self, request: Request, key: int, end: int) -> None:
        marks = self._marks(request)
        # Of the places where it may part from known texts not all are taken.
        anchors = {self._begun[key], *(mark for mark in marks if mark < end)}
        if end == request.prompt_tokens or end in marks:
            return
        budget = self.config.max_step_tokens
        assert budget is not None
        assert budget < SCAN_CHUNK or any((end - anchor) % SCAN_CHUNK == 0 for anchor in anchors)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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


def full_logprobs(request: Request, answer: Sequence[int]) -> list[TokenLogprobs]:
    """Of an answer."""
    top = request.sampling.logprobs
    if top is None:
        return []
    told = []
    for before, token in itertools.pairwise([unpack_ids(request.prompt)[-1], *answer]):
        row = log_probabilities(before, VOCAB, EOS)
        best = sorted(range(VOCAB), key=lambda one: (-row[one], one))
        values = [row[one] for one in best[:top]]
        told.append(TokenLogprobs(row[token], best[:top], values, token == best[0]))
    return told


def full_scores(request: Request) -> list[float]:
    if not request.score:
        return []
    prompt = unpack_ids(request.prompt)
    pairs = list(itertools.pairwise(prompt))[request.score_from - 1 :]
    return [log_probabilities(a, VOCAB, EOS)[b] for a, b in pairs]


class Witness:
    """An engine, everything that was asked of it and everything that it told."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.runner = StrictRunner(**options)
        self.engine = Engine(self.runner, self.clock)
        self.requests: dict[tuple[str, int], Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.scores: dict[tuple[str, int], list[float]] = {}
        self.ends: dict[tuple[str, int], Finished | Failed] = {}
        self.failures = 0
        self.cut: set[tuple[str, int]] = set()  # aborted with the reason "stop"

    def submit(self, client: str, request: Request) -> tuple[str, int]:
        """`request` under an id of its own."""
        id = len(self.requests)
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        request = Request(**(fields | {"id": id}))
        self.requests[client, id] = request
        self.tokens[client, id], self.scores[client, id] = [], []
        self.logprobs[client, id] = []
        self.engine.add(client, request)
        return client, id

    def abort(self, whom: tuple[str, int]) -> None:
        self.engine.abort(whom[0], [whom[1]])

    def step(self, meanwhile: Callable[[], None] | None = None) -> None:
        self.read(self.engine.step(meanwhile))

    def step_with_abort_meanwhile(self, whom: tuple[str, int]) -> None:
        self.cut.add(whom)
        self.step(lambda: self.engine.abort(whom[0], [whom[1]], "stop"))

    def failing_step(self, failures: list[Exception]) -> None:
        """One round of this step fails, if there is one; `failures` is one of the runner's."""
        failures.append(RuntimeError("boom"))
        messages = self.engine.step()
        self.failures += not failures
        failures.clear()
        self.read(messages)

    def read(self, messages: dict[Any, StepEvents]) -> None:
        if self.runner.violations:
            raise self.runner.violations[0]
        for client, events in messages.items():
            assert isinstance(client, str)
            for id, token in zip(events.requests, events.tokens, strict=True):
                assert (client, id) not in self.ends
                self.tokens[client, id].append(token)
                assert self.requests[client, id].sampling.logprobs is None
            for id, tokens, logprobs in events.in_runs():
                assert (client, id) not in self.ends and tokens
                self.logprobs[client, id] += logprobs
                self.tokens[client, id].extend(tokens)
            for run in events.scores:
                told, request = self.scores[client, run.request], self.requests[client, run.request]
                assert run.start == request.score_from + len(told), "runs arrive without gaps"
                told.extend(one.logprob for one in run.reports.unpack())
            for end in (*events.finished, *events.failed):
                assert (client, end.request) not in self.ends, "a second terminal event"
                self.ends[client, end.request] = end
                self.check(self.requests[client, end.request], client, end)

    def check(self, request: Request, client: str, end: Finished | Failed) -> None:
        if isinstance(end, Failed):
            assert end.code in ("queue_full", "share_full", "invalid_request", "step_failed")
            assert end.code != "step_failed" or self.failures or request.id in self.runner.spoiled
            return
        told = self.tokens[client, request.id] or end.tokens
        answer, reason = full_answer(request)
        assert end.completion_tokens == len(told)
        assert end.prompt_tokens == len(unpack_ids(request.prompt))
        assert not (request.no_cache and end.cached_tokens)
        timing = end.timing
        assert min(timing.queue, timing.prefill or 0, timing.decode or 0) >= 0
        assert (timing.decode is not None) == (end.completion_tokens > 0)
        assert timing.prefill is not None or timing.decode is None
        logprobs = self.logprobs[client, request.id] if request.stream else end.logprobs
        assert logprobs == full_logprobs(request, told)
        assert not request.stream or (end.reports is None and not end.tokens)
        scores = self.scores[client, request.id]
        assert told == answer[: len(told)]
        assert scores == full_scores(request)[: len(scores)]
        if end.reason == "length" or (
            end.reason == "stop" and (client, request.id) not in self.cut
        ):
            assert (told, end.reason) == (answer, reason)
            assert scores == full_scores(request)

    def finish(self) -> None:
        """Lets everything come to its end."""
        # Every step reads a token of somebody, so this many steps are enough if nobody starves; the
        # last one may complete a round of which nobody is left.
        left = 1 + sum(
            len(request.prompt) // 4 + request.sampling.max_tokens + 2
            for whom, request in self.requests.items()
            if whom not in self.ends
        )
        for _ in range(left):
            if not self.engine.has_work:
                break
            self.step()
        assert set(self.ends) == set(self.requests), "someone was forgotten"
        assert not self.engine.has_work
        # Nothing leaks: a last request finds every slot free and nothing pending.
        last = len(self.requests)
        self.engine.add("left", Request(id=last, prompt=pack_ids([1]), sampling=ONE_TOKEN))
        stats = self.engine.step()["left"].stats
        assert (stats.slots_used, stats.running, stats.waiting, stats.waiting_tokens) == (0,) * 4
        assert len(self.runner.requests) == 1, "every sequence was released"
