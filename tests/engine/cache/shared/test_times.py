"""What an engine tells of its shared store: what it found there, and how long that took."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache.shared import client
from engine.protocol.events import Stats
from engine.protocol.requests import KeepState
from tests.engine.cache.shared.test_servers import run_turn, turn
from tests.engine.cache.test_named_states import Talk, code, text
from tests.redis_server import free_port


class Told(Talk):
    """Keeps the counts of every round."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stats: list[Stats] = []

    def step(self) -> None:
        for events in self.engine.step().values():
            self.stats.append(events.stats)
            for end in (*events.finished, *events.failed):
                self.ends[end.request] = end

    def found(self) -> dict[str, int]:
        """How often each result was told of since the last call."""
        counts: dict[str, int] = {}
        for stats in self.stats:
            for result, seconds in stats.state_fetches.items():
                assert all(0 <= one < 60 for one in seconds)
                counts[result] = counts.get(result, 0) + len(seconds)
        writes = sum(len(stats.state_writes) for stats in self.stats)
        self.stats.clear()
        return counts | ({"written": writes} if writes else {})


def test_where_states_were_found(url: str) -> None:
    one, other = Told(state_store=url), Told(state_store=url)
    other.runner.outside = one.runner.outside
    turn(one, b"abc")
    assert one.found() == {"new": 1, "written": 1}
    turn(one, b"")
    assert one.found() == {"memory": 1, "written": 1}
    turn(other, b"")
    assert other.found() == {"store": 1, "written": 1}
    turn(one, b"")
    assert one.found() == {"store": 1, "written": 1}
    assert text(one.run(b"", state="s")) and one.found() == {"memory": 1}
    assert text(one.run(b"", state="s", keep=KeepState(id="t")))
    assert one.found() == {"memory": 1, "new": 1, "written": 1}
    assert text(one.run(b"abc")) and one.found() == {}
    for talk in (one, other):
        talk.engine.close()


def test_a_name_that_another_turn_has(url: str) -> None:
    one = Told(state_store=url)
    turn(one, b"abc")
    id = one.submit(b"", 3, state="s", keep=KeepState(id="s"))
    while not one.engine._scheduler._decoding.sequences:
        one.step()
    one.found()
    again = one.submit(b"", 3, state="s", keep=KeepState(id="s"))
    one.finish()
    assert text(one.ends[id]) and code(one.ends[again]) == "state_busy"
    assert one.found() == {"refused": 1, "written": 1}
    one.engine.close()


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.1)
    one = Told(state_store=f"redis://127.0.0.1:{free_port()}/0")
    assert code(run_turn(one, b"abc")) == "state_store_unavailable"
    assert one.found() == {"unavailable": 1}
    one.engine.close()
