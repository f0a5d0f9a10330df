"""`minserve train --gpus N`: starts one process of the command for each GPU, as torchrun does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from service.terminal import console as terminal

STOP_SECONDS = 60.0  # for the others to end after one has failed


def run_on_gpus(count: int) -> int:
    """Run this command in `count` processes and return the exit code.

    If one fails, the others are ended. Ctrl-C reaches all of them: each ends in its own way.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    command = [sys.executable, "-m", "service.cli", *sys.argv[1:]]
    children = [
        subprocess.Popen(
            command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(count)
    ]

    def pass_on(number: int, _frame: object) -> None:
        # from a terminal they have it already; a second one would end them at once
        if number == signal.SIGTERM or not sys.stdin.isatty():
            _send(children, signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all and return the first code that is not 0, or 0."""
    failed, since = 0, 0.0
    while any(child.poll() is None for child in children):
        codes = [child.poll() for child in children]
        if not failed and any(codes):
            failed, since = next(code for code in codes if code), time.monotonic()
            if failed != 130:  # by Ctrl-C all of them end
                _send(children, signal.SIGTERM)
        if failed and time.monotonic() - since > STOP_SECONDS:
            terminal.note("the other processes did not end in time and are stopped")
            return abs(failed)
        time.sleep(0.1)
    codes = [child.returncode for child in children]
    return abs(failed or next((code for code in codes if code), 0))


def _send(children: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
