"""The command line: the cases, each beside its ceiling, and the steady pace."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest import frontend
from loadtest.frontend.board import Board
from loadtest.frontend.cases import CASES, Case
from loadtest.frontend.processes import kill, server
from loadtest.frontend.reader import KEY, Reading, Schedule, Target, get_ready, read
from loadtest.frontend.ready import Sample
from loadtest.report import command_line, percentile, print_environment, print_table, save_json
from loadtest.served import free_port
from loadtest.with_httpx import httpx

FACTORY = "loadtest.frontend.mock:load"
P50_BAR, P99_BAR = 0.003, 0.010  # seconds, of the steady pace
KEEPS_PACE = 0.99  # of the tokens that are due
SAMPLES = 20  # tries at most
READY = 0.3  # seconds that a reader's process waits for the others to have started
START = 1.0  # seconds until all clients are there
TURN = 1.0  # seconds that one server is measured before the other is
SETTLE = 0.5  # seconds of load before each turn but the first
BUSY = 0.9  # of its core: a client above this may have been the limit


@dataclass(frozen=True)
class Rate:
    """The figures of one load on one server."""

    tokens_per_second: float
    tokens_per_cpu_second: float  # of the server's process
    client: float  # share of a core that the busiest reader used
    latencies: list[float]

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Rate:
        """Combine the readings of processes that read at the same time."""
        rate = sum(one.tokens / one.seconds for one in readings)
        used = sum(one.server_cpu / one.seconds for one in readings) / len(readings)
        return cls(
            rate,
            rate / max(used, 1e-9),
            max(one.cpu / one.seconds for one in readings),
            [value for one in readings for value in one.latencies],
        )


@dataclass(frozen=True)
class Served:
    """A running server, and the board of its engine."""

    process: subprocess.Popen[bytes]
    port: int
    board: Board

    @property
    def target(self) -> Target:
        return Target(self.process.pid, ("127.0.0.1", self.port), self.board.path)


class Bench:
    """The files, cores and client processes of one run."""

    def __init__(self, args: argparse.Namespace, folder: Path, readers: Executor) -> None:
        self.args = args
        self.folder = folder
        self._readers = readers
        cores = sorted(os.sched_getaffinity(0))
        self.server_core: int | None = None
        self.client_core: int | None = None
        if len(cores) > 1 and not args.no_pin:
            self.server_core, self.client_core = cores[0], cores[1]

    def settings(self, port: int, board: Path) -> dict[str, Any]:
        """Return the settings of the measured server."""
        return {
            "port": port,
            "model": str(board),
            "api_keys": f"loadtest:{KEY}",
            "access_log": "json",
            "max_slots": 4096,
            "log_level": "warning",
            "threads": None if self.client_core is None else self.client_core + 1,
        }

    def measure(self, case: Case, servers: Sequence[Served], turns: int, **load: int) -> list[Rate]:
        """Load the servers in turn, and return one Rate for each.

        Speed of shared cores changes from one second to the next; turns make it change for all
        servers.
        """
        args = self.args
        readers = min(args.clients, case.connections)
        for served in servers:
            served.board.set_up(**{**load, "window": 0})
        begin = time.monotonic() + START
        schedule = Schedule(begin, args.warm_up, SETTLE, args.seconds / turns, turns)
        work = [
            self._readers.submit(
                read,
                case,
                [served.target for served in servers],
                which,
                case.connections * (which + 1) // readers - case.connections * which // readers,
                self.client_core,
                schedule,
            )
            for which in range(readers)
        ]
        for which, at, _, end in schedule.slices(len(servers)):
            time.sleep(max(0.0, at - time.monotonic()))
            servers[which].board.window = load["window"]
            time.sleep(max(0.0, end - time.monotonic()))
            servers[which].board.window = 0
        of_readers = [one.result() for one in work]
        return [Rate.of(readings) for readings in zip(*of_readers, strict=True)]

    def sample(self, case: Case, served: Served) -> Sample:
        """Return the parts of an answer to `case`. Raises RuntimeError."""
        for _ in range(SAMPLES):
            if (sample := self._sample(case, served)) is not None:
                return sample
        raise RuntimeError(f"{case.name}: the answers do not have three events per prompt")

    @staticmethod
    def _sample(case: Case, served: Served) -> Sample | None:
        """Try once to get a sample; None if first tokens arrived together with others."""
        served.board.set_up(window=1 << 30)  # nobody counts what is read
        answer = httpx.post(
            f"http://127.0.0.1:{served.port}/v1/generate",
            json=case.sample,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=60,
        )
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        headers = [
            (name, value)
            for name, value in answer.headers.raw
            if name not in (b"transfer-encoding", b"date")
        ]
        if not case.stream:
            return Sample(headers, answer.content, stream=False)
        *events, done = answer.content.removesuffix(b"\n\n").split(b"\n\n")
        by_prompt: dict[int, list[bytes]] = {}
        for event in events:
            by_prompt.setdefault(json.loads(event[6:])["index"], []).append(event + b"\n\n")
        if {len(own) for own in by_prompt.values()} != {3}:
            return None
        first, middle, last = (b"".join(part) for part in zip(*by_prompt.values(), strict=True))
        return Sample(
            headers,
            first,
            middle,
            last[len(middle) :] + done + b"\n\n",
            events=case.tokens // case.chunk,
            tokens=case.prompts * case.chunk,
        )

    @contextmanager
    def ours(self) -> Iterator[Served]:
        """Run the measured server."""
        port = free_port()
        board = self._board(port)
        command = ["loadtest.served", FACTORY, json.dumps(self.settings(port, board.path))]
        with server(command, port, self.server_core) as process:
            yield Served(process, port, board)

    def bare(self) -> AbstractContextManager[Served]:
        """Run the bare application, which does the same work."""
        return self._other("loadtest.frontend.bare", self.client_core)

    def ready(self, sample: Sample) -> AbstractContextManager[Served]:
        """Run the application that sends the sample's ready-made bytes."""
        path = self.folder / "sample"
        path.write_bytes(msgspec.msgpack.encode(sample))
        return self._other("loadtest.frontend.ready", path)

    @contextmanager
    def _other(self, module: str, option: object) -> Iterator[Served]:
        """Run an application to compare with."""
        port = free_port()
        board = self._board(port)
        command = [module, str(port), str(board.path), "" if option is None else str(option)]
        with server(command, port, self.server_core) as process:
            try:
                yield Served(process, port, board)
            finally:
                kill(process)  # it would wait for streams that nobody reads any more

    def _board(self, port: int) -> Board:
        return Board(self.folder / f"board-{port}", create=True)

    def compare(self, case: Case) -> dict[str, Any]:
        """Measure a case on all three servers; return the round whose share is the median."""
        rounds = [self._compare(case) for _ in range(self.args.rounds)]
        rounds.sort(key=lambda row: float(row["fraction"]))
        shares = [row["fraction"] for row in rounds]
        return {**rounds[len(rounds) // 2], "fractions": shares}

    def _compare(self, case: Case) -> dict[str, Any]:
        turns = max(1, round(self.args.seconds / TURN))
        load = {"window": self.args.window, "chunk": case.chunk}
        with self.ours() as one, self.bare() as other:
            sample = self.sample(case, one)
            ours, bare = self.measure(case, [one, other], turns, **load)
        with self.ready(sample) as served:  # never idle, so not beside others
            (ready,) = self.measure(case, [served], turns, **load)
        return {
            "case": case.name,
            "bar": case.bar,
            "tokens_per_second": ours.tokens_per_second,
            "ceiling": bare.tokens_per_second,
            "ready": ready.tokens_per_second,
            "fraction": ours.tokens_per_second / bare.tokens_per_second,
            "fraction_of_ready": ours.tokens_per_second / ready.tokens_per_second,
            "per_cpu_second": ours.tokens_per_cpu_second,
            "ceiling_per_cpu_second": bare.tokens_per_cpu_second,
            "client": max(ours.client, bare.client),
        }

    def pace(self, streams: int, period: float) -> dict[str, Any]:
        """Measure `streams` streams with a step every `period` seconds on all three servers."""
        case = Case("pace", 1.0, connections=streams)
        pace = {"window": 0, "period_ns": round(period * 1e9), "expected": streams}

        def paced(served: Served) -> dict[str, float]:
            (rate,) = self.measure(case, [served], 1, **pace)
            return _paced(rate)

        with self.ours() as served:
            sample = self.sample(case, served)
            ours = paced(served)
        with self.bare() as served:
            bare = paced(served)
        with self.ready(sample) as served:
            ready = paced(served)
        return {
            "streams": streams,
            "due": streams / period,
            "ours": ours,
            "ceiling": bare,
            "ready": ready,
        }


def _paced(rate: Rate) -> dict[str, float]:
    return {
        "tokens_per_second": rate.tokens_per_second,
        "p50": percentile(rate.latencies, 50),
        "p99": percentile(rate.latencies, 99),
        "client": rate.client,
    }


def _print_pace(pace: dict[str, Any]) -> None:
    due, ours = pace["due"], pace["ours"]
    kept = ours["tokens_per_second"] >= KEEPS_PACE * due
    good = kept and ours["p50"] < P50_BAR and ours["p99"] < P99_BAR
    print_table(
        f"{pace['streams']} streams at a steady {due:,.0f} tokens/s, from the engine's step to "
        f"the client (bars {1000 * P50_BAR:g} and {1000 * P99_BAR:g} ms): "
        f"{'pass' if good else 'short'}",
        ["", "tokens/s", "p50, ms", "p99, ms", "client"],
        [
            [
                name,
                f"{pace[key]['tokens_per_second']:,.0f}",
                f"{1000 * pace[key]['p50']:.2f}",
                f"{1000 * pace[key]['p99']:.2f}",
                f"{pace[key]['client']:.0%}",
            ]
            for name, key in (
                ("front end", "ours"),
                ("bare ASGI", "ceiling"),
                ("bytes ready", "ready"),
            )
        ],
    )


def _print_cases(rows: Sequence[dict[str, Any]], window: int) -> None:
    print_table(
        f"front end of one process, mock engine, {window} steps in flight",
        [
            "case",
            "tokens/s",
            "bare ASGI",
            "share",
            "of all rounds",
            "bar",
            "",
            "bytes ready",
            "of CPU",
            "client",
        ],
        [
            [
                row["case"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['ceiling']:,.0f}",
                f"{row['fraction']:.0%}",
                f"{min(row['fractions']):.0%} to {max(row['fractions']):.0%}",
                f"{row['bar']:.0%}",
                "pass" if row["fraction"] >= row["bar"] else "short",
                f"{row['ready']:,.0f} ({row['fraction_of_ready']:.0%})",
                f"{row['per_cpu_second'] / row['ceiling_per_cpu_second']:.0%}",
                f"{row['client']:.0%}" + (" (the limit?)" if row["client"] > BUSY else ""),
            ]
            for row in rows
        ],
    )


def main(argv: list[str] | None = None) -> int:
    options = command_line("frontend", frontend.__doc__)
    options.add_argument(
        "--cases",
        type=int,
        nargs="*",
        default=range(1, len(CASES) + 1),
        help="numbers of loads, from 1 (default: all)",
    )
    options.add_argument(
        "--window", type=int, default=4, help="steps that the mock engine is ahead"
    )
    options.add_argument(
        "--seconds", type=float, default=4.0, help="measured seconds of each server in each round"
    )
    options.add_argument(
        "--warm-up", type=float, default=1.5, help="seconds of each server before its first turn"
    )
    options.add_argument(
        "--rounds", type=int, default=3, help="rounds of each load; the median counts"
    )
    options.add_argument("--clients", type=int, default=1, help="client processes")
    options.add_argument("--streams", type=int, default=256, help="streams of the steady pace")
    options.add_argument(
        "--period", type=float, default=0.001, help="seconds between steps of the steady pace"
    )
    options.add_argument("--no-pace", action="store_true", help="leave the steady pace out")
    options.add_argument("--no-pin", action="store_true", help="do not pin processes to cores")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    if args.rounds < 1:
        options.error("--rounds: allowed: 1 and more")
    print_environment()
    figures: dict[str, Any] = {"window": args.window, "cases": []}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.clients, mp_context=context) as readers,
    ):
        list(readers.map(get_ready, [READY] * args.clients))
        bench = Bench(args, Path(folder), readers)
        for number in args.cases:
            try:
                figures["cases"].append(bench.compare(CASES[number - 1]))
            except RuntimeError as error:
                print(f"{CASES[number - 1].name}: not measured: {error}")
        if figures["cases"]:
            _print_cases(figures["cases"], args.window)
        if not args.no_pace:
            figures["pace"] = bench.pace(args.streams, args.period)
            _print_pace(figures["pace"])
    save_json(args.json, figures)
    return 0
