"""The commands that do things; what a signal or a terminal changes in processes of their own."""

from __future__ import annotations

import json
import math
import os
import pty
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import load_model
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.training.evaluation import carried_loss
from tests.cli.conftest import TEXT, TINY, Minserve, command, environment

EXACTLY = ["--device", "cpu", "--dtype", "float32"]  # whatever this processor has


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running command, which does not outlive the test."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupted_after_line(curve: Path, lines: int, *arguments: str | Path) -> str:
    """What `minserve train` says when Ctrl-C comes after its curve has so many lines."""
    with started("train", *arguments) as process:
        while not curve.exists() or curve.read_text().count("\n") < lines:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    return stderr


def test_train_writes_a_folder_with_everything(trained: Path) -> None:
    assert sorted(path.name for path in trained.iterdir()) == [
        "README.md",
        "config.json",
        "curve.jsonl",
        "curve.png",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((trained / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (257, 256)
    readme = (trained / "README.md").read_text()
    assert "minserve train --data text.txt --out tiny --layers 1" in readme
    assert str(trained.parent) not in readme


def test_train_replaces_a_run_only_when_told_to(
    minserve: Minserve, trained: Path, text_file: Path
) -> None:
    before = (trained / "curve.jsonl").read_text()
    done = minserve("train", "--data", text_file, "--out", trained, *TINY)
    assert done.returncode == 2
    assert "--overwrite" in done.stderr
    assert (trained / "curve.jsonl").read_text() == before


def test_an_interrupted_run_says_how_to_resume_and_does(text_file: Path, tmp_path: Path) -> None:
    curve = tmp_path / "out" / "curve.jsonl"
    long = ["--data", text_file, "--out", tmp_path / "out", *TINY, "--steps", "1000000"]
    stderr = interrupted_after_line(curve, 1, *long)
    assert stderr.rstrip().endswith("--resume")
    stopped_at = int(stderr.split("stopped at step ")[1].split(";")[0].replace(",", ""))

    lines = curve.read_text().count("\n")
    interrupted_after_line(curve, lines + 2, *long, "--resume")
    steps = [json.loads(line)["step"] for line in curve.read_text().splitlines()]
    assert steps == list(range(3, steps[-1] + 1, 3))
    assert steps[-1] > stopped_at


def test_train_takes_another_tokenizer(minserve: Minserve, text_file: Path, tmp_path: Path) -> None:
    letters = {letter: id for id, letter in enumerate(sorted(set(TEXT)))}
    letters["<end>"] = len(letters)
    library = Tokenizer(models.BPE(vocab=letters, merges=[]))
    library.save(str(tmp_path / "letters.json"))
    done = minserve(
        *("train", "--data", text_file, "--out", tmp_path / "out", *TINY),
        *("--tokenizer", tmp_path / "letters.json", "--end-of-text", "<end>"),
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == len(letters)
    assert config["eos_token_id"] == letters["<end>"]


def test_score_is_the_carried_loss_of_the_text(
    minserve: Minserve, trained: Path, text_file: Path
) -> None:
    done = minserve("score", text_file, "--model", trained, *EXACTLY, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    model, _ = load_model(trained, "cpu", "float32")
    expected = carried_loss(model, torch.tensor(list(TEXT.encode())))
    assert figures["tokens"] == expected.tokens == len(TEXT) - 1
    assert figures["nats_per_token"] == pytest.approx(expected.per_token, abs=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(expected.per_token), rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(expected.per_token / math.log(2), rel=1e-6)


def test_score_is_what_a_server_says_of_the_text(
    minserve: Minserve, trained: Path, text_file: Path
) -> None:
    options = ["--model", str(trained), "--device", "cpu", "--threads", "2", "--deterministic"]
    done = minserve("score", text_file, *options, "--json")
    assert done.returncode == 0, done.stderr
    config = EngineConfig(model=str(trained), device="cpu", threads=2, deterministic=True)
    engine = Engine.load(config)
    ids = pack_ids(TEXT.encode())
    engine.add("c", Request(id=0, prompt=ids, sampling=SamplingParams(max_tokens=0), score=True))
    logprobs: list[float] = []
    while engine.has_work:
        for events in engine.step().values():
            logprobs += [token.logprob for part in events.scores for token in part.reports.unpack()]
    nats = -math.fsum(logprobs) / len(logprobs)
    assert json.loads(done.stdout)["nats_per_token"] == pytest.approx(nats, rel=1e-12)


@pytest.mark.parametrize(
    "command", ["generate", "score", pytest.param("serve", marks=pytest.mark.slow)]
)
def test_deterministic_is_refused_where_it_is_not_possible(
    minserve: Minserve,
    trained: Path,
    text_file: Path,
    command: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    what = {"generate": ["To be"], "score": [text_file], "serve": ["--port", "0"]}[command]
    given = ["--model", trained, "--device", "cpu", "--dtype", "float16", "--deterministic"]
    done = minserve(command, *what, *given)
    assert done.returncode == 2
    told = done.stderr + caplog.text  # a server logs it
    assert "deterministic is not possible" in told and "allowed: float32" in told


def test_score_reads_stdin_and_prints_for_people(minserve: Minserve, trained: Path) -> None:
    done = minserve("score", "-", "--model", trained, "--device", "cpu", stdin=TEXT.encode())
    assert done.returncode == 0, done.stderr
    assert f"{len(TEXT) - 1:,}" in done.stdout
    assert "bits per byte" in done.stdout


def test_generate_writes_as_many_tokens_as_asked_for(minserve: Minserve, trained: Path) -> None:
    arguments = ["--model", str(trained), "--device", "cpu", "--max-tokens", "20"]
    first, again, other = (
        minserve("generate", "To be", *arguments, "--temperature", "3", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("\n")
    assert first.stdout == again.stdout != other.stdout
    assert first.stderr == ""


def test_generate_takes_what_the_http_api_takes(minserve: Minserve, trained: Path) -> None:
    """Seeds modulo 2**63; -1 and 0 switch top-k off; top-p 0 leaves the most likely token."""
    arguments = ["--model", str(trained), "--device", "cpu", "--max-tokens", "20"]

    def write(*options: str) -> str:
        done = minserve("generate", "To be", *arguments, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    hot = ["--temperature", "3"]
    assert write(*hot, "--seed", "-5") == write(*hot, "--seed", str(2**63 - 5))
    assert write(*hot, "--seed", str(-(2**63))) == write(*hot, "--seed", "0")
    seeded = [*hot, "--seed", "1"]
    off = write(*seeded)
    assert off == write(*seeded, "--top-k", "-1") == write(*seeded, "--top-k", "0")
    best = write("--temperature", "0")
    assert off != best
    assert best == write(*seeded, "--top-p", "0") == write(*seeded, "--top-k", "1")


def test_generate_reads_stdin_and_echoes(minserve: Minserve, trained: Path) -> None:
    arguments = ["--model", trained, "--device", "cpu", "--temperature", "0", "--max-tokens", "5"]
    piped = minserve("generate", "-", "--echo", *arguments, stdin="Grüße".encode())
    given = minserve("generate", "Grüße", *arguments)
    assert piped.returncode == given.returncode == 0, piped.stderr
    assert piped.stdout == "Grüße" + given.stdout


def test_generate_stops_before_a_stop_string(minserve: Minserve, trained: Path) -> None:
    arguments = ["--model", trained, "--device", "cpu", "--temperature", "0", "--max-tokens", "30"]
    whole = minserve("generate", "To be", *arguments).stdout.removesuffix("\n")
    stop = whole[10:12]
    stopped = minserve("generate", "To be", *arguments, "--stop", stop)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout == whole[: whole.index(stop)] + "\n"


ENDLESS = ["--device", "cpu", "--ignore-eos", "--max-tokens", "100000000"]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Commands get SIGINT as at a terminal. A shell lets a job in the background ignore it, and
    children inherit what is ignored, but not what is handled."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_generate_ends_quietly_on_ctrl_c(trained: Path) -> None:
    with started("generate", "To be", "--model", trained, *ENDLESS) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout.endswith(b"\n")
    assert stderr == b""


def test_generate_ends_quietly_when_its_reader_is_gone(trained: Path) -> None:
    with started("generate", "To be", "--model", trained, *ENDLESS) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr == b""


def test_convert_writes_a_folder_that_scores_the_same(
    minserve: Minserve, trained: Path, text_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    done = minserve("convert", trained, copy, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "mingru" in done.stdout
    scores = [
        json.loads(minserve("score", text_file, "--json", *EXACTLY, "--model", it).stdout)
        for it in (trained, copy)
    ]
    assert scores[0] == scores[1]


def test_convert_takes_several_ends_of_text(
    minserve: Minserve, trained: Path, tmp_path: Path
) -> None:
    ends = ["--eos-token-id", "256", "--eos-token-id", "10"]
    for name, options, ids in (("several", ends, [256, 10]), ("none", [], 256)):
        done = minserve("convert", trained, tmp_path / name, *options)
        assert done.returncode == 0, done.stderr
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["eos_token_id"] == ids
    done = minserve("convert", trained, tmp_path / "wrong", "--eos-token-id", "257")
    assert done.returncode == 2 and "allowed: null, an integer from 0 to 256" in done.stderr


def test_generate_ends_with_each_end_of_text(
    minserve: Minserve, trained: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    arguments = ["generate", "To be", "--model", copy, "--device", "cpu", "--temperature", "0"]
    whole = minserve(*arguments, "--max-tokens", "30").stdout.removesuffix("\n")
    end = next(character for character in whole[1:] if character.isascii())  # one token
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, ord(end)]}))
    ended = minserve(*arguments, "--max-tokens", "30")
    assert ended.stdout == whole[: whole.index(end)] + "\n"
    on = minserve(*arguments, "--max-tokens", "30", "--ignore-eos")
    assert on.stdout == whole + "\n"


def test_convert_refuses_a_tokenizer_that_is_too_large_and_leaves_nothing(
    minserve: Minserve, trained: Path, tmp_path: Path
) -> None:
    large = Tokenizer(models.BPE(vocab={chr(256 + id): id for id in range(300)}, merges=[]))
    large.save(str(tmp_path / "large.json"))
    done = minserve("convert", trained, tmp_path / "copy", "--tokenizer", tmp_path / "large.json")
    assert done.returncode == 2
    assert "299" in done.stderr
    assert not (tmp_path / "copy").exists()


def test_progress_is_a_bar_on_a_terminal(text_file: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("train", "--data", text_file, "--out", tmp_path / "out", *TINY, "--steps", "40"),
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**environment(), "TERM": "xterm", "COLUMNS": "160"},
    )
    os.close(theirs)
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 4096):
                shown.append(piece)
        except OSError:  # how Linux says that the other side is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=120) == 0
    reader.join(timeout=60)
    os.close(ours)
    assert b"tokens/s" in b"".join(shown)
    assert b"valid " in b"".join(shown)
