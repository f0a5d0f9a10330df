"""The command line of the HTTP load test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from service.terminal.bench.arrivals import schedule
from service.terminal.bench.client import Workload
from service.terminal.bench.lengths import parse_lengths
from service.terminal.bench.request_bodies import PATHS, RequestOptions
from service.terminal.bench.summary import Slo, parse_slo

LENGTHS = "64, uniform:16:512 or lognormal:MEDIAN:SIGMA:MOST"


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="minserve bench", description="Load test of a running server over HTTP."
    )
    options.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    options.add_argument("--api-key", help="sent as Authorization: Bearer")
    options.add_argument("--timeout", type=float, default=120.0, help="seconds per request")
    arrivals = options.add_argument_group("arrivals")
    arrivals.add_argument(
        "--arrivals", choices=("poisson", "constant", "burst", "ramp", "closed"), default="poisson"
    )
    arrivals.add_argument("--rate", type=float, default=10.0, help="mean requests per second")
    arrivals.add_argument("--rate-to", type=float, help="of a ramp: the rate at its end")
    arrivals.add_argument("--burst", type=int, default=16, help="requests that arrive at once")
    arrivals.add_argument("--requests", type=int, help="how many (default: 200)")
    arrivals.add_argument("--seconds", type=float, help="how long requests arrive, instead")
    arrivals.add_argument(
        "--max-concurrency",
        type=int,
        help="requests under way at most; with closed arrivals, the users",
    )
    arrivals.add_argument("--processes", type=int, default=1, help="client processes")
    arrivals.add_argument("--seed", type=int, default=0)
    asked = options.add_argument_group("requests")
    asked.add_argument("--endpoint", choices=tuple(PATHS), default="generate")
    asked.add_argument("--no-stream", action="store_true", help="ask for plain answers")
    asked.add_argument("--batch", type=int, default=1, help="prompts per request")
    asked.add_argument(
        "--prompt-length", default="uniform:16:512", help=f"characters (or ids): {LENGTHS}"
    )
    asked.add_argument("--output-length", default="64", help=f"tokens: {LENGTHS}")
    asked.add_argument("--data", type=Path, help="text file that prompts are cut from")
    asked.add_argument("--lines", type=Path, help="text file with a prompt on each line")
    asked.add_argument("--ids", type=int, metavar="N", help="prompts are token ids below N")
    asked.add_argument("--temperature", type=float, default=0.8)
    asked.add_argument("--model", help="name the model in every request")
    asked.add_argument("--body", help="further fields of every body, as a JSON object")
    report = options.add_argument_group("report")
    report.add_argument("--slo", help="what a good request keeps: ttft=200ms,tpot=20ms,e2e=5s")
    report.add_argument("--json", type=Path, help="also write the figures here")
    report.add_argument("--html", type=Path, help="also write a report with plots here")
    report.add_argument(
        "--compare", type=Path, nargs=2, metavar="JSON", help="compare two written runs instead"
    )
    sweep = options.add_argument_group("sweep")
    sweep.add_argument(
        "--sweep", metavar="LOW:HIGH", help="find the highest rate within --slo by bisection"
    )
    sweep.add_argument("--sweep-share", type=float, default=0.99, help="that must keep the SLO")
    sweep.add_argument("--sweep-precision", type=float, default=0.05, help="of the rate found")
    return options


def _fields(text: str) -> dict[str, Any]:
    """The value of --body. Raises ValueError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--body {text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f'--body {text!r}: it must be an object, as in {{"top_p": 0.9}}')
    return found


def _check_measured(slo: Slo, asked: RequestOptions) -> None:
    """Raises ValueError for an SLO with a limit of what no answer will tell."""
    streamed = [name for name in slo.limits if name != "e2e"]
    if streamed and not asked.streams:
        raise ValueError(
            f"--slo {streamed[0]}: only streamed answers tell it, and neither --no-stream nor "
            "--endpoint score asks for one; allowed with these: e2e"
        )
    between = [name for name in streamed if name != "ttft"]
    if between and asked.answer_lengths.most == 1:
        raise ValueError(
            f"--slo {between[0]}: answers of one token do not tell it; allowed with "
            f"--output-length {asked.answer_lengths.most}: ttft, e2e"
        )


def workload_of(args: argparse.Namespace) -> Workload:
    """All that is to be done, before it is dealt out. Raises ValueError."""
    if sum(source is not None for source in (args.data, args.lines, args.ids)) > 1:
        raise ValueError("--data, --lines and --ids exclude each other")
    if args.requests is not None and args.seconds is not None:
        raise ValueError("--requests and --seconds exclude each other")
    for name in ("requests", "seconds", "max_concurrency", "ids", "timeout"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be above 0")
    count = 200 if args.requests is None and args.seconds is None else args.requests
    asked = RequestOptions(
        endpoint=args.endpoint,
        stream=not args.no_stream,
        batch=args.batch,
        prompt_lengths=parse_lengths(args.prompt_length),
        answer_lengths=parse_lengths(args.output_length),
        text=args.data,
        lines=args.lines,
        vocabulary=args.ids,
        temperature=args.temperature,
        model=args.model,
        extra=None if args.body is None else _fields(args.body),
    )
    if args.slo is not None:
        _check_measured(parse_slo(args.slo), asked)
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    common: dict[str, Any] = {
        "url": args.url,
        "asked": asked,
        "headers": headers,
        "timeout": args.timeout,
        "seed": args.seed,
    }
    if args.arrivals == "closed":
        if args.max_concurrency is None:
            raise ValueError("closed arrivals need --max-concurrency, the number of users")
        return Workload(closed=args.max_concurrency, count=count, seconds=args.seconds, **common)
    due = schedule(
        args.arrivals,
        args.rate,
        count=count,
        seconds=args.seconds,
        rate_to=args.rate_to,
        burst=args.burst,
        seed=args.seed,
    )
    return Workload(due=due, most_at_once=args.max_concurrency, **common)
