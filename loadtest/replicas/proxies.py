"""Requests and tokens per second of one model, directly and through each of Ray's proxies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

USERS = 16
SHORT = ("--output-length", "1", "--no-stream")  # a request is all there is
LONG = ("--output-length", "64")  # a stream of tokens


def measure(url: str, seconds: float) -> dict[str, float]:
    """Return requests/s of short answers and tokens/s of streams, by `minserve bench`."""
    short, long = _bench(url, seconds, *SHORT), _bench(url, seconds, *LONG)
    return {
        "requests_per_second": short["requests_per_second"],
        "ttft_p50_ms": long["ttft_p50_ms"],
        "tokens_per_second": long["tokens_per_second"],
        "errors": short["errors"] + long["errors"],
    }


def _bench(url: str, seconds: float, *options: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "service.cli", "bench", "--url", url, "--arrivals", "closed",
            "--max-concurrency", str(USERS), "--seconds", str(seconds), "--prompt-length", "16",
            "--json", str(path), *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.exists():
            raise RuntimeError(f"the load test failed: {done.stdout[-500:]}{done.stderr[-500:]}")
        return read(json.loads(path.read_text()))


def read(summary: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are compared, from the JSON of `minserve bench`."""
    outcomes: dict[str, int] = summary["outcomes"]
    return {
        "requests_per_second": summary["requests_per_second"],
        "tokens_per_second": summary["tokens_per_second"],
        "ttft_p50_ms": summary["latency_ms"].get("ttft", {}).get("p50", float("nan")),
        "errors": sum(count for name, count in outcomes.items() if name != "ok"),
    }
