"""loadtest.store: its parts, and a run as small as can be on a folder."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections import Counter
from pathlib import Path

import pytest

from loadtest.store import command
from loadtest.store.compression import compressed
from loadtest.store.fetches import Told, quantile
from loadtest.store.turns import Answer, body_of

ANSWER = Answer("abc", (-1.0, -0.5), 7, True)


def test_a_turn_is_the_same_whoever_is_asked() -> None:
    one, other = (json.loads(body_of(3, 2, id, True)) for id in ("w3", "random3"))
    assert (one.pop("session_id"), other.pop("session_id")) == ("w3", "random3")
    assert one == other and one["turn"] == 2
    assert "turn" not in json.loads(body_of(3, 2, "w3", False))
    others = {json.loads(body_of(*at, "x", False))["prompt"] for at in ((3, 1), (3, 2), (4, 2))}
    assert len(others) == 3


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Answer("abc", (-1.0, -0.5), 7, None), True),  # the witness has no store
        (Answer("abd", (-1.0, -0.5), 7, True), False),
        (Answer("abc", (-1.0, -0.5000001), 7, True), False),
        (Answer("abc", (-1.0, -0.5), 14, True), False),
    ],
)
def test_answers_are_equal_bit_for_bit(other: Answer, same: bool) -> None:
    assert ANSWER.equals(other) is same


def test_an_answer_is_read_from_a_completion() -> None:
    choice = {
        "text": "abc",
        "logprobs": {"token_logprobs": [-1.0, -0.5]},
        "state": {"tokens": 7, "stored": True},
    }
    assert Answer.of({"choices": [choice]}) == ANSWER
    with pytest.raises(LookupError):
        Answer.of({"choices": [{"text": "abc"}]})


def test_quantiles_are_interpolated() -> None:
    buckets = Counter({0.1: 50, 0.2: 90, math.inf: 100})
    assert quantile(buckets, 0.25) == pytest.approx(0.05)
    assert quantile(buckets, 0.7) == pytest.approx(0.15)
    assert quantile(buckets, 0.99) == 0.2  # it is beyond the last bound
    assert math.isnan(quantile(Counter(), 0.5))
    assert math.isnan(quantile(Counter({0.1: 0, math.inf: 0}), 0.5))


def test_what_came_in_between() -> None:
    before = Told({"memory": Counter({math.inf: 3}), "store": Counter({math.inf: 1})})
    after = Told({"memory": Counter({math.inf: 6}), "store": Counter({math.inf: 2})})
    between = after.since(before)
    assert between.fetches == {"memory": Counter({math.inf: 3}), "store": Counter({math.inf: 1})}
    assert between.share("memory") == 0.75


def test_compression_is_compared_with_what_it_saves() -> None:
    state = bytes(range(256)) * 40
    found = {one.name: one for one in compressed([state, state])}
    assert found["zlib 6"].share == pytest.approx(len(zlib.compress(state, 6)) / len(state))
    assert all(one.break_even > 0 and one.compress > 0 for one in found.values())


def test_a_server_that_fails_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the server did not become ready")

    monkeypatch.setattr(command, "_witnessed", refuse)
    assert command.main([]) == 2
    assert "not measured: the server did not become ready" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "folder"])
def test_a_run_end_to_end(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = ["--servers", "2", "--sessions", "6", "--turns", "3", "--json", str(file)]
    if kind == "folder":
        given += ["--state-store", f"file://{tmp_path}/states", "--model", "300kb"]
    else:
        from tests import redis_server

        if redis_server.MISSING:
            pytest.skip(redis_server.MISSING)
    assert command.main(given) == 0
    found = json.loads(file.read_text())
    for placement in ("random", "affinity"):
        one = found["placements"][placement]
        assert (one["turns"], one["failed"], one["different"]) == (18, [], [])
    assert all(value > 20_000 for value in found["stored"].values())
    assert "affinity: 0 turns failed, 0 texts differ" in capsys.readouterr().out


def test_the_witness_must_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadtest.store import turns

    async def refused(self: object, *_: object) -> tuple[int, object]:
        return 503, {"error": {}}

    monkeypatch.setattr(turns.Line, "ask", refused)
    with pytest.raises(ExceptionGroup) as errors:
        asyncio.run(turns.witness("http://127.0.0.1:1", 1, 1, 1))
    assert errors.group_contains(RuntimeError, match="503")
