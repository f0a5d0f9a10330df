"""Requests and tokens per second of one model, directly and through each proxy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.served import free_port
from loadtest.with_httpx import httpx

USERS = 16  # of each replica
SHORT = ("--output-length", "1", "--no-stream")  # a request is all there is
LONG = ("--output-length", "64")  # a stream of tokens
ROUTER = "vllm-router"
RECIPE = Path(__file__).parents[2] / "docker" / "routers" / "vllm-router.sh"
START_SECONDS = 60.0


def measure(
    urls: Sequence[str], seconds: float, users: int, clients: int, cores: Collection[int]
) -> dict[str, float]:
    """Return requests/s of short answers and tokens/s of streams, by `minserve bench`.

    Args:
        urls: of servers or of a proxy; the client processes take them in turns.
        seconds: of each of the two measurements.
        users: connections that ask at a time, shared evenly by the client processes.
        clients: client processes, at least one for every URL.
        cores: that they may use.
    """
    clients = max(clients, len(urls))
    each = max(1, users // clients)
    short = _bench(urls, seconds, each, clients, cores, SHORT)
    long = _bench(urls, seconds, each, clients, cores, LONG)
    return {
        "requests_per_second": sum(one["requests_per_second"] for one in short),
        "ttft_p50_ms": sum(one["ttft_p50_ms"] for one in long) / clients,
        "tokens_per_second": sum(one["tokens_per_second"] for one in long),
        "errors": sum(one["errors"] for one in (*short, *long)),
    }


def _bench(
    urls: Sequence[str],
    seconds: float,
    users: int,
    clients: int,
    cores: Collection[int],
    options: Sequence[str],
) -> list[dict[str, float]]:
    """Run the clients at the same time, and return what each has measured."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(clients)]
        running = []
        for number, path in enumerate(paths):
            command = [
                sys.executable, "-m", "service.cli", "bench", "--url", urls[number % len(urls)],
                "--arrivals", "closed", "--max-concurrency", str(users), "--seconds",
                str(seconds), "--prompt-length", "16", "--seed", str(number), "--json", str(path),
                *options,
            ]  # fmt: skip
            running.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=partial(os.sched_setaffinity, 0, cores),
                )
            )
        told = [process.communicate()[0] for process in running]
        for path, text in zip(paths, told, strict=True):
            if not path.exists():
                raise RuntimeError(f"the load test failed: {text[-1000:]}")
        return [read(json.loads(path.read_text())) for path in paths]


def read(summary: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are compared, from the JSON of `minserve bench`."""
    outcomes: dict[str, int] = summary["outcomes"]
    return {
        "requests_per_second": summary["requests_per_second"],
        "tokens_per_second": summary["tokens_per_second"],
        "ttft_p50_ms": summary["latency_ms"].get("ttft", {}).get("p50", float("nan")),
        "errors": sum(count for name, count in outcomes.items() if name != "ok"),
    }


@contextmanager
def router(urls: Sequence[str]) -> Iterator[str]:
    """Yield the URL of a vllm-router in front of these servers, started by our recipe for it.

    Raises RuntimeError if it or the recipe is not there, or it does not become ready.
    """
    if shutil.which(ROUTER) is None:
        raise RuntimeError("it is not installed")
    if not RECIPE.is_file():
        raise RuntimeError(f"{RECIPE} is not there; run it in a checkout")
    port = free_port()
    ports = {"PORT": str(port), "METRICS_PORT": str(free_port())}
    with subprocess.Popen(
        ["sh", str(RECIPE), *urls],
        env={**os.environ, **ports}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        try:
            while not _answers(f"{url}/readiness"):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("it did not become ready")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False
