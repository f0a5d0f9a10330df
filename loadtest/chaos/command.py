"""The command line: scenarios one after the other, and their table."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from loadtest import chaos
from loadtest.chaos.judge import WRONG, Verdict
from loadtest.chaos.load import Load
from loadtest.chaos.scenarios import AFTER, BEFORE, SCENARIOS, Scenario
from loadtest.chaos.store import command as store
from loadtest.chaos.store.command import STORES
from loadtest.report import command_line, print_environment, print_table, save_json
from loadtest.subject import Subject

COLUMNS: tuple[Verdict, ...] = ("answered", "refused", "failed", "no server", *WRONG)


@dataclass(frozen=True)
class Finding:
    """The result of one scenario."""

    name: str
    verdicts: dict[Verdict, int]
    slowest: float  # seconds until an answer
    idle_after: float | None  # seconds until slots and queue were empty again
    memory: float  # MiB more than before
    server: str

    @property
    def good(self) -> bool:
        """Whether every request had one end and, if the server lived, nothing stayed held."""
        ended = not any(self.verdicts.get(verdict) for verdict in WRONG)
        gone = self.server.startswith("exit code") and self.server != "exit code 0"
        returned = self.server.startswith("ready") and self.idle_after is not None
        return ended and (gone or returned)


async def run(scenario: Scenario, users: int) -> Finding:
    """Run a scenario and return its result. Raises RuntimeError if the server does not start."""
    with ExitStack() as stack:
        stdout: IO[bytes] | None = None
        if scenario.stdout == tempfile.gettempdir():
            stdout = stack.enter_context(tempfile.TemporaryFile())
        elif scenario.stdout is not None:
            stdout = stack.enter_context(open(scenario.stdout, "wb"))
        subject = stack.enter_context(
            Subject(scenario.factory, stdout, scenario.before, **scenario.settings)
        )
        await subject.started()
        async with Load(subject.url, users):  # so that what grows once has grown
            await asyncio.sleep(BEFORE)
        await subject.idle(float("inf"))
        slots, memory = (await subject.held())["state_slots_used"], subject.memory()
        async with Load(subject.url, users) as load:
            await asyncio.sleep(BEFORE)
            await scenario.happen(subject)
            await asyncio.sleep(AFTER)
        state = await subject.state()
        idle = await subject.idle(slots) if state.startswith("ready") else None
        grown = subject.memory() - memory if state.startswith("ready") else 0.0
    return Finding(scenario.name, dict(load.verdicts), load.slowest, idle, grown, state)


def _print(findings: Sequence[Finding]) -> None:
    print_table(
        "chaos",
        ["what happened", *COLUMNS, "slowest, s", "idle after, s", "memory, MiB", "server", ""],
        [
            [
                found.name,
                *(str(found.verdicts.get(verdict, 0)) for verdict in COLUMNS),
                f"{found.slowest:.1f}",
                "-" if found.idle_after is None else f"{found.idle_after:.1f}",
                f"{found.memory:+.0f}",
                found.server,
                "pass" if found.good else "FAIL",
            ]
            for found in findings
        ],
    )


def main(argv: list[str] | None = None) -> int:
    """Run the scenarios; return exit code 0 if every result is good, else 1."""
    options = command_line("chaos", chaos.__doc__)
    options.add_argument(
        "--scenarios",
        nargs="+",
        choices=SCENARIOS,
        default=list(SCENARIOS),
        help="scenarios to run (default: all)",
    )
    options.add_argument("--users", type=int, default=16, help="users who load the server")
    options.add_argument(
        "--store",
        choices=STORES,
        help="instead of the scenarios: several servers on a shared store of this kind",
    )
    stored = options.add_argument_group("with --store")
    stored.add_argument("--turns", type=int, default=10_000, help="turns of all sessions")
    stored.add_argument("--sessions", type=int, default=200, help="sessions of two owners")
    stored.add_argument("--servers", type=int, default=3, help="servers on the store")
    stored.add_argument("--every", type=float, default=4.0, help="mean seconds between two faults")
    stored.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    if args.store is not None:
        return store.run(args)
    findings = []
    for name in args.scenarios:
        findings.append(asyncio.run(run(SCENARIOS[name], args.users)))
        print(f"{name}: {'pass' if findings[-1].good else 'FAIL'}", flush=True)
    _print(findings)
    save_json(args.json, {"chaos": [asdict(found) | {"good": found.good} for found in findings]})
    return 0 if all(found.good for found in findings) else 1
