"""`minserve train --gpus N`: starts one process of the command for each GPU, as torchrun does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

from engine.training.ranks import environment_of
from service.terminal import console as terminal

STOP_SECONDS = 60.0  # for the others to end after one has failed


def run_on_gpus(count: int) -> int:
    """Run this command in `count` processes and return the exit code.

    If one fails, the others are ended. SIGINT, SIGTERM and SIGHUP are passed on to all of them as
    SIGINT: each saves its state and ends.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "service.cli", *sys.argv[1:]]
    children = [
        subprocess.Popen(
            command,
            env=environment_of(rank, count, port),
            process_group=0,  # so that a terminal's Ctrl-C comes from here alone, once
        )
        for rank in range(count)
    ]

    def pass_on(_number: int, _frame: object) -> None:
        _send(children, signal.SIGINT)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup
    }
    try:
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all and return the code of the first that failed, or 0."""
    failed, since = 0, 0.0
    while any(child.poll() is None for child in children):
        codes = [child.poll() for child in children]
        if not failed and any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            failed, since = _exit_code(rank, children[rank]), time.monotonic()
            if failed != 130:  # by Ctrl-C all of them end
                _send(children, signal.SIGTERM)
        if failed and time.monotonic() - since > STOP_SECONDS:
            terminal.note("the other processes did not end in time and are stopped")
            return failed
        time.sleep(0.1)
    return failed or next(
        (_exit_code(rank, child) for rank, child in enumerate(children) if child.returncode), 0
    )


def _exit_code(rank: int, child: subprocess.Popen[bytes]) -> int:
    """Return a process's exit code, as a shell does; say so if a signal ended it."""
    if child.returncode >= 0:
        return child.returncode
    terminal.note(f"process {rank} was ended by {signal.Signals(-child.returncode).name}")
    return 128 - child.returncode


def _send(children: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
