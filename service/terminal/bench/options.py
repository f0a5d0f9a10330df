"""The options of `minserve bench`, and the workload that they describe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from service.terminal.bench.arrivals import schedule
from service.terminal.bench.client import Workload
from service.terminal.bench.lengths import parse_lengths
from service.terminal.bench.prompts import UNITS
from service.terminal.bench.request_bodies import PATHS, RequestOptions
from service.terminal.bench.summary import Slo, parse_slo
from service.text.documents import END_OF_TEXT
from service.text.passages import STRETCH

PROMPT_LENGTH = "uniform:16:512"
LENGTHS = "64, uniform:16:512 or lognormal:MEDIAN:SIGMA:MOST"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(
        prog="minserve bench", description="Load-test a running server over HTTP."
    )
    options.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)"
    )
    options.add_argument("--api-key", help="API key, sent as Authorization: Bearer")
    options.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds for one request (default: %(default)g)",
    )
    arrivals = options.add_argument_group("arrivals")
    arrivals.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "burst", "ramp", "closed"),
        default="poisson",
        help="how requests arrive; closed: each user sends its next request when the last one has "
        "ended (default: %(default)s)",
    )
    arrivals.add_argument(
        "--rate", type=float, default=10.0, help="mean requests per second (default: %(default)g)"
    )
    arrivals.add_argument("--rate-to", type=float, help="rate at the end of a ramp")
    arrivals.add_argument(
        "--burst",
        type=int,
        default=16,
        help="requests that arrive at once with burst arrivals (default: %(default)s)",
    )
    arrivals.add_argument("--requests", type=int, help="number of requests (default: 200)")
    arrivals.add_argument(
        "--seconds", type=float, help="how long requests arrive, instead of --requests"
    )
    arrivals.add_argument(
        "--max-concurrency",
        type=int,
        help="most requests in flight; with closed arrivals, the number of users",
    )
    arrivals.add_argument(
        "--processes", type=int, default=1, help="client processes (default: %(default)s)"
    )
    arrivals.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of arrivals and requests (default: %(default)s)",
    )
    asked = options.add_argument_group("requests")
    asked.add_argument(
        "--endpoint",
        choices=tuple(PATHS),
        default="generate",
        help="endpoint to call (default: %(default)s)",
    )
    asked.add_argument("--no-stream", action="store_true", help="ask for answers without stream")
    asked.add_argument(
        "--batch", type=int, default=1, help="prompts per request (default: %(default)s)"
    )
    asked.add_argument(
        "--prompt-length",
        help=f"prompt length in characters, with --ids in tokens: {LENGTHS} "
        f"(default: {PROMPT_LENGTH})",
    )
    asked.add_argument(
        "--output-length",
        default="64",
        help=f"answer length in tokens: {LENGTHS} (default: %(default)s)",
    )
    asked.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="files and folders of books; prompts are their passages, with the lengths that these "
        f"have. Lines {END_OF_TEXT} part the books of a file",
    )
    asked.add_argument(
        "--prompt-unit",
        choices=UNITS,
        help="passages of --prompts. chapter: begins at a heading; where a book has none, about "
        f"{STRETCH:,} characters up to a paragraph's end. book: with its header "
        "(default: chapter)",
    )
    asked.add_argument("--data", type=Path, help="text file to cut prompts from")
    asked.add_argument("--lines", type=Path, help="text file with one prompt per line")
    asked.add_argument("--ids", type=int, metavar="N", help="random token ids below N as prompts")
    asked.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature (default: %(default)g)",
    )
    asked.add_argument("--model", help="model name to send with every request")
    asked.add_argument("--body", help="further fields of every request, as a JSON object")
    report = options.add_argument_group("report")
    report.add_argument(
        "--slo", help="latency limits of a good request, as in ttft=200ms,tpot=20ms,e2e=5s"
    )
    report.add_argument("--json", type=Path, help="also write the figures to this file")
    report.add_argument("--html", type=Path, help="also write a report with plots to this file")
    report.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar="JSON",
        help="compare two runs that were written with --json, and send nothing",
    )
    sweep = options.add_argument_group("sweep")
    sweep.add_argument(
        "--sweep",
        metavar="LOW:HIGH",
        help="find the highest rate that keeps --slo, by bisection between two rates",
    )
    sweep.add_argument(
        "--sweep-share",
        type=float,
        default=0.99,
        help="share of the requests that must keep the SLO (default: %(default)g)",
    )
    sweep.add_argument(
        "--sweep-precision",
        type=float,
        default=0.05,
        help="relative precision of the rate (default: %(default)g)",
    )
    return options


def _fields(text: str) -> dict[str, Any]:
    """Return the object in --body. Raises ValueError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--body {text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f'--body {text!r}: allowed: a JSON object, as in {{"top_p": 0.9}}')
    return found


def _check_measured(slo: Slo, asked: RequestOptions) -> None:
    """Raise ValueError for an SLO with a latency that the answers cannot show."""
    streamed = [name for name in slo.limits if name != "e2e"]
    if streamed and not asked.streams:
        raise ValueError(
            f"--slo {streamed[0]}: only streams show it, and --no-stream and --endpoint score ask "
            "for none; allowed with these: e2e"
        )
    between = [name for name in streamed if name != "ttft"]
    if between and asked.answer_lengths.most == 1:
        raise ValueError(
            f"--slo {between[0]}: answers of one token do not show it; allowed with "
            f"--output-length {asked.answer_lengths.most}: ttft, e2e"
        )


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload of the options, for all processes together. Raises ValueError."""
    sources = (args.prompts, args.data, args.lines, args.ids)
    if sum(source is not None for source in sources) > 1:
        raise ValueError(
            "several of --prompts, --data, --lines and --ids are given; allowed: one of them"
        )
    if args.prompts is not None and args.prompt_length is not None:
        raise ValueError(
            "--prompt-length is given with --prompts, whose passages have their own lengths; "
            "allowed: one of them (--prompt-unit chooses the passages)"
        )
    if args.prompts is None:
        if args.prompt_unit is not None:
            raise ValueError("--prompt-unit is given without --prompts")
        if args.prompt_length is None:
            args.prompt_length = PROMPT_LENGTH  # here, for a saved run to have it
    if args.requests is not None and args.seconds is not None:
        raise ValueError("--requests and --seconds are both given; allowed: one of them")
    for name in ("requests", "seconds", "max_concurrency", "ids", "timeout"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed: above 0")
    count = 200 if args.requests is None and args.seconds is None else args.requests
    asked = RequestOptions(
        endpoint=args.endpoint,
        stream=not args.no_stream,
        batch=args.batch,
        prompt_lengths=parse_lengths(PROMPT_LENGTH if args.prompts else args.prompt_length),
        answer_lengths=parse_lengths(args.output_length),
        books=tuple(args.prompts or ()),
        unit=args.prompt_unit or "chapter",
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
