"""Whether ten thousand idle or slow connections hold up anybody else.

    python -m loadtest.idle

A third of the connections send nothing, a third a piece of a head, a third a head and a piece of
its body. While they are open, `/health` and a short generation are timed, each on a connection of
its own. Starts its own server. Exit code 1 if a `/health` takes longer than 100 ms, 2 if it cannot
be measured.
"""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path

from loadtest.report import command_line, percentile, print_environment, save_json
from loadtest.subject import Subject
from service.terminal.bench.connection import Server

BAR = 0.1  # seconds, the slowest /health
SPARE = 500  # files beside the connections
AT_ONCE = 200  # connections opened together
BEGINNINGS = (
    b"",
    b"POST /v1/generate HTTP/1.1\r\nhost: x\r\n",
    b'POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompts": [',
)


def raise_limit(files: int) -> None:
    """Let this process open `files` files. Raises RuntimeError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        if hard != resource.RLIM_INFINITY and hard < files:
            raise RuntimeError(f"{files} files are needed; the limit is {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


async def _open(url: str, count: int) -> list[asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    writers: list[asyncio.StreamWriter] = []
    while len(writers) < count:
        wave = min(AT_ONCE, count - len(writers))
        opened = await asyncio.gather(
            *(asyncio.open_connection(host, int(port)) for _ in range(wave))
        )
        for _, writer in opened:
            writer.write(BEGINNINGS[len(writers) % len(BEGINNINGS)])
            writers.append(writer)
    return writers


async def _times(url: str, path: str, body: bytes | None, count: int) -> list[float]:
    """Return the seconds from a new connection to its answer, `count` times.

    Raises RuntimeError for any other status than 200.
    """
    server = Server(url, {})
    request = server.request(path, body or b"", "GET" if body is None else "POST")
    times = []
    for _ in range(count):
        begun = time.monotonic()
        connection = await server.connect()
        status = await connection.ask(request, lambda _: None)
        times.append(time.monotonic() - begun)
        connection.close()
        if status != 200:
            raise RuntimeError(f"{path} was answered {status}")
    return times


async def run(subject: Subject, connections: int, asks: int) -> dict[str, list[float]]:
    """Measure /health and a generation without the connections and with them."""
    await subject.started()
    body = b'{"prompts": ["ROMEO:"], "max_tokens": 4}'
    found = {
        "health alone": await _times(subject.url, "/health", None, asks),
        "generate alone": await _times(subject.url, "/v1/generate", body, asks),
    }
    writers = await _open(subject.url, connections)
    found["health"] = await _times(subject.url, "/health", None, asks)
    found["generate"] = await _times(subject.url, "/v1/generate", body, asks)
    gone = sum(writer.transport.is_closing() for writer in writers)
    if gone:
        raise RuntimeError(f"{gone} of the connections were closed meanwhile")
    for writer in writers:
        writer.transport.abort()
    return found


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every /health was in time, 1 if not, 2 if it cannot be measured."""
    options = command_line("idle", __doc__)
    options.add_argument("--connections", type=int, default=10_000, help="idle or slow connections")
    options.add_argument("--asks", type=int, default=200, help="timed requests of each kind")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    try:
        raise_limit(args.connections + SPARE)
        with Subject() as subject:
            found = asyncio.run(run(subject, args.connections, args.asks))
    except (RuntimeError, OSError) as error:
        print(f"not measured: {error}")
        return 2
    for name, times in found.items():
        p50, p99 = (1000 * percentile(times, p) for p in (50, 99))
        print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, slowest {1000 * max(times):.1f} ms")
    good = max(found["health"]) <= BAR
    print(f"/health beside {args.connections:,} connections: {'pass' if good else 'FAIL'}")
    save_json(args.json, {"connections": args.connections, **found})
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
