"""`minserve train` in several processes: by `--gpus`, by torchrun's variables; how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.terminal import launch
from tests.cli.conftest import TINY, Minserve, command, environment
from tests.once import made_once

RUN = [*TINY, "--steps", "96", "--evaluate-every", "8", "--carry", "0.8", "--optimizer", "muon"]
EXACT = [*RUN, "--dropout", "0", "--dtype", "float32"]
TWO = ["--gpus", "2"]


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "curve.jsonl").read_text().splitlines())
    return [(line["step"], line["train_loss"], line["valid_loss"]) for line in lines]


def begin(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **variables},
    )


def wait_for_lines(process: subprocess.Popen[str], curve: Path, lines: int) -> None:
    while not curve.exists() or curve.read_text().count("\n") < lines:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def in_two(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two processes, as it ends by itself."""

    def make(folder: Path) -> None:
        process = begin("--data", text_file, "--out", folder / "run", *EXACT, *TWO)
        _, stderr = process.communicate(timeout=400)
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr
        assert stderr.count("weights; tokens: ") == 1  # one process speaks
        assert "CPU x 2" in stderr

    return made_once(tmp_path_factory, "in-two", make) / "run"


def test_two_processes_train_as_one_does(
    in_two: Path, minserve: Minserve, text_file: Path, tmp_path: Path
) -> None:
    one = tmp_path / "one"
    done = minserve("train", "--data", text_file, "--out", one, *EXACT)
    assert done.returncode == 0, done.stderr
    alone, shared = losses(one), losses(in_two)
    assert [step for step, *_ in alone] == [step for step, *_ in shared] == [*range(8, 97, 8)]
    # rounding grows with the steps
    for (_, *figures), (_, *others) in zip(alone[:5], shared[:5], strict=True):
        assert figures == pytest.approx(others, rel=1e-3)
    assert sorted(path.name for path in in_two.iterdir()) == [
        *("README.md", "config.json", "curve.jsonl", "curve.png", "model.safetensors"),
        "tokenizer.json",
    ]
    assert "s on 2 x CPU." in (in_two / "README.md").read_text()


@pytest.mark.slow
def test_torchruns_variables_do_the_same(in_two: Path, text_file: Path, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        begin(
            *("--data", text_file, "--out", tmp_path / "run", *EXACT),
            **world,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[1] == ("", "")
    assert losses(tmp_path / "run") == losses(in_two)


def test_torchrun_does_not_replace_a_run_either(in_two: Path, text_file: Path) -> None:
    before = losses(in_two)
    given = ["--data", text_file, "--out", in_two, *EXACT]
    process = begin(*given, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2 and "--overwrite" in stderr
    assert losses(in_two) == before


@pytest.mark.slow
def test_ctrl_c_saves_what_as_many_processes_resume_exactly(
    in_two: Path, minserve: Minserve, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = ["--data", text_file, "--out", out, *EXACT]
    process = begin(*given, *TWO)
    wait_for_lines(process, out / "curve.jsonl", 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.count("stopped at step") == 1
    assert stderr.rstrip().endswith("--gpus 2 --resume")
    assert len(losses(out)) < 12

    refused = minserve("train", *given, "--resume")
    assert refused.returncode == 2
    assert "on 2 GPUs or processes, not 1; resume on as many" in refused.stderr

    process = begin(*given, *TWO, "--resume")
    _, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    assert losses(out) == losses(in_two)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, in_two)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_what_all_processes_refuse_is_told_once(text_file: Path, tmp_path: Path) -> None:
    given = ["--data", text_file, "--out", tmp_path / "run", *EXACT, *TWO]
    process = begin(*given, "--window", "100000")
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2
    assert stderr.count("minserve: error: ") == 1 == stderr.count("\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ["--data", text_file, "--out", out, *RUN, "--steps", "1000000"]
    process = begin(*given, *TWO)
    wait_for_lines(process, out / "curve.jsonl", 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (last,) = [pid for pid in children if b"\0RANK=1\0" in _variables(pid)]
    os.kill(int(last), signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGKILL
    assert "process 1 was ended by SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _variables(pid: str) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


# The launcher alone, with a shell script as the command.


def launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, count: int = 2
) -> tuple[int, list[str]]:
    """The exit code, and what the processes wrote."""
    said = tmp_path / "said"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nsaid={said}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(sys, "argv", ["minserve", "train", "--gpus", "2"])
    code = launch.run_on_gpus(count)
    return code, said.read_text().splitlines() if said.exists() else []


def test_each_process_is_told_its_number_and_where_to_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $* >>$said"
    code, said = launched(monkeypatch, tmp_path, script, count=3)
    assert code == 0
    assert sorted(said) == [
        f"{rank} {rank} 3 3 127.0.0.1 -m service.cli train --gpus 2" for rank in range(3)
    ]


@pytest.mark.parametrize("code", [1, 2, 77])
def test_the_first_failure_ends_the_others_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    script = f"[ $RANK = 1 ] && exit {code}; exec sleep 100"
    assert launched(monkeypatch, tmp_path, script)[0] == code


def test_a_process_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.3)
    script = "[ $RANK = 1 ] && sleep 0.5 && exit 4; trap '' TERM; sleep 3; echo late >>$said"
    assert launched(monkeypatch, tmp_path, script) == (4, [])
    assert "did not end in time" in capsys.readouterr().err


@pytest.fixture
def heard_signals() -> Iterator[None]:
    """Signals that what started the tests ignores, as a shell does in the background, are heard."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_each_process_once_as_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    handlers: dict[int, Any] = {number: signal.getsignal(number)}
    script = (
        "trap 'echo $RANK >>$said; exit 130' INT; touch $said.$RANK; while :; do sleep 0.1; done"
    )

    def send() -> None:
        while not all((tmp_path / f"said.{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        while signal.getsignal(number) == handlers[number]:  # the launcher may not be as far
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    code, said = launched(monkeypatch, tmp_path, script)
    sender.join()
    assert code == 130
    assert sorted(said) == ["0", "1"]
    assert signal.getsignal(number) == handlers[number]
