"""The process that compiles what strangers sent: it may hang, swell or die, and none else does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine.errors import EngineError
from engine.protocol.events import ModelInfo
from engine.protocol.sampling_params import Grammar
from engine.structured_output.sandbox import frame
from service.inference.inputs import grammar_check as grammars
from service.inference.inputs.grammar_check import GrammarCheck
from tests.engine.fake import FakeRunner
from tests.engine.texts import ENDLESS_SCHEMA, save_bytes, save_characters

RIGHT, WRONG = Grammar("regex", "a+"), Grammar("regex", "(")
ENDLESS = Grammar("json", json.dumps(ENDLESS_SCHEMA))
SECONDS = 0.4
ENOUGH_MEMORY = 2**33  # a quick processor fills the default in less than those seconds


@pytest.fixture
def info(tmp_path: Path) -> ModelInfo:
    save_bytes(tmp_path)
    return FakeRunner(folder=tmp_path).info


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    timed: list[float] = []
    check = GrammarCheck(SECONDS, timed.append)
    check.timed = timed  # type: ignore[attr-defined]
    yield check
    await check.close()


async def test_verdicts(check: GrammarCheck, info: ModelInfo) -> None:
    for _ in range(2):
        assert await check.check(RIGHT, info) is None
        assert "unclosed" in (await check.check(WRONG, info) or "")
    assert len(check.timed) == 2  # type: ignore[attr-defined]


async def test_the_same_grammar_at_once_is_compiled_once(
    check: GrammarCheck, info: ModelInfo
) -> None:
    verdicts = await asyncio.gather(*(check.check(RIGHT, info) for _ in range(20)))
    assert verdicts == [None] * 20
    assert len(check.timed) == 1  # type: ignore[attr-defined]


async def test_a_flood_of_one_owner_does_not_hold_up_another(
    check: GrammarCheck, info: ModelInfo
) -> None:
    done: list[str] = []

    async def ask(owner: str, number: int) -> None:
        await check.check(Grammar("regex", f"{owner}{{{number + 1}}}"), info, owner)
        done.append(owner)

    await asyncio.gather(*(ask("flood", i) for i in range(30)), ask("late", 0))
    assert done.index("late") <= 2


async def test_endless_work_is_ended_and_the_next_grammar_is_compiled(
    check: GrammarCheck, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MEMORY", ENOUGH_MEMORY)
    endless, right, wrong = await asyncio.gather(
        check.check(ENDLESS, info), check.check(RIGHT, info), check.check(WRONG, info)
    )
    assert endless is not None and f"{SECONDS:g} s" in endless
    assert right is None and wrong is not None


@pytest.mark.parametrize("megabytes", [1, 12])  # too little for Python, and for the library
async def test_too_much_memory(
    megabytes: int,
    check: GrammarCheck,
    info: ModelInfo,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(grammars, "MEMORY", megabytes * 2**20)
    large = Grammar("choice", json.dumps([f"value {i} {i * 7919}" for i in range(20_000)]))
    verdict = await check.check(large, info)
    assert verdict is not None and "memory" in verdict
    assert capfd.readouterr().err == ""  # strangers do not write the server's log


async def test_who_leaves_spoils_it_for_nobody(check: GrammarCheck, info: ModelInfo) -> None:
    leaving = asyncio.create_task(check.check(RIGHT, info))
    staying = asyncio.create_task(check.check(RIGHT, info))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying is None


async def test_another_model_is_asked_anew(
    check: GrammarCheck, info: ModelInfo, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert await check.check(RIGHT, info) is None
    other = msgspec.structs.replace(
        info, folder=str(tmp_path_factory.mktemp("other")), fingerprint="other"
    )
    assert "tokenizer.json" in (await check.check(RIGHT, other) or "")
    assert await check.check(RIGHT, info) is None


async def test_a_model_that_is_loaded_again_may_have_another_tokenizer(
    check: GrammarCheck, info: ModelInfo, tmp_path: Path
) -> None:
    """Of which its fingerprint, that of the weights, tells nothing."""
    save_characters(tmp_path, "bcd")
    assert "spell" in (await check.check(RIGHT, info) or "")
    save_characters(tmp_path, "abc")
    assert await check.check(RIGHT, msgspec.structs.replace(info)) is None
    assert await check.check(Grammar("regex", "ab"), msgspec.structs.replace(info)) is None


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_whole_group_are_for_the_server(
    sig: signal.Signals, check: GrammarCheck, info: ModelInfo
) -> None:
    assert await check.check(RIGHT, info) is None
    process = check._process
    assert process is not None
    process.send_signal(sig)
    assert "unclosed" in (await check.check(WRONG, info) or "")
    assert check._process is process


async def test_what_is_remembered_is_bounded(
    check: GrammarCheck, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MOST_KNOWN", 2)
    several = [Grammar("regex", "a" * (n + 1)) for n in range(3)]
    for one in (*several, several[2], several[1], several[0]):
        assert await check.check(one, info) is None
    assert len(check.timed) == 4  # type: ignore[attr-defined]


async def test_a_process_that_dies_idle_is_started_again(
    check: GrammarCheck, info: ModelInfo
) -> None:
    assert await check.check(RIGHT, info) is None
    process = check._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert "unclosed" in (await check.check(WRONG, info) or "")


@pytest.mark.parametrize(
    ("program", "reason"), [("/nonexistent", "cannot be checked"), ("/bin/false", "exit code 1")]
)
async def test_a_process_that_does_not_start_is_no_fault_of_the_request(
    program: str, reason: str, check: GrammarCheck, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(EngineError, match=reason):
        await check.check(RIGHT, info)
    monkeypatch.undo()
    assert await check.check(RIGHT, info) is None


async def test_no_other_package_takes_the_engines_place(
    check: GrammarCheck, info: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert await check.check(RIGHT, info) is None


def test_a_process_ends_silently_when_who_asked_is_gone(tmp_path: Path) -> None:
    size = save_bytes(tmp_path)
    command = [sys.executable, "-m", "engine.structured_output.sandbox"]
    command += [str(tmp_path), str(size), "1", "99999999"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.write(frame(RIGHT))
    process.stdin.close()
    assert process.wait(20) == 0 and process.stderr.read() == b""
    process.stderr.close()


async def test_close_ends_the_process(info: ModelInfo) -> None:
    check = GrammarCheck(60.0, lambda _: None)
    assert await check.check(RIGHT, info) is None
    process = check._process
    waiting = asyncio.create_task(check.check(ENDLESS, info))
    await asyncio.sleep(0.1)
    await check.close()
    assert process is not None and process.returncode is not None
    with pytest.raises(asyncio.CancelledError):
        await waiting
