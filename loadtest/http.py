"""Open-loop load test of a running server: requests arrive at random times at a given rate.

Open loop means that a slow server does not slow the arrivals, so that queueing shows in the
latencies as it would for real users. `--concurrency` gives a closed loop instead.

    python -m loadtest.http --url http://127.0.0.1:8000 --rate 20 --requests 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest.prompts import Prompts
from loadtest.report import percentile, print_environment, print_table, save_json


@dataclass
class Outcome:
    """One request as the client saw it; times in seconds from its sending."""

    status: str = "ok"
    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)  # between tokens
    total: float = 0.0
    tokens: int = 0


async def _generate(client: httpx.AsyncClient, prompt: str, args: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    body = {
        "prompts": [prompt],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "ignore_eos": True,
        "stream": True,
    }
    start = last = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.status = str(response.status_code)
                return outcome
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                frame = json.loads(line[6:])
                if "error" in frame:
                    outcome.status = "error"
                    break
                ids = frame.get("token_ids") or []
                if not ids:
                    continue
                now = time.perf_counter()
                if outcome.first_token is None:
                    outcome.first_token = now - start
                else:
                    outcome.gaps.append(now - last)
                last = now
                outcome.tokens += len(ids)
    except httpx.HTTPError as error:
        outcome.status = type(error).__name__
    outcome.total = time.perf_counter() - start
    return outcome


async def _score(client: httpx.AsyncClient, prompt: str, _: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    start = time.perf_counter()
    try:
        response = await client.post("/v1/score", json={"texts": [prompt]})
        if response.status_code != 200:
            outcome.status = str(response.status_code)
        else:
            outcome.tokens = response.json()["results"][0]["num_scored_tokens"]
    except httpx.HTTPError as error:
        outcome.status = type(error).__name__
    outcome.total = time.perf_counter() - start
    return outcome


async def run(args: argparse.Namespace) -> tuple[list[Outcome], float]:
    """Sends every request; returns their outcomes and the seconds that it took."""
    prompts = Prompts(args.data, args.min_prompt, args.max_prompt, args.seed)
    send = _generate if args.endpoint == "generate" else _score
    arrivals = random.Random(args.seed)
    limit = asyncio.Semaphore(args.concurrency or args.requests)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=args.url, timeout=args.timeout, limits=limits, headers=headers
    ) as client:

        async def one(prompt: str) -> Outcome:
            async with limit:
                return await send(client, prompt, args)

        start = time.perf_counter()
        due = start
        tasks = []
        for _ in range(args.requests):
            tasks.append(asyncio.create_task(one(prompts.draw())))
            if args.rate and not args.concurrency:
                due += arrivals.expovariate(args.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        outcomes = await asyncio.gather(*tasks)
        return list(outcomes), time.perf_counter() - start


def summarize(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Percentiles over the requests that succeeded, and how the others ended."""
    served = [outcome for outcome in outcomes if outcome.status == "ok"]
    series = {
        "time_to_first_token": [o.first_token for o in served if o.first_token is not None],
        "inter_token_latency": [gap for o in served for gap in o.gaps],
        "e2e_latency": [o.total for o in served],
    }
    statuses: dict[str, int] = {}
    for outcome in outcomes:
        statuses[outcome.status] = statuses.get(outcome.status, 0) + 1
    return {
        "seconds": seconds,
        "requests_per_second": len(served) / seconds,
        "tokens_per_second": sum(o.tokens for o in served) / seconds,
        "statuses": statuses,
        "latency_ms": {
            name: {f"p{p}": 1000 * percentile(values, p) for p in (50, 90, 99)}
            for name, values in series.items()
            if values
        },
    }


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="minserve bench", description=(__doc__ or "").splitlines()[0]
    )
    options.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    options.add_argument("--endpoint", choices=("generate", "score"), default="generate")
    options.add_argument("--requests", type=int, default=200, help="how many to send")
    options.add_argument("--rate", type=float, default=10.0, help="mean arrivals per second")
    options.add_argument("--concurrency", type=int, help="closed loop with this many clients")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0.8)
    options.add_argument("--data", type=Path, help="text file that prompts are cut from")
    options.add_argument("--min-prompt", type=int, default=16, help="bytes")
    options.add_argument("--max-prompt", type=int, default=512, help="bytes")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--timeout", type=float, default=120.0, help="seconds per request")
    options.add_argument("--api-key")
    options.add_argument("--json", type=Path, help="also write the figures here")
    return options


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every request was answered 200, else 1; 2 for bad arguments."""
    args = parser().parse_args(argv)
    try:
        outcomes, seconds = asyncio.run(run(args))
    except (OSError, ValueError) as error:
        print(f"loadtest.http: error: {error}", file=sys.stderr)
        return 2
    summary = summarize(outcomes, seconds)
    print_environment()
    rows = [
        [name, *(f"{figures[p]:.2f}" for p in ("p50", "p90", "p99"))]
        for name, figures in summary["latency_ms"].items()
    ]
    print_table("latency, ms", ["series", "p50", "p90", "p99"], rows)
    print(
        f"{summary['requests_per_second']:.1f} requests/s, "
        f"{summary['tokens_per_second']:.0f} tokens/s over {seconds:.1f} s; "
        + ", ".join(f"{count} {status}" for status, count in summary["statuses"].items())
    )
    save_json(args.json, summary)
    return 0 if set(summary["statuses"]) == {"ok"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
