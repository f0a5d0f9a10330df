"""Whatever arrives, leaves, fails or expires in whatever order: the scheduler's promises, whether
rounds take one step or many and whether or not they overlap (tests.engine.witness)."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import successor
from tests.engine.witness import EOS, VOCAB, Witness, full_answer

CLIENTS = ("left", "right")
# Prompts are prefixes of three texts, so that many of them begin alike.
TEXTS = [[(i * step + i // 5) % VOCAB for i in range(700)] for step in (1, 3)]
SHARED = (2, 5, 300)  # the lengths that most of them share


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Injected failures log a traceback each."""
    caplog.set_level(logging.CRITICAL, logger="engine.engine")


@st.composite
def requests(draw: st.DrawFn) -> Request:
    text = draw(st.sampled_from(TEXTS))
    length = draw(st.one_of(st.integers(1, 8), st.integers(301, 310), st.integers(1, 700)))
    limit = draw(st.sampled_from([0, 1, 2, 3, 6, 20]))
    max_tokens = draw(st.integers(0, limit))
    shared = [mark for mark in SHARED if mark <= length] or [1]
    marks = st.one_of(st.sampled_from(shared), st.integers(1, length))
    return Request(
        id=0,
        prompt=pack_ids(text[:length]),
        sampling=SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            min_tokens=draw(st.one_of(st.just(0), st.integers(0, max_tokens))),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        ),
        stream=draw(st.booleans()),
        score=draw(st.booleans()),
        score_from=draw(marks),
        cache_points=tuple(draw(st.lists(marks, max_size=2))),
        no_cache=draw(st.sampled_from([False, False, True])),
        owner=draw(st.sampled_from(["", "a", "b"])),
        priority=draw(st.integers(-1, 1)),
        timeout=draw(st.one_of(st.none(), st.none(), st.integers(1, 5))),
    )


class Serving(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and time."""

    sent = Bundle("sent")

    @initialize(
        slots=st.integers(1, 4),
        share_slots=st.integers(0, 3),
        max_step_tokens=st.sampled_from([1, 50, 128, 200, 256, 700]),
        max_waiting=st.integers(0, 8),
        most_steps=st.sampled_from([1, 2, 5, 32]),
        overlaps=st.booleans(),
    )
    def start(self, **options: int) -> None:
        self.witness = Witness(**options)

    @rule(target=sent, client=st.sampled_from(CLIENTS), request=requests())
    def submit(self, client: str, request: Request) -> tuple[str, int]:
        return self.witness.submit(client, request)

    @rule(request=requests())
    def submit_nonsense(self, request: Request) -> None:
        self.witness.submit("left", Request(id=0, prompt=request.prompt + pack_ids([VOCAB])))

    @rule(whom=sent)
    def abort(self, whom: tuple[str, int]) -> None:
        self.witness.abort(whom)

    @rule(whom=sent)
    def step_with_abort_meanwhile(self, whom: tuple[str, int]) -> None:
        self.witness.step_with_abort_meanwhile(whom)
        assert whom in self.witness.ends

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.witness.step()

    @rule()
    def failing_step(self) -> None:
        self.witness.failing_step(self.witness.runner.failures)

    @rule()
    def step_that_cannot_start(self) -> None:
        self.witness.failing_step(self.witness.runner.start_failures)

    @rule(whom=sent)
    def spoil(self, whom: tuple[str, int]) -> None:
        self.witness.runner.spoiled.add(whom[1])

    @rule()
    def time_passes(self) -> None:
        self.witness.clock.now += 2

    @invariant()
    def work_is_known(self) -> None:
        if hasattr(self, "witness"):
            told = set(self.witness.ends) == set(self.witness.requests)
            assert self.witness.engine.has_work or told

    def teardown(self) -> None:
        if hasattr(self, "witness"):
            self.witness.finish()


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
