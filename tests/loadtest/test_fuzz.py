"""The fuzzer, and a few of its requests against the application over a fake model."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
from pathlib import Path

import pytest

from engine.cache.storage import snapshot
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner
from loadtest.fuzz.command import main
from loadtest.fuzz.mutations import Mutator
from loadtest.fuzz.raw import Outcome, fuzz
from loadtest.fuzz.schema import check_schema
from loadtest.fuzz.snapshots import damaged, fuzz_snapshots
from loadtest.subject import SMALLEST
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

# The long run: MINSERVE_SNAPSHOT_MUTATIONS=10000, or python -m loadtest.fuzz snapshots
SNAPSHOTS = int(os.environ.get("MINSERVE_SNAPSHOT_MUTATIONS", "300"))


def _small() -> ModelRunner:
    """A bundled model: of the fake one, nobody knows what a state from elsewhere means."""
    config = EngineConfig(model=SMALLEST, device="cpu", threads=1, max_slots=4, share_slots=4)
    runner = ModelRunner(config)
    runner.warm_up()
    return runner


def test_mutations_repeat_with_their_seed_and_differ() -> None:
    first, again = Mutator(3), Mutator(3)
    drawn = [first.draw() for _ in range(300)]
    assert drawn == [again.draw() for _ in range(300)]
    assert len(set(drawn)) > 250
    assert any(not one.startswith(b"POST /v1") for one in drawn)


def test_server_errors_are_kept_with_their_request() -> None:
    outcome = Outcome()
    outcome.note("400", b"a")
    outcome.note("500", b"b", b"body")
    assert outcome.endings == {"400": 1, "500": 1}
    assert outcome.errors == [("500 b'body'", b"b")]


def test_mutated_requests_get_no_server_error(tmp_path: Path) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path))
    with listening(runner, max_tokens=16, max_n=4) as (url, service):
        outcome = asyncio.run(fuzz(url, 1500, seed=1, connections=8))
        assert service.lifecycle.state == "ready"
    assert sum(outcome.endings.values()) == 1500
    assert not outcome.errors, outcome.errors
    assert outcome.endings["200"] > 20 and outcome.endings["400"] > 500


def test_damaged_snapshots_are_refused_or_work() -> None:
    done: list[int] = []
    with listening(_small()) as (url, service):
        outcome = fuzz_snapshots(url, SNAPSHOTS, 1, done.append)
        assert service.lifecycle.state == "ready"
    assert not outcome.wrong, outcome.wrong
    assert outcome.endings.total() == SNAPSHOTS and done[-1] >= SNAPSHOTS - 99
    assert outcome.taken > 0 and outcome.endings["400 state_malformed"] > SNAPSHOTS // 2


def test_a_server_that_takes_what_it_should_not_is_found_out() -> None:
    with listening(_small()) as (url, _):
        read = snapshot.read

        def trusting(content: bytes, shape: snapshot.StateLayout) -> snapshot.Snapshot:
            try:
                return read(content, shape)
            except EngineError:
                return snapshot.Snapshot(bytes(shape.bytes), pack_ids([1]), 1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(snapshot, "read", trusting)
            outcome = fuzz_snapshots(url, 60, 1)
    assert outcome.wrong


def test_damages_repeat_with_their_seed_and_differ() -> None:
    first, again = random.Random(2), random.Random(2)
    drawn = [damaged(bytes(range(200)), first) for _ in range(200)]
    assert drawn == [damaged(bytes(range(200)), again) for _ in range(200)]
    assert len(set(drawn)) > 100


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
@pytest.mark.slow
def test_generated_cases_get_what_the_schema_documents(tmp_path: Path) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path))
    with listening(runner, max_tokens=16, max_n=4) as (url, _):
        tested = check_schema(url, examples=5, seed=1)
    assert tested.cases > 100
    assert tested.passed, tested.report


def test_a_schema_run_without_its_package_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err
