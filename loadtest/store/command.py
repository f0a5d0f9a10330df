"""The command line: witness, store, servers, and what the turns tell."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from loadtest import store
from loadtest.report import command_line, percentile, print_environment, print_table, save_json
from loadtest.store.compression import Compressed, compressed
from loadtest.store.fetches import Told, quantile, told_by
from loadtest.store.models import NAMES, folder_of
from loadtest.store.placed import PLACEMENTS, Placed, placed
from loadtest.store.redis import RedisProcess, memory_of
from loadtest.store.turns import Answer, Line, witness
from loadtest.subject import SMALLEST, Subject

COMPRESSED_BYTES = 60_000_000  # of states at most
MOST_COMPRESSED = 32
SHOWN = 3  # of turns that failed, or differ


@dataclass
class Found:
    """All figures of a run."""

    state_bytes: int = 0
    witness_seconds: list[float] = field(default_factory=list)  # of each turn but the first
    witness_whole: float = 0.0
    placements: dict[str, Placed] = field(default_factory=dict)
    told: dict[str, Told] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)  # bytes a session, by how counted
    compressed: list[Compressed] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every turn was carried out as by the witness."""
        return not any(one.failed or one.different for one in self.placements.values())


def stored_bytes(url: str) -> dict[str, int]:
    """Return the bytes of a store, by how they are counted."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return memory_of(url)
    files = [one for one in Path(unquote(parts.path)).rglob("*") if one.is_file()]
    return {"disk": sum(512 * one.stat().st_blocks for one in files)}


def _settings(model: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": model,
        "device": args.device,
        "threads": 1,
        "deterministic": True,
        "max_slots": args.clients,
        "share_slots": args.share_slots,
        "host_state_bytes": args.host_state_bytes,
    }


async def _witnessed(model: str, args: argparse.Namespace, found: Found) -> list[list[Answer]]:
    with Subject(**_settings(model, args)) as subject:
        await subject.started()
        begun = time.perf_counter()
        answers, found.witness_seconds = await witness(
            subject.url, args.sessions, args.turns, args.clients
        )
        found.witness_whole = time.perf_counter() - begun
    return answers


async def _measure(
    model: str, store_url: str, args: argparse.Namespace, expected: list[list[Answer]], found: Found
) -> None:
    settings = {**_settings(model, args), "state_store": store_url}
    with ExitStack() as stack:
        subjects = [stack.enter_context(Subject(**settings)) for _ in range(args.servers)]
        for subject in subjects:
            await subject.started()
        urls = [subject.url for subject in subjects]
        empty = stored_bytes(store_url)
        for placement in args.placements:
            before = await told_by(urls)
            found.placements[placement] = await placed(
                urls, placement, expected, args.clients, args.seed
            )
            found.told[placement] = (await told_by(urls)).since(before)
            print(f"{placement}: done in {found.placements[placement].whole:.0f} s", flush=True)
        full = stored_bytes(store_url)
        sessions = args.sessions * len(args.placements)
        found.stored = {name: (full[name] - empty[name]) / sessions for name in full}
        states = await _states(urls[0], args)
        found.state_bytes = len(states[0]) if states else 0
        found.compressed = compressed(states)


async def _states(url: str, args: argparse.Namespace) -> list[bytes]:
    """Return states of some sessions as files, as the store has them."""
    line, states = Line([url]), list[bytes]()
    for session in range(min(args.sessions, MOST_COMPRESSED)):
        path = f"/v1/states/session:{args.placements[0]}{session}/content"
        status, content = await line.fetch(0, path, b"", "GET")
        if status == 200:
            states.append(content)
        if sum(map(len, states)) > COMPRESSED_BYTES:
            break
    line.close()
    return states


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _print(found: Found, args: argparse.Namespace) -> None:
    rows = [
        [
            "one server, no store", f"{args.sessions * args.turns:,}", "-",
            *(_ms(percentile(found.witness_seconds, p)) for p in (50, 99)),
            *["-"] * 6,
            f"{args.sessions * args.turns / found.witness_whole:,.0f}",
        ]
    ]  # fmt: skip
    for name, one in found.placements.items():
        told = found.told[name]
        every: Counter[float] = Counter()
        for result in ("memory", "store"):
            every.update(told.fetches[result])
        rows.append(
            [
                f"{args.servers} servers, {name}",
                f"{one.turns:,}",
                f"{100 * told.share('memory'):.1f} %",
                *(_ms(percentile(one.seconds, p)) for p in (50, 99)),
                *(_ms(quantile(every, share)) for share in (0.5, 0.99)),
                *(_ms(quantile(told.fetches["store"], share)) for share in (0.5, 0.99)),
                *(_ms(quantile(told.writes, share)) for share in (0.5, 0.99)),
                f"{one.turns / one.whole:,.0f}",
            ]
        )
    print_table(
        f"turns after the first, ms; a state's file has {found.state_bytes:,} bytes",
        [
            "", "turns", "in memory", "turn p50", "p99", "look-up p50", "p99", "read p50", "p99",
            "write p50", "p99", "turns/s",
        ],
        rows,
    )  # fmt: skip
    print(
        "bytes of the store a session:",
        ", ".join(f"{name} {value:,.0f}" for name, value in found.stored.items()),
    )
    print_table(
        "a state compressed; it costs more than it saves on a network faster than the last column",
        ["", "bytes left", "compress, ms", "decompress, ms", "network, MB/s"],
        [
            [
                one.name, f"{100 * one.share:.1f} %", f"{1e3 * one.compress:,.2f}",
                f"{1e3 * one.decompress:,.2f}", f"{one.break_even / 1e6:,.1f}",
            ]
            for one in found.compressed
        ],
    )  # fmt: skip
    for name, one in found.placements.items():
        print(f"{name}: {len(one.failed)} turns failed, {len(one.different)} texts differ")
        for line in (*one.failed[:SHOWN], *one.different[:SHOWN]):
            print(" ", line)


def _options() -> argparse.ArgumentParser:
    options = command_line("store", store.__doc__)
    options.add_argument(
        "--model",
        default=SMALLEST,
        help=f"{', '.join(NAMES[1:])}: random weights with states of that size; else a bundled "
        "model or a folder",
    )
    options.add_argument(
        "--state-store", help="URL of an empty store, redis://... or file:///... (default: a Redis)"
    )
    options.add_argument(
        "--appendfsync",
        choices=("always", "everysec", "no"),
        default="always",
        help="of the Redis that is started",
    )
    options.add_argument("--servers", type=int, default=3, help="servers on the store")
    options.add_argument("--sessions", type=int, default=2000, help="sessions of each placement")
    options.add_argument("--turns", type=int, default=10, help="turns of a session")
    options.add_argument("--clients", type=int, default=8, help="turns under way at a time")
    options.add_argument(
        "--placements",
        nargs="+",
        choices=PLACEMENTS,
        default=list(PLACEMENTS),
        help="which server gets a turn (default: both)",
    )
    options.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options.add_argument(
        "--share-slots", type=int, default=16, help="cached and kept states on a server's device"
    )
    options.add_argument(
        "--host-state-bytes", type=int, default=2**30, help="main memory of a server for states"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a turn failed or differs, 2 if nothing could be measured, else 0."""
    args = _options().parse_args(argv)
    print_environment()
    found = Found()
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = folder_of(args.model, folder)
            expected = asyncio.run(_witnessed(model, args, found))
            print(f"witness: done in {found.witness_whole:.0f} s", flush=True)
            url = args.state_store
            if url is None:
                (folder / "redis").mkdir()
                redis = RedisProcess(folder / "redis", args.appendfsync)
                url = stack.enter_context(redis).url
            asyncio.run(_measure(model, url, args, expected, found))
    except (RuntimeError, OSError) as error:
        print(f"not measured: {error}")
        return 2
    _print(found, args)
    save_json(args.json, msgspec.to_builtins(found, str_keys=True))
    return 0 if found.good else 1
