"""The command line of `python -m loadtest.replicas`."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.extra import exit_without
from loadtest.replicas import __doc__ as doc
from loadtest.report import command_line, median, print_environment, print_table, save_json

if TYPE_CHECKING:
    from loadtest.replicas.pinning import Cores

MODEL = "shakespeare-mingru"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a turn was lost, doubled or wrong."""
    exit_without("httpx")
    from loadtest.replicas.faults import FAULTS, NODE_FAULTS

    parser = command_line("replicas", doc)
    parser.add_argument("what", choices=["faults", "proxies"])
    parser.add_argument("--model", default=MODEL, help="the model")
    parser.add_argument("--turns", type=int, default=2000, help="turns of all sessions")
    parser.add_argument("--turns-each", type=int, default=10, help="turns of a session")
    parser.add_argument("--users", type=int, default=6, help="sessions that talk at a time")
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS, *NODE_FAULTS], default=FAULTS)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="for proxies")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument(
        "--clients", type=int, default=1, help="client processes (default: 1, or one a server)"
    )
    parser.add_argument(
        "--pin", action="store_true", help="servers, proxies and clients on cores of their own"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    print_environment()
    try:
        with ExitStack() as stack:
            store = _store(stack)
            found = _faults(store, stack, args) if args.what == "faults" else _proxies(store, args)
    except RuntimeError as error:
        parser.error(str(error))
    save_json(args.json, found)
    return 1 if found.get("wrong") else 0


def _store(stack: ExitStack) -> str:
    """Start a Redis that keeps what it has acknowledged, and return its URL."""
    from loadtest.store.redis import RedisProcess

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return stack.enter_context(RedisProcess(Path(folder))).url


def _faults(store: str, stack: ExitStack, args: Namespace) -> dict[str, Any]:
    from loadtest.replicas.cluster import Cluster
    from loadtest.replicas.faults import NODE_FAULTS, Seen, Trouble, texts_of
    from loadtest.replicas.nodes import NodeCluster
    from loadtest.served import free_port
    from loadtest.subject import Subject

    each, seen = args.turns_each, Seen()
    sessions = range(-(-args.turns // each))
    with Subject(model=args.model, deterministic=True) as witness:
        asyncio.run(witness.started())
        expected = texts_of(witness.url, each)
    of_nodes = set(args.faults) & set(NODE_FAULTS)
    started = (
        NodeCluster(_store(stack), free_port(), store, args.model, 2)
        if of_nodes
        else Cluster(free_port(), store, args.model, 2)
    )
    with started as cluster:
        trouble = Trouble(cluster, list(args.faults), args.pause, args.seed)
        users = [
            threading.Thread(
                target=_in_parts,
                args=(cluster.url, list(sessions[i :: args.users]), each, expected, seen),
            )
            for i in range(args.users)
        ]
        began = time.monotonic()
        trouble.start()
        for user in users:
            user.start()
        for user in users:
            user.join()
        seconds = time.monotonic() - began
        trouble.end()
    rows = [
        [name, str(len(took)), f"{median(took):.1f}", f"{max(took, default=0):.1f}"]
        for name, took in trouble.seconds.items()
    ]
    print_table("faults", ["what", "times", "s until over", "longest"], rows)
    print(f"{seen.turns:,} turns of {len(sessions):,} sessions in {seconds:.0f} s")
    print(f"answers lost, turns carried out: {seen.done_before}; slowest turn {seen.slowest:.1f} s")
    print(f"asked again: {dict(seen.retries)}")
    print(f"lost, doubled or wrong: {len(seen.wrong)}", *seen.wrong[:10], sep="\n  ")
    return {
        "faults": trouble.seconds, "turns": seen.turns, "seconds": seconds,
        "retries": dict(seen.retries), "wrong": seen.wrong, "slowest": seen.slowest,
    }  # fmt: skip


def _in_parts(
    url: str, sessions: list[int], turns: int, expected: list[list[str]], seen: Any
) -> None:
    """Carry out the sessions of one user, a few at a time, so that turns of several alternate."""
    from loadtest.replicas.faults import carry_out

    for first in range(0, len(sessions), 5):
        carry_out(url, sessions[first : first + 5], turns, expected, seen)


def _proxies(store: str, args: Namespace) -> dict[str, Any]:
    from loadtest.replicas import pinning, proxies
    from loadtest.replicas.cluster import Cluster
    from loadtest.served import free_port

    cores = pinning.apart() if args.pin else pinning.shared()
    found: dict[str, dict[str, float]] = {}

    def measure(name: str, count: int, urls: Sequence[str]) -> None:
        if args.pin:
            pinning.pin_parts(cores)
        found[f"{name}, {count}"] = proxies.measure(
            urls, args.seconds, proxies.USERS * count, args.clients, cores.clients
        )

    for count in args.replicas:
        with ExitStack() as stack:
            urls = _servers(stack, args.model, count, cores)
            measure("direct", count, urls)
            try:
                measure(proxies.ROUTER, count, [stack.enter_context(proxies.router(urls))])
            except RuntimeError as error:  # the others are measured
                print(f"{proxies.ROUTER}, {count}: not measured: {error}")
        for name, options in (("HAProxy", ()), ("Python proxy", ("--python-proxy",))):
            with Cluster(free_port(), store, args.model, count, *options) as cluster:
                measure(name, count, [cluster.url])
    rows = []
    for name, one in found.items():
        base = found[f"direct, {name.split(', ')[1]}"]
        rows.append(
            [
                name,
                f"{one['requests_per_second']:,.0f}",
                f"{one['requests_per_second'] / base['requests_per_second']:.0%}",
                f"{one['tokens_per_second']:,.0f}",
                f"{one['tokens_per_second'] / base['tokens_per_second']:.0%}",
                f"{one['ttft_p50_ms']:.1f}",
                f"{one['errors']:.0f}",
            ]
        )
    columns = [
        "way, replicas", "requests/s", "of direct", "tokens/s", "of direct", "ttft p50 ms",
        "errors",
    ]  # fmt: skip
    print_table("through proxies", columns, rows)
    return {"proxies": found}


def _servers(stack: ExitStack, model: str, count: int, cores: Cores) -> list[str]:
    """Start servers of one model without a store, and return their URLs."""
    from loadtest.subject import Subject

    servers = [
        stack.enter_context(
            Subject(
                before=partial(os.sched_setaffinity, 0, cores.servers),
                model=model,
                device="cpu",
                threads=1,
                deterministic=True,
            )
        )
        for _ in range(count)
    ]
    for server in servers:
        asyncio.run(server.started())
    return [server.url for server in servers]
