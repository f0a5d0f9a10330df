"""A state folder of an older version, which placed states by remainder; see its README.txt."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.placement import engine_of_state
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateCall
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner

FOLDER = Path(__file__).parent / "placed_by_remainder"
STATES: list[dict[str, Any]] = json.loads((FOLDER / "states.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = shutil.copytree(FOLDER / "states", tmp_path / "states")
    for path in copy.rglob("*"):
        os.utime(path)  # a state's age is that of its file
    return copy


def start(folder: Path, engines: int) -> list[Engine]:
    return [
        Engine(
            ModelRunner(
                EngineConfig(
                    model=str(FOLDER / "model"),
                    device="cpu",
                    dtype="float32",
                    threads=1,
                    max_slots=2,
                    share_slots=4,
                    state_folder=str(folder),
                    engines=engines,
                    rank=rank,
                )
            )
        )
        for rank in range(engines)
    ]


def listed(engine: Engine, owner: str) -> set[str]:
    engine.ask("c", StateCall(call=1, action="list", owner=owner))
    while not (replies := engine.replies()):
        engine.step()
    ((_, reply),) = replies
    return {state.id for state in reply.states}


def continued(engine: Engine, state: dict[str, Any]) -> list[int]:
    """What follows after a state, which is left as it is."""
    count = len(state["continues"])
    sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=state["seed"])
    request = Request(
        id=1,
        prompt=pack_ids([]),
        sampling=sampling,
        stream=False,
        state=state["id"],
        owner=state["owner"],
    )
    engine.add("c", request)
    ends: list[Finished | Failed] = []
    while not ends:
        for events in engine.step().values():
            ends += [*events.finished, *events.failed]
    (end,) = ends
    assert isinstance(end, Finished), end
    return end.tokens


@pytest.mark.parametrize("numbers", [(1,), (2, 3), (3, 1)])
def test_every_state_is_found_by_the_engine_that_keeps_it(
    folder: Path, numbers: tuple[int, ...]
) -> None:
    assert {state["kept_by"] for state in STATES} == {0, 1}
    for count in numbers:  # of engines, one start after the other
        engines = start(folder, count)
        for owner in ("", "alice"):
            for rank, engine in enumerate(engines):
                mine = {
                    state["id"]
                    for state in STATES
                    if state["owner"] == owner
                    and engine_of_state(owner, state["id"], count) == rank
                }
                assert listed(engine, owner) == mine
        for state in STATES:
            home = engines[engine_of_state(state["owner"], state["id"], count)]
            assert continued(home, state) == state["continues"]
        for engine in engines:
            engine.close()
