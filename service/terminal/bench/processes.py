"""Runs a workload on several client processes that start at the same moment."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from service.terminal.bench.client import Report, Workload, drive

HEAD_START = 0.05  # seconds between the last process's readiness and the start of the run


def split(whole: Workload, processes: int) -> list[Workload]:
    """Return the shares of a workload: arrivals in turn, users and limits as evenly as possible."""
    if processes == 1:
        return [whole]

    def part(total: int | None, which: int) -> int | None:
        return (
            None
            if total is None
            else total * (which + 1) // processes - (total * which // processes)
        )

    return [
        replace(
            whole,
            due=whole.due[which::processes],
            closed=part(whole.closed, which) or 0,
            count=part(whole.count, which),
            most_at_once=part(whole.most_at_once, which),
            seed=whole.seed * processes + which,
        )
        for which in range(processes)
    ]


def run(whole: Workload, processes: int) -> list[Report]:
    """Run a workload and return the reports of all processes.

    Raises ValueError, OSError, and RuntimeError if a process ends without a report.
    """
    limits = [number for number in (whole.closed or None, whole.most_at_once) if number]
    if processes < 1 or any(processes > limit for limit in limits):
        raise ValueError(
            f"--processes is {processes}; allowed: at least 1, and at most --max-concurrency"
        )
    if processes == 1:
        return [drive(whole, time.monotonic)]
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    started = []
    try:
        for workload in split(whole, processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(workload, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append(process)
        for pipe in pipes:
            _take(pipe)  # wait until the process is ready
        begin = time.monotonic() + HEAD_START
        for pipe in pipes:
            pipe.send(begin)
        return [_take(pipe) for pipe in pipes]
    finally:
        for process in started:
            process.join(1)
            process.kill()


def _take(pipe: Connection) -> Report:
    try:
        said = pipe.recv()
    except EOFError:
        raise RuntimeError("a client process has ended without a report") from None
    if isinstance(said, OSError | ValueError):
        raise said
    return said  # type: ignore[no-any-return]


def _work(workload: Workload, pipe: Connection) -> None:
    def start() -> float:
        pipe.send(None)
        begin: float = pipe.recv()
        return begin

    try:
        pipe.send(drive(workload, start))
    except (OSError, ValueError) as error:
        pipe.send(error)
