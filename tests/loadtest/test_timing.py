"""Timing: outputs are checked, graphs are replayed and not only captured, buffers rotate."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loadtest import timing
from loadtest.timing import WrongOutputError, check_finite, graph_seconds_per_call

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeGraph:
    """A CUDA graph whose replay runs a given function."""

    replays = 0
    on_replay: Callable[[], None] = staticmethod(lambda: None)

    def replay(self) -> None:
        FakeGraph.replays += 1
        FakeGraph.on_replay()


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeGraph.replays

    def elapsed_time(self, end: FakeEvent) -> float:
        return 6.0 * (end.at - self.at)  # milliseconds: six a replay


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def capture(graph: FakeGraph, **options: Any) -> Iterator[None]:
        yield

    FakeGraph.replays = 0
    for name, fake in {
        "CUDAGraph": FakeGraph,
        "graph": capture,
        "Event": FakeEvent,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: "the stream before",
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    yield
    FakeGraph.on_replay = staticmethod(lambda: None)


def test_a_graph_divides_its_time_by_its_launches(fake_cuda: None) -> None:
    outputs = [torch.ones(3), torch.ones(2, 4).T]
    FakeGraph.on_replay = lambda: [output.fill_(1) for output in outputs]
    launched: list[int] = []

    def call(index: int) -> torch.Tensor:
        launched.append(index)
        return outputs[index]

    calls = [lambda: call(0), lambda: call(1)]
    found = graph_seconds_per_call(calls, CUDA, launches=6, repeat=20)
    assert found.method == "graph" and found.runs == 20
    assert found.seconds == pytest.approx(0.001)  # six milliseconds a replay, six launches
    assert launched[-6:] == [0, 1, 0, 1, 0, 1]


def test_a_graph_that_leaves_its_output_unwritten_is_refused(fake_cuda: None) -> None:
    output = torch.ones(3)
    with pytest.raises(WrongOutputError):
        graph_seconds_per_call([lambda: output], CUDA)


def test_what_cannot_be_captured_is_timed_by_events(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refused(graph: FakeGraph, **options: Any) -> Iterator[None]:
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    mended: list[object] = []
    monkeypatch.setattr(torch.cuda, "graph", refused)
    monkeypatch.setattr(timing, "_mend_after_capture", mended.append)
    found = graph_seconds_per_call([lambda: torch.ones(3)], CUDA, repeat=5)
    assert (found.method, found.runs) == ("events", 5)
    assert mended == ["the stream before"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_number_is_found(bad: float, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 5, 7, dtype=dtype)
    check_finite((x, [x.transpose(1, 2)], None))
    x[2, 4, 6] = bad
    for result in (x, x.transpose(1, 2), (torch.ones(2), x)):
        with pytest.raises(WrongOutputError):
            check_finite(result)


def test_on_the_cpu_memory_left_unwritten_is_found() -> None:
    def call() -> torch.Tensor:
        out = torch.ones(4).new_empty(4)
        out[:3] = 1
        return out

    with pytest.raises(WrongOutputError):
        graph_seconds_per_call([call], CPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_slow_call_is_run_less_often() -> None:
    calls = 0

    def call() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.ones(1)

    found = graph_seconds_per_call([call], CPU, budget=0.0)
    assert (found.runs, calls) == (1, 2)  # one for the check, one timed
    assert graph_seconds_per_call([call], CPU).runs == 20


def test_rotation_exceeds_the_cache_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "last_level_cache", lambda: 1000)
    monkeypatch.setattr(timing, "available_memory", lambda device: 10**6)
    assert timing.rotation(300, CPU) == 14  # 4,200 bytes: four times the cache
    assert timing.rotation(5000, CPU) == 1
    assert timing.rotation(1, CPU, most=50) == 50
    monkeypatch.setattr(timing, "available_memory", lambda device: 1200)
    assert timing.rotation(300, CPU) == 2
    monkeypatch.setattr(timing, "available_memory", lambda device: 0)
    assert timing.rotation(300, CPU) == 1


def test_a_restart_keeps_its_arguments_and_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append((path, argv)))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert not timing.keeps_freed_memory()
    timing.restart_keeping_memory()
    assert started == [(sys.executable, sys.orig_argv)]
    assert os.environ["GLIBC_TUNABLES"].startswith("glibc.malloc.arena_max=1:glibc.malloc.mmap_max")
    assert timing.keeps_freed_memory()
    timing.restart_keeping_memory()
    assert len(started) == 1
