"""EngineLoop: who is told what, with several clients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path

import pytest

from engine import loop as loop_module
from engine.engine import Engine
from engine.loop import EngineLoop, Undecodable
from engine.protocol.events import FromEngine, Stats, StepEvents
from engine.protocol.requests import Gone, KeepState, Ping, Request, Shutdown, ToEngine
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateCall, StateReply
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import FakeRunner


class Script:
    """A mailbox: one batch of messages per look, and a Shutdown when there are none left and the
    loop would wait; what each client was sent."""

    def __init__(self, *batches: list[tuple[Hashable, ToEngine]]) -> None:
        self.batches = list(batches)
        self.sent: dict[Hashable, list[FromEngine]] = {}

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine | Undecodable]]:
        if self.batches:
            return self.batches.pop(0)
        return [("a", Shutdown())] if timeout else []

    def send(self, client: Hashable, message: FromEngine) -> None:
        self.sent.setdefault(client, []).append(message)

    def events(self, client: Hashable) -> list[StepEvents]:
        return [one for one in self.sent[client] if isinstance(one, StepEvents)]


GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def ask(id: int, tokens: int) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(id=id, prompt=pack_ids(b"abc"), sampling=sampling)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_who_has_nothing_in_flight_is_told_the_load(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then while others run; when they are done, in any case."""
    monkeypatch.setattr(loop_module, "LOAD_SECONDS", seconds)
    script = Script(
        [("a", Ping(0)), ("b", Ping(0))],
        [("a", ask(id, 20)) for id in range(3)],
        [],
        [("b", ask(0, 2))],
    )
    EngineLoop(Engine(FakeRunner(slots=2)), script).run()
    heard = script.events("b")
    (end,) = [i for i, one in enumerate(heard) if one.finished]
    before, after = [one.stats for one in heard[:end]], [one.stats for one in heard[end + 1 :]]
    loads = [stats for stats in before if stats == stats.load()]  # while it had nothing in flight
    assert any((stats.running, stats.waiting) == (2, 1) for stats in loads) == (seconds == 0)
    assert all(stats == stats.load() for stats in after), "the round's figures are not its own"
    assert [stats.running for stats in after[:-1]] == [1] * len(after[:-1])
    assert bool(after[:-1]) == (seconds == 0)
    assert (after[-1].running, after[-1].waiting) == (0, 0)
    assert sum(len(one.requests) for one in script.events("a")) == 60


def test_one_client_alone_gets_one_message_per_step() -> None:
    script = Script([("a", Ping(0))], [("a", ask(0, 20))])
    runner = FakeRunner()
    EngineLoop(Engine(runner), script).run()
    assert len(script.events("a")) - 1 == runner.steps == 20  # the first one greets


def test_the_load_is_without_the_round() -> None:
    stats = Stats(running=1, waiting=2, waiting_tokens=3, pace=0.5, slots_used=4, slots_total=5)
    assert stats.load() == stats
    assert Stats(batch_size=1, prefill_tokens=2, decode_tokens=3, decode_steps=1).load() == Stats()


def test_what_a_step_did_is_told_once() -> None:
    """So that the sums of several processes are right."""
    script = Script([("a", Ping(0)), ("b", Ping(0))], [("a", ask(0, 20)), ("b", ask(0, 20))])
    runner = FakeRunner()
    EngineLoop(Engine(runner), script).run()
    heard = [one.stats for client in "ab" for one in script.events(client)]
    assert sum(stats.decode_tokens for stats in heard) == 40
    assert sum(stats.prefill_tokens for stats in heard) == 6
    assert sum(stats.batch_size > 0 for stats in heard) == runner.steps
    assert {stats.slots_total for stats in heard} == {8}  # the load is told to both


@pytest.mark.parametrize("told_by", ["itself", "another"])
def test_a_client_that_is_gone_holds_nothing(told_by: str) -> None:
    """Its requests end, it is told nothing more, and what it sent before is too late."""
    gone = (b"b", Gone()) if told_by == "itself" else (b"a", Gone("b"))
    script = Script(
        [(b"a", Ping(0)), (b"b", Ping(0))],
        [(b"a", ask(0, 20)), (b"b", ask(0, 5000)), (b"b", ask(1, 5000))],
        [],
        [gone, (b"b", ask(2, 5000))],
    )
    runner = FakeRunner(slots=2)
    EngineLoop(Engine(runner), script).run()
    assert runner.steps <= 22
    assert sum(len(one.requests) for one in script.events(b"a")) == 20
    assert len(script.events(b"b")) <= 3
    assert script.events(b"a")[-1].stats.waiting == 0


class Ending(Script):
    """When the first answer is there, a fork of its state is asked for, and the end."""

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine | Undecodable]]:
        if self.batches:
            return self.batches.pop(0)
        if not any(events.finished for events in self.events("a")):
            return []
        return [("a", StateCall(call=1, action="fork", id="s", target="t")), ("a", Shutdown())]


def test_a_call_whose_state_is_written_at_the_end_is_answered(tmp_path: Path) -> None:
    keep = Request(id=0, prompt=pack_ids(b"abc"), keep=KeepState(id="s"), sampling=GREEDY)
    script = Ending([("a", Ping(0))], [("a", keep)])
    EngineLoop(Engine(FakeRunner(host_rows=4, state_folder=str(tmp_path))), script).run()
    (reply,) = [one for one in script.sent["a"] if isinstance(one, StateReply)]
    assert reply.failed is None and reply.states[0].stored is True


def test_the_others_hear_what_a_client_that_is_gone_leaves() -> None:
    """Also those who have nothing in flight, and where nobody has any more."""
    script = Script(
        [(b"a", Ping(0)), (b"b", Ping(0))], [(b"b", ask(0, 5000))], [], [(b"a", Gone("b"))], []
    )
    EngineLoop(Engine(FakeRunner()), script).run()
    assert script.events(b"a")[-1].stats.running == 0


def test_a_quiet_client_hears_of_its_own_alone() -> None:
    script = Script([("a", Ping(0)), ("b", Ping(0, quiet=True))], [("a", ask(0, 20))])
    runner = FakeRunner()
    EngineLoop(Engine(runner), script).run()
    assert len(script.events("a")) - 1 == runner.steps == 20  # the first one greets
    assert len(script.events("b")) == 1  # which greets it


def test_who_comes_late_is_told_the_load_of_an_idle_engine() -> None:
    script = Script([("a", Ping(0))], [("a", ask(0, 3))], [], [], [], [("b", Ping(0))])
    EngineLoop(Engine(FakeRunner()), script).run()
    (heard,) = script.events("b")
    assert heard.stats == heard.stats.load()
    assert (heard.stats.slots_total, heard.stats.running) == (8, 0)
