"""The command line: starts a server, sends the requests, and checks that it still works."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import time
from pathlib import Path
from typing import Any

from loadtest import fuzz as package
from loadtest.fuzz.raw import fuzz
from loadtest.fuzz.schema import check_schema
from loadtest.fuzz.snapshots import fuzz_snapshots
from loadtest.report import command_line, print_environment, save_json
from loadtest.subject import Subject

# Answers stay short whatever a mutation asks for.
SETTINGS: dict[str, Any] = {
    "max_tokens": 16,
    "max_n": 4,
    "receive_timeout": 5.0,
    "request_timeout": 20.0,
}

MOST_GROWTH = 64.0  # MiB, that a server may take for snapshots that it refuses


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer; return 0 if all is well, 1 if not, 2 if it cannot run."""
    options = command_line("fuzz", package.__doc__)
    options.add_argument(
        "what", choices=("raw", "schema", "snapshots"), help="what to send, see above"
    )
    options.add_argument(
        "--requests",
        type=int,
        help="requests to send, for raw (default: 100,000) and snapshots (default: 10,000)",
    )
    options.add_argument(
        "--connections", type=int, default=32, help="connections at the same time, for raw"
    )
    options.add_argument(
        "--examples", type=int, default=500, help="cases of each operation, for schema"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    if args.what == "schema" and importlib.util.find_spec("schemathesis") is None:
        options.error("schema needs the tests' packages: pip install -e '.[test]'")
    print_environment()
    with Subject(**SETTINGS) as subject:
        asyncio.run(subject.started())
        engine = subject.engine()
        begun = time.monotonic()
        good = {"raw": _raw, "schema": _schema, "snapshots": _snapshots}[args.what](subject, args)
        print(f"{time.monotonic() - begun:.0f} s")
        state = asyncio.run(subject.state())
        same = state == "ready" and subject.engine() == engine
        print(f"the server is {state}; its engine is {'the same' if same else 'another'} process")
        idle = asyncio.run(subject.idle(float("inf"))) if same else None
        print("nothing is left in flight" if idle is not None else "requests are left in flight")
    return 0 if good and same and idle is not None else 1


def _raw(subject: Subject, args: argparse.Namespace) -> bool:
    requests = args.requests or 100_000
    outcome = asyncio.run(fuzz(subject.url, requests, args.seed, args.connections))
    counts = ", ".join(f"{count:,} {ending}" for ending, count in outcome.endings.most_common())
    print(f"{sum(outcome.endings.values()):,} requests: {counts}")
    for answer, request in outcome.errors:
        print(f"{answer}\n    to {request[:1000]!r}")
    save_json(args.json, {"fuzz": dict(outcome.endings)})
    return not any(ending.startswith("5") for ending in outcome.endings)


def _snapshots(subject: Subject, args: argparse.Namespace) -> bool:
    held: list[float] = []  # MiB
    outcome = fuzz_snapshots(
        subject.url, args.requests or 10_000, args.seed, lambda done: held.append(subject.memory())
    )
    counts = ", ".join(f"{count:,} {ending}" for ending, count in outcome.endings.most_common())
    print(f"{outcome.endings.total():,} snapshots: {counts}")
    grown = max(held) - held[0] if held else 0.0
    print(f"memory: {held[0] if held else 0:.0f} MiB after 100, at most {grown:+.0f} MiB later")
    for words in outcome.wrong:
        print(f"WRONG: {words}")
    save_json(args.json, {"fuzz": dict(outcome.endings), "grown_mib": grown})
    return not outcome.wrong and grown < MOST_GROWTH


def _schema(subject: Subject, args: argparse.Namespace) -> bool:
    tested = check_schema(subject.url, args.examples, args.seed)
    print(tested.report)
    print(f"{tested.cases:,} cases: {'no failure' if tested.passed else 'FAILURES'}")
    save_json(args.json, {"cases": tested.cases, "passed": tested.passed})
    return tested.passed
