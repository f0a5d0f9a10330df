"""A server at a unix socket: how it is reached, what it replaces and what it leaves alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cli import main
from service.server.unix_socket import MOST_BYTES, UnixListener
from tests.service.process import ROOT, Process, running_module, serving

GENERATE: dict[str, Any] = {"prompts": [[97]], "max_tokens": 3}


def client(path: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(transport=transport, base_url="http://here", timeout=60)


def ended(process: Process) -> None:
    process.popen.send_signal(signal.SIGTERM)
    assert process.exit_code() == 0
    assert not any("Traceback" in line or "error" in line for line in process.lines)


@pytest.mark.parametrize("api_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_serves_there_and_leaves_nothing(tmp_path: Path, api_workers: int) -> None:
    path = tmp_path / "minserve.sock"
    with serving(uds=str(path), api_workers=api_workers, access_log="json") as process:
        process.said(f"listening on unix:{path} ")
        process.said("ready: fake")
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        body = {**GENERATE, "stream": True}
        for _ in range(4):  # connections of their own
            with client(path) as http:
                assert http.post("/v1/generate", json=GENERATE).status_code == 200
                assert http.post("/v1/generate", json=body).text.endswith("data: [DONE]\n\n")
                assert http.post("/v1/states/text", content=b"\xff").status_code == 400
        process.printed('"route":"/v1/generate"')
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(b"\x00\x01\r\n\r\n")
            assert b" 400 " in raw.recv(2**16)
        line = json.loads(process.printed('"status":400,"outcome":null.*').string)
        assert line["peer"] is None, "there is no address"
        ended(process)
    assert not path.exists()


def test_what_is_in_flight_is_finished_and_the_rest_is_told(tmp_path: Path) -> None:
    path = tmp_path / "minserve.sock"
    with serving(uds=str(path)) as process:
        process.said("ready: fake")
        body = {"prompts": [[97]], "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with client(path) as http, http.stream("POST", "/v1/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            process.said("shutting down")
            with client(path) as other:
                assert other.get("/ready").status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.exit_code() == 0
    assert not path.exists()


def test_one_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "minserve.sock"
    with serving(uds=str(path)) as process:
        process.said("ready: fake")
        process.popen.kill()
        process.popen.wait()
    assert path.exists()
    with serving(uds=str(path)) as process:
        process.said("ready: fake")
        with client(path) as http:
            assert http.get("/ready").status_code == 200
        ended(process)


def test_an_api_process_that_dies_is_replaced_there(tmp_path: Path) -> None:
    path = tmp_path / "minserve.sock"
    with serving(uds=str(path), api_workers=2) as process:
        process.said("ready: fake")
        first, _ = running_module(process.popen.pid, "service.server.api_processes")
        os.kill(first, signal.SIGKILL)
        for _ in range(10):
            with client(path) as http:
                assert http.get("/health").status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    assert not path.exists()


def refused(path: Path, word: str) -> None:
    """The server does not start, and says why in a line."""
    with serving(uds=str(path)) as process:
        assert process.exit_code() == 2
        (line,) = [line for line in process.lines if "is ignored" not in line]
        assert f"cannot listen on unix:{path}" in line and word in line, line


def test_somebody_elses_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "taken.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        before = path.stat().st_ino
        refused(path, "another server listens there")
        assert path.stat().st_ino == before
        with socket.socket(socket.AF_UNIX) as still:
            still.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "other").write_text("precious")
        path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="not a socket"):
        UnixListener(path, 1)
    if kind == "file":
        refused(path, "not a socket")
    assert path.is_dir() if kind == "folder" else path.read_text() == "precious"


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 107)
    with pytest.raises(OSError, match=f"bytes; allowed: up to {MOST_BYTES}"):
        UnixListener(long, 1)
    with pytest.raises(OSError, match="No such file or directory"):
        UnixListener(tmp_path / "no" / "x", 1)
    refused(long, "allowed: up to 107")


def test_a_path_of_just_so_many_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    name = "é" * 53 + "x"
    listener = UnixListener(Path(name), 1)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(name)
    listener.close()
    assert not Path(name).exists()
    with pytest.raises(OSError, match="108 bytes"):
        UnixListener(Path(name + "x"), 1)


def test_only_its_own_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    first = UnixListener(path, 1)
    path.rename(tmp_path / "aside")
    second = UnixListener(path, 1)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


@pytest.mark.slow
def test_one_that_has_taken_its_place_is_left_alone(tmp_path: Path) -> None:
    """Another server started while this one, which listens no more, had still something to do."""
    path = tmp_path / "x"
    for _ in range(5):  # file systems give a number again, if not always
        first = UnixListener(path, 1)
        first.socket.close()
        time.sleep(0.02)  # more than the steps of a file's time
        second = UnixListener(path, 1)
        first.close()
        assert path.exists()
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
        second.close()
        assert not path.exists()


def test_a_socket_that_was_given_to_others_is_its_own_still(tmp_path: Path) -> None:
    path = tmp_path / "x"
    listener = UnixListener(path, 1)
    time.sleep(0.02)
    path.chmod(0o666)
    listener.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--host", "127.0.0.1"],
        ["--port", "0"],
        ["--tls-certificate", "CERTIFICATE"],
    ],
)
def test_what_does_not_go_with_it(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("service.server.server.check_tls", lambda *_: None)
    path = tmp_path / "x"
    assert main(["serve", "--uds", str(path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--uds" in line and options[0] in line and "allowed" in line
    assert not path.exists()


def test_proxies_at_the_socket_are_believed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with serving(uds=str(path)) as process:
        process.said("ready: fake")
        with client(path) as http:
            answer = http.get("/v1/models/", headers={"x-forwarded-proto": "https"})
            assert answer.headers["location"] == "https://here/v1/models"
        ended(process)


def test_the_images_health_check_asks_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with serving(uds=str(path)) as process:
        process.said("ready: fake")
        command = [sys.executable, str(ROOT / "docker" / "healthcheck.py")]
        env = {**os.environ, "MINSERVE_UDS": str(path)}
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stdout.strip()) == (0, '{"status":"ready"}')
        ended(process)
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and f"unix:{path}" in found.stderr
