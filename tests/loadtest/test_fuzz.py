"""The fuzzer, and a few of its requests against the application over a fake model."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from loadtest.fuzz.command import main
from loadtest.fuzz.mutations import Mutator
from loadtest.fuzz.raw import Outcome, fuzz
from loadtest.fuzz.schema import check_schema
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening


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


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
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
