"""loadtest.share: its bars, and a short run over a real server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.runner.model_runner import ModelRunner
from loadtest import lm_driving, share

SUMMARY: dict[str, Any] = {"tokens_per_second": 90.0, "latency_ms": {"ttft": {"p50": 200.0}}}


def results(stream: bool, peer: float | None, **changed: Any) -> list[str]:
    rows = share.checks(
        argparse.Namespace(stream=stream), SUMMARY | changed, engine=100.0, peer=peer
    )
    return [result for *_, result in rows]


def test_plain_batches_are_set_against_the_engine() -> None:
    assert results(stream=False, peer=None) == ["pass"]
    assert results(stream=False, peer=None, tokens_per_second=84.0) == ["short"]


def test_streams_are_set_against_the_peer() -> None:
    assert results(stream=True, peer=None) == []
    assert results(stream=True, peer=180.0) == ["pass", "pass"]
    assert results(stream=True, peer=190.0) == ["short", "pass"]
    slow = {"ttft": {"p50": 211.0}}
    assert results(stream=True, peer=180.0, latency_ms=slow) == ["pass", "short"]


@pytest.mark.slow
def test_a_short_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loaded: list[EngineConfig] = []

    def load(config: EngineConfig, batches: Sequence[int]) -> ModelRunner:
        loaded.append(config)
        return lm_driving.load(config, batches)

    monkeypatch.setattr(share, "load", load)
    options = ["--model", "6.3m", "--device", "cpu", "--threads", "1", "--seconds", "1"]
    small = ["--slots", "4", "--batch", "2", "--prompt-length", "4", "--output-length", "8"]
    assert share.main([*options, *small]) == 0
    printed = capsys.readouterr().out
    assert "engine alone" in printed and "of the engine's tokens/s" in printed
    # Prompts of one token are often the same, and all of them are to be read by the engine alone.
    (alone,) = loaded
    assert (alone.share_slots, alone.host_state_bytes) == (0, 0)
