"""loadtest.state: its bars, and a run as small as can be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.state import command
from loadtest.state.command import judge

FOUND: dict[str, Any] = {
    "copies": {
        "decode_step": 0.001,
        "times": {"first token after a state": [0.004], "first token, prompt of one": [0.0025]},
    },
    "context": {
        "reading": 0.002,
        "times": {
            "prompt of one token": [0.003], "state": [0.005], "session": [0.006], "cached": [0.01],
        },
    },
    "samples": {"prefill": 1.0, "decode": 0.5, "together": 1.6},
    "sessions": {"sessions": 1000, "memory_at_end_mib": 40.0, "errors": 0},
}  # fmt: skip


def test_a_run_that_keeps_every_bar_passes() -> None:
    verdicts = judge(FOUND)
    assert len(verdicts) == 7 and all(good for *_, good in verdicts)
    assert judge({}) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("copies", "times", "first token after a state"), [0.005]),
        (("context", "times", "state"), [0.0061]),
        (("context", "times", "session"), [0.0061]),
        (("context", "times", "cached"), [0.0101]),
        (("context", "times", "cached"), []),  # not measured is not reached
        (("samples", "together"), 1.61),
        (("sessions", "memory_at_end_mib"), 48.0),
        (("sessions", "errors"), 1),
    ],
)
def test_each_bar_can_be_missed(path: tuple[str, ...], value: Any) -> None:
    found = copy.deepcopy(FOUND)
    place = found
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert sum(not good for *_, good in judge(found)) == 1


@pytest.mark.slow
def test_a_run_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Times are of the moment; here it matters that every part is measured without an error."""
    sizes = ["--context", "200", "--length", "50", "--samples", "3", "--tokens", "4", "--asks", "2"]
    counts = ["--continuations", "3", "--sessions", "70", "--resumes", "20", "--share-slots", "2"]
    assert command.main([*sizes, *counts, "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "70 sessions begun" in printed and "0 errors" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(command.PARTS) <= set(found)
    assert all(len(times) == 2 for times in found["copies"]["times"].values())


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--model", str(tmp_path / "missing")]) == 2
    assert "not measured" in capsys.readouterr().out
