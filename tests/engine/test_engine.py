"""The engine with a fake runner: answers, step failures and who is told what."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from typing import Any

import pytest

from engine import engine as engine_module
from engine.engine import Engine
from engine.errors import DeviceLost
from engine.protocol.events import Finished, StepEvents
from engine.protocol.failed import Failed
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import FakeClock, FakeRunner, log_probabilities, recite

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Ends = dict[tuple[Hashable, int], Finished | Failed]


def ask(
    id: int, prompt: bytes = b"abc", sampling: SamplingParams = GREEDY, **fields: bool
) -> Request:
    return Request(id=id, prompt=pack_ids(prompt), sampling=sampling, **fields)


def ends_of(messages: dict[Hashable, StepEvents]) -> Ends:
    return {
        (client, end.request): end
        for client, events in messages.items()
        for end in (*events.finished, *events.failed)
    }


def serve(engine: Engine) -> Ends:
    """Steps until nothing is left."""
    ends: Ends = {}
    for _ in range(1000):
        if not engine.has_work:
            return ends
        ends |= ends_of(engine.step())
    raise AssertionError("the engine does not come to an end")


def test_neighbours_do_not_change_an_answer() -> None:
    engine = Engine(FakeRunner(slots=3))
    prompts = [bytes(range(start, start + 1 + 40 * start)) for start in range(1, 6)]
    for id, prompt in enumerate(prompts):
        engine.add("c", ask(id, prompt, stream=False))
    ends = serve(engine)
    for id, prompt in enumerate(prompts):
        end = ends["c", id]
        assert isinstance(end, Finished) and end.tokens == recite(prompt, 8)


def test_logprobs_and_scores_pass_through() -> None:
    engine = Engine(FakeRunner())
    sampling = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    engine.add("c", ask(0, b"ace", sampling, score=True))
    engine.add("c", ask(1))
    events = engine.step()["c"]
    (scores,) = events.scores
    assert scores.start == 1
    assert [one.logprob for one in scores.reports.unpack()] == [
        log_probabilities(ord("a"))[ord("c")],
        log_probabilities(ord("c"))[ord("e")],
    ]
    first, second = events.in_runs()
    (logprobs,) = first[2]
    assert (first[:2], logprobs.top_ids) == ((0, [ord("f")]), [ord("f")])
    assert logprobs.is_greedy
    assert (second[0], second[2]) == (1, [])


def test_every_client_hears_of_its_own_requests_only() -> None:
    engine = Engine(FakeRunner())
    engine.add("left", ask(0))
    engine.add("right", ask(0, b"xyz"))
    engine.add("right", ask(5, b""))
    messages = engine.step()
    assert (messages["left"].requests, messages["left"].tokens) == ([0], [ord("d")])
    assert messages["right"].tokens == recite(b"xyz", 1) or messages["right"].requests == [0]
    assert [failed.request for failed in messages["right"].failed] == [5]
    assert messages["left"].failed == []
    assert messages["left"].stats == messages["right"].stats
    assert messages["left"].stats.running == 2


def test_a_client_is_told_of_steps_that_bring_it_nothing() -> None:
    engine = Engine(FakeRunner())
    engine.add("c", ask(0, stream=False))
    events = engine.step()["c"]
    assert events.tokens == [] and events.stats.prefill_tokens == 3


def test_a_failing_step_costs_its_sequences_only(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(slots=1)
    engine = Engine(runner)
    engine.add("c", ask(0))
    engine.add("c", ask(1, stream=False))
    engine.step()
    runner.failures = [RuntimeError("out of\nmemory")]
    with caplog.at_level(logging.ERROR):
        failed = ends_of(engine.step())["c", 0]
    assert isinstance(failed, Failed)
    assert failed.code == "step_failed" and failed.message.endswith("RuntimeError: out of")
    assert "a step failed" in caplog.text
    end = serve(engine)["c", 1]
    assert isinstance(end, Finished) and end.tokens == recite(b"abc", 8)
    assert engine.broken is None


def test_a_cuda_error_ends_the_engine() -> None:
    runner = FakeRunner(slots=1)
    engine = Engine(runner)
    for id in range(2):
        engine.add("c", ask(id))
    runner.failures = [DeviceLost("CUDA error: an illegal memory access was encountered")]
    ends = ends_of(engine.step())
    assert [ends["c", id].code for id in range(2)] == ["step_failed", "engine_dead"]  # type: ignore[union-attr]
    assert engine.broken is not None and not engine.has_work
    engine.add("c", ask(2))
    refused = ends_of(engine.step())["c", 2]
    assert isinstance(refused, Failed) and refused.code == "engine_dead"


def test_running_out_of_device_memory_does_not_end_it() -> None:
    runner = FakeRunner(failures=[RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")])
    engine = Engine(runner)
    engine.add("c", ask(0))
    engine.step()
    assert engine.broken is None


def test_messages_taken_in_during_a_step_count_at_once() -> None:
    engine = Engine(FakeRunner())
    engine.add("c", ask(0))
    engine.step()

    def meanwhile() -> None:
        engine.abort("c", [0], "stop")
        engine.add("c", ask(1))

    events = engine.step(meanwhile)["c"]
    assert events.tokens == [] and [end.reason for end in events.finished] == ["stop"]
    assert engine.step()["c"].requests == [1]


def test_messages_taken_in_while_a_round_fails_count_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = FakeRunner(slots=1)
    engine = Engine(runner)
    for id in range(2):
        engine.add("c", ask(id))
    engine.step()
    runner.failures = [RuntimeError("boom")]

    def meanwhile() -> None:
        engine.abort("c", [0, 1], "stop")
        engine.add("c", ask(2, stream=False))

    with caplog.at_level(logging.CRITICAL):
        ends = ends_of(engine.step(meanwhile))
    # Who took part in the round has failed: what its slot holds is good for nothing.
    assert isinstance(ends["c", 0], Failed)
    assert isinstance(ends["c", 1], Finished) and ends["c", 1].reason == "stop"
    end = serve(engine)["c", 2]
    assert isinstance(end, Finished) and end.tokens == recite(b"abc", 8)


def test_timing_adds_up() -> None:
    clock = FakeClock()
    engine = Engine(FakeRunner(slots=1), clock)
    engine.add("c", ask(0, sampling=SamplingParams(temperature=0, max_tokens=3)))
    clock.now += 5
    for _ in range(2):
        engine.step(lambda: setattr(clock, "now", clock.now + 2))
    (end,) = engine.step(lambda: setattr(clock, "now", clock.now + 2))["c"].finished
    assert (end.timing.queue, end.timing.prefill, end.timing.decode) == (5, 2, 4)


def test_rejections_are_reported_once() -> None:
    engine = Engine(FakeRunner())
    engine.add("c", ask(0, b""))
    assert engine.has_work
    assert set(ends_of(engine.step())) == {("c", 0)}
    assert not engine.has_work and engine.step() == {}


def test_the_last_word_tells_that_slots_are_free() -> None:
    """Also where rounds under way write to them when their requests are aborted."""
    engine = Engine(FakeRunner(slots=2, most_steps=4, overlaps=True))
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
    for id in range(2):
        engine.add("c", Request(id=id, prompt=pack_ids([1]), sampling=sampling))
    for _ in range(4):
        engine.step()
    told = engine.step(lambda: engine.abort("c", [0, 1]))
    assert told["c"].stats.slots_used == 0
    while engine.has_work:
        assert engine.step() == {}


def test_messages_are_taken_in_while_a_round_is_awaited() -> None:
    """For as long as that takes, and what comes then is in the plan that follows."""
    runner = FakeRunner(slots=4, most_steps=4, overlaps=True)
    engine = Engine(runner)
    looks, since = 0, 0

    def is_done(pending: Any) -> bool:
        return looks - since > 5

    def take_in() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            engine.add("c", ask(2, b"b"))

    runner.is_done = is_done  # type: ignore[method-assign]
    engine.add("c", ask(1, b"a", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
    engine.step(take_in)
    assert looks == 7, "until it was done, and once after that"
    since = looks
    engine.step(take_in)
    assert 2 in {request.id for request in runner.requests.values()}


def test_a_device_that_hangs_is_awaited_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nobody would notice."""
    monkeypatch.setattr(engine_module, "LOOK_SECONDS", 0.01)
    runner = FakeRunner(most_steps=4, overlaps=True)
    runner.is_done = lambda pending: False  # type: ignore[method-assign, misc]
    engine = Engine(runner)
    engine.add("c", ask(1, b"a"))
    before, looks = time.perf_counter(), 0

    def take_in() -> None:
        nonlocal looks
        looks += 1
        assert time.perf_counter() - before < 60, "it looks for ever"

    engine.step(take_in)
    assert looks >= 2


def test_an_error_met_while_looking_fails_the_round() -> None:
    runner = FakeRunner(most_steps=4, overlaps=True)
    engine = Engine(runner)

    def is_done(pending: Any) -> bool:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    runner.is_done = is_done  # type: ignore[method-assign]
    engine.add("c", ask(1, b"a"))
    assert isinstance(ends_of(engine.step(lambda: None))["c", 1], Failed)
    assert engine.broken
