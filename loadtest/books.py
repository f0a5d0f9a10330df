"""Whole books over HTTP: each in one request, beside a steady stream of short requests.

    python -m loadtest.books library.txt
    python -m loadtest.books library.txt --url http://127.0.0.1:8000 --pid SERVER_PID

Sends the longest documents of files and folders one after another (lines <|endoftext|> part a
file's documents). Reports the time to the first token, prompt tokens/s, the server's memory, and
the latencies of the short requests without a book and beside each. Starts its own server unless
--url is given. Exit code 1 if a book is neither answered nor refused with 400 or 413, or if a short
request is not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest.memory import resident_bytes
from loadtest.report import command_line, print_environment, print_table, save_json
from loadtest.subject import Subject
from service.terminal.bench.client import Client, Workload
from service.terminal.bench.lengths import parse_lengths
from service.terminal.bench.request_bodies import Body, Endpoint, RequestBodies, RequestOptions
from service.terminal.bench.responses import Record
from service.terminal.bench.summary import figures, series
from service.text.documents import (
    END_OF_TEXT,
    ByteRange,
    document_ranges,
    files_of,
    read_documents,
)

LOOK = 0.5  # seconds between looks at the server's memory
REFUSALS = ("400", "413")  # a limit of the server
WARM_UP = 3  # short requests before the measurement


@dataclass(frozen=True)
class Place:
    """A document's place in a file."""

    path: Path
    within: ByteRange

    @property
    def size(self) -> int:
        """Number of the document's bytes."""
        assert self.within.end is not None
        return self.within.end - self.within.begin

    def read(self) -> tuple[str, str]:
        """Return its name and its text."""
        [document] = read_documents([self.path], within=self.within)
        return document.first_line.removeprefix("Title:").strip(), document.text


def places(paths: Sequence[Path]) -> list[Place]:
    """Return where all documents lie. Raises OSError and ConfigError."""
    return [
        Place(path, within)
        for path in files_of(paths)
        for within in document_ranges(path, END_OF_TEXT)
    ]


def longest(found: Sequence[Place], count: int, most: int | None) -> list[Place]:
    """Return the `count` longest documents of at most `most` bytes, the longest first.

    Raises ValueError if there is none.
    """
    allowed = [place for place in found if most is None or place.size <= most]
    if not allowed:
        raise ValueError("no document" if most is None else f"no document of up to {most:,} bytes")
    return heapq.nlargest(count, allowed, key=lambda place: place.size)


def joined(found: Sequence[Place], least: int) -> str:
    """Return the longest documents one after another, of `least` bytes together or all."""
    parts: list[str] = []
    size = 0
    for place in sorted(found, key=lambda place: -place.size):
        parts.append(place.read()[1])
        size += place.size
        if size >= least:
            break
    return "\n".join(parts)


def _client(url: str, asked: RequestOptions, args: argparse.Namespace) -> Client:
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    return Client(Workload(url, asked, headers, args.timeout, seed=0), time.monotonic())


class Short:
    """A steady stream of short requests."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        asked = RequestOptions(
            parse_lengths(args.short_length), parse_lengths(str(args.max_tokens))
        )
        self._bodies = RequestBodies(asked, seed=0)
        self._client = _client(url, asked, args)
        self._rate = args.rate

    async def send(self, count: int) -> None:
        """Send requests one after another, and forget them."""
        for _ in range(count):
            await self._client.send(self._bodies.draw(), self._client.now())
        self._client.records.clear()

    async def until(self, over: asyncio.Event) -> list[Record]:
        """Send requests until `over` is set; return their records when all have been answered."""
        due = self._client.now()
        async with asyncio.TaskGroup() as tasks:
            while not over.is_set():
                tasks.create_task(self._client.send(self._bodies.draw(), due))
                due += 1 / self._rate
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - self._client.now())):
                        await over.wait()
        records = self._client.records[:]
        self._client.records.clear()
        return records

    async def during(self, seconds: float) -> list[Record]:
        """Send requests for some seconds; return their records."""
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        return await self.until(over)

    def close(self) -> None:
        self._client.close()


def _short_figures(records: Sequence[Record]) -> dict[str, Any]:
    latencies = series(records)
    return {
        "requests": len(records),
        "failed": [record.outcome for record in records if not record.ok],
        "latency_ms": {
            name: figures(values) for name in ("ttft", "e2e") if (values := latencies[name])
        },
    }


def _body(text: str, endpoint: Endpoint, args: argparse.Namespace) -> Body:
    fields: dict[str, Any] = {"timeout": args.timeout}
    if endpoint == "score":
        fields["texts"] = [text]
    else:
        fields |= {"prompts": [text], "max_tokens": args.max_tokens, "temperature": 0}
        fields |= {"ignore_eos": True, "stream": True}
    return Body(msgspec.json.encode(fields), len(text.encode()))


async def _watched(memory: Callable[[], int] | None, seen: list[int]) -> None:
    while memory is not None:
        # It reads /proc for tens of milliseconds, and would hold the short requests up.
        seen.append(await asyncio.to_thread(memory))
        await asyncio.sleep(LOOK)


async def send_book(
    url: str,
    name: str,
    text: str,
    endpoint: Endpoint,
    *,
    args: argparse.Namespace,
    short: Short,
    memory: Callable[[], int] | None,
) -> dict[str, Any]:
    """Send one text beside short requests and return the figures."""
    lengths = parse_lengths(str(args.max_tokens))
    asked = RequestOptions(lengths, lengths, endpoint=endpoint)
    client = _client(url, asked, args)
    before = memory() if memory else None
    seen: list[int] = []
    over = asyncio.Event()
    beside = asyncio.create_task(short.until(over))
    watch = asyncio.create_task(_watched(memory, seen))
    try:
        await client.send(_body(text, endpoint, args), client.now())
    finally:
        over.set()
        records = await beside
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        client.close()
    [record] = client.records
    after = memory() if memory else None
    # Without a stream, until the whole answer is there.
    seconds = record.e2e if record.ttft is None else record.ttft
    read = record.prompt_tokens - record.cached_tokens
    return {
        "text": name,
        "endpoint": endpoint,
        "bytes": record.prompt_bytes,
        "outcome": record.outcome,
        "message": record.message,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "ttft": record.ttft,
        "e2e": record.e2e,
        "prompt_tokens_per_second": read / seconds if record.ok else None,
        "memory": None
        if before is None or after is None
        else {"before": before, "peak": max(before, after, *seen), "after": after},
        "short": _short_figures(records),
    }


async def measure(
    url: str, args: argparse.Namespace, memory: Callable[[], int] | None
) -> dict[str, Any]:
    """Return all figures. Raises OSError and ValueError for files and options of no use."""
    for name in ("rate", "seconds", "count", "max_tokens"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')}: allowed: above 0")
    found = places(args.paths)
    chosen = longest(found, args.count, args.most_bytes)
    short = Short(url, args)
    rows = []
    try:
        await short.send(WARM_UP)
        alone = _short_figures(await short.during(args.seconds))
        texts: list[Callable[[], tuple[str, str]]] = [place.read for place in chosen]
        if args.joined:
            texts.append(lambda: ("several, joined", joined(found, args.joined)))
        for read in texts:
            name, text = read()
            for endpoint in args.endpoint:
                rows.append(
                    await send_book(
                        url, name, text, endpoint, args=args, short=short, memory=memory
                    )
                )
    finally:
        short.close()
    return {"alone": alone, "books": rows}


def _short_cells(short: dict[str, Any]) -> list[str]:
    latencies = short["latency_ms"]
    return [
        f"{latencies[name][percent]:.1f}" if name in latencies else "-"
        for name in ("ttft", "e2e")
        for percent in ("p50", "p99")
    ] + [f"{short['requests']}"]


def _mib(row: dict[str, Any]) -> list[str]:
    memory = row["memory"]
    return [f"{memory[k] / 2**20:.0f}" if memory else "-" for k in ("before", "peak", "after")]


def print_figures(found: dict[str, Any]) -> None:
    """Print one table, and a line for each book that was not answered."""
    rows = [["no book", *["-"] * 9, *_short_cells(found["alone"])]]
    for row in found["books"]:
        rate = row["prompt_tokens_per_second"]
        rows.append(
            [
                row["text"][:40],
                row["endpoint"],
                f"{row['bytes'] / 1e6:.2f}",
                row["outcome"],
                f"{row['prompt_tokens']:,}" if row["prompt_tokens"] else "-",
                "-" if row["ttft"] is None else f"{row['ttft']:.2f}",
                "-" if rate is None else f"{rate:,.0f}",
                *_mib(row),
                *_short_cells(row["short"]),
            ]
        )
    columns = ["text", "endpoint", "MB", "outcome", "tokens", "ttft, s", "tokens/s"]
    columns += ["MiB before", "peak", "after"]
    columns += ["short: ttft p50, ms", "p99", "e2e p50", "p99", "requests"]
    print_table("whole books, and the short requests beside them", columns, rows)
    for row in found["books"]:
        if row["cached_tokens"]:
            print(
                f"{row['text']}, {row['endpoint']}: {row['cached_tokens']:,} tokens came from the "
                "prefix cache, and are not counted in tokens/s"
            )
        if row["outcome"].startswith(REFUSALS):
            print(f"{row['text']}, {row['endpoint']}: REFUSED, {row['message']}")
        elif row["outcome"] != "ok":
            print(f"{row['text']}, {row['endpoint']}: {row['outcome']} {row['message']}")
    for name, short in _short_runs(found):
        if short["failed"]:
            print(f"{len(short['failed'])} short requests failed, {name}: {short['failed'][0]}")


def _short_runs(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    beside = [(f"beside {row['text']}", row["short"]) for row in found["books"]]
    return [("no book", found["alone"]), *beside]


def judge(found: dict[str, Any]) -> bool:
    """Whether every book was answered or refused, and every short request answered."""
    books = all(row["outcome"].startswith(("ok", *REFUSALS)) for row in found["books"])
    return books and not any(short["failed"] for _, short in _short_runs(found))


def main(argv: list[str] | None = None) -> int:
    """Return 0 if nothing was lost, 1 if something was, 2 if it cannot be measured."""
    options = command_line("books", __doc__)
    options.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="files and folders")
    options.add_argument("--count", type=int, default=3, help="how many of the longest documents")
    options.add_argument("--most-bytes", type=int, help="leave longer documents out")
    options.add_argument(
        "--joined",
        type=int,
        metavar="BYTES",
        help="also send one text of so many documents that it has at least this many bytes; a "
        "server refuses more than its --max-body-bytes",
    )
    options.add_argument(
        "--endpoint",
        nargs="+",
        choices=("generate", "score"),
        default=["generate"],
        help="what to ask for each document (default: generate)",
    )
    options.add_argument("--max-tokens", type=int, default=4, help="tokens of each answer")
    options.add_argument("--rate", type=float, default=5.0, help="short requests per second")
    options.add_argument(
        "--seconds", type=float, default=10.0, help="seconds of short requests without a book"
    )
    options.add_argument(
        "--short-length", default="64", help="characters of short prompts, as in minserve bench"
    )
    options.add_argument("--timeout", type=float, default=3600.0, help="seconds for one request")
    server = options.add_argument_group("a running server")
    server.add_argument("--url", help="its URL; without it, the tool starts its own")
    server.add_argument("--pid", type=int, help="its process id on this machine, for its memory")
    server.add_argument("--api-key", help="API key, sent as Authorization: Bearer")
    own = options.add_argument_group("the tool's own server")
    own.add_argument("--model", default="library-mingru", help="its model")
    own.add_argument("--device", default="cpu", help="its device")
    own.add_argument("--threads", type=int, default=1, help="CPU threads of its engine")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    try:
        if args.url:
            pid = args.pid
            memory = None if pid is None else (lambda: resident_bytes(pid))
            found = asyncio.run(measure(args.url, args, memory))
        else:
            settings = {"model": args.model, "device": args.device, "threads": args.threads}
            with Subject(**settings) as subject:
                asyncio.run(subject.started())
                found = asyncio.run(
                    measure(subject.url, args, lambda: resident_bytes(subject.process.pid))
                )
    except (OSError, ValueError, RuntimeError) as error:
        print(f"not measured: {error}")
        return 2
    print_figures(found)
    save_json(args.json, found)
    return 0 if judge(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
