"""Overload, idle connections and latency: what the scripts make of figures, and a short run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from loadtest import idle, latency, overload

RUN: dict[str, Any] = {
    "tokens_per_second": 100.0,
    "latency_ms": {"e2e": {"p50": 10.0}, "refusal": {"p99": 20.0}},
    "outcomes": {"ok": 5, "429 queue_full": 9},
}
FOUND: dict[str, Any] = {
    "peak": RUN, "normal": RUN, "overload": RUN, "after": RUN, "growth": 1.0, "idle": 0.1,
}  # fmt: skip


def test_an_overload_that_keeps_every_bar_passes() -> None:
    assert all(good for *_, good in overload.judge(FOUND))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("overload", "latency_ms", "refusal", "p99"), 51.0),
        (("overload", "latency_ms", "refusal", "p99"), float("nan")),  # nothing was refused
        (("overload", "outcomes"), {"ok": 5, "timeout": 1}),
        (("overload", "tokens_per_second"), 94.0),
        (("growth",), 100.0),
        (("idle",), None),
        (("after", "latency_ms", "e2e", "p50"), 13.0),
    ],
)
def test_each_bar_of_an_overload_can_be_missed(path: tuple[str, ...], value: Any) -> None:
    found = copy.deepcopy(FOUND)
    for name in ("peak", "normal", "overload", "after"):
        found[name] = copy.deepcopy(RUN)
    place = found
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert sum(not good for *_, good in overload.judge(found)) == 1


@pytest.mark.slow
def test_an_overload_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of a moment; here it matters that all requests end and that some are refused."""
    options = ["--seconds", "2", "--probe", "1", "--slots", "4", "--waiting", "2"]
    assert overload.main([*options, "--output-length", "8", "--times", "8"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    neither = next(row for row in rows if "neither answered nor refused" in row)
    assert "pass" in neither
    assert "429" in next(row for row in rows if row.startswith("│ overload"))


@pytest.mark.slow
def test_idle_connections_hold_nobody_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert idle.main(["--connections", "60", "--asks", "3"]) in (0, 1)  # a time, whatever it is
    assert "60 connections" in capsys.readouterr().out


def test_more_files_than_allowed_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert idle.main(["--connections", str(2**40)]) == 2
    assert "files are needed" in capsys.readouterr().out


def test_a_round_is_what_the_engine_spent_on_it() -> None:
    prefill, decode = (f'phase="{phase}"' for phase in ("prefill", "decode"))
    before = {"engine_step_seconds_sum" + decode: 1.0, "engine_step_seconds_count" + decode: 10.0}
    after = {
        "engine_step_seconds_sum" + decode: 3.0,
        "engine_step_seconds_count" + decode: 110.0,
        "engine_step_seconds_sum" + prefill: 2.0,
        "request_prefill_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_count": 10.0,
    }
    engine = latency.times(before, after)
    assert engine == {"round": pytest.approx(0.04), "prefill": pytest.approx(0.05)}
    summary = {"latency_ms": {"itl": {"p99": 1.0}, "ttft": {"p99": 2.0}}}
    assert [bar for _, _, bar in latency.judge(summary, engine)] == [
        pytest.approx(125), pytest.approx(260),
    ]  # fmt: skip
