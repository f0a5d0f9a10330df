"""Latency at half of saturation, against bars made of the engine's own rounds.

    python -m loadtest.latency

Saturates its own server with the bundled model, then sends half of that rate. Two bars, at p99:
between two events of a stream at most 3 rounds of the engine and 5 ms; until the first token at
most the prefill, 5 rounds and 10 ms. A round is what the engine spends on one at this load, prompts
of others included. Round and prefill are means from the server's metrics of the run.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from loadtest.overload import load
from loadtest.report import command_line, print_environment, print_table, save_json
from loadtest.subject import Subject
from loadtest.with_httpx import httpx


def sums(url: str) -> dict[str, float]:
    """Return sums and counts of the histograms about the engine."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = {}
    for line in text.splitlines():
        if match := re.match(r"minserve_(\w+_(?:sum|count))(?:\{(.*)\})? (\S+)$", line):
            found[f"{match[1]}{match[2] or ''}"] = float(match[3])
    return found


def times(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a round and of a prefill between two reads of the metrics."""
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    steps = 'engine_step_seconds_{}phase="{}"'
    busy = sum(spent.get(steps.format("sum", phase), 0.0) for phase in ("prefill", "decode"))
    rounds = spent[steps.format("count", "decode")]
    prefills = spent["request_prefill_time_seconds_count"]
    return {
        "round": busy / rounds,
        "prefill": spent["request_prefill_time_seconds_sum"] / prefills,
    }


def judge(summary: dict[str, Any], engine: dict[str, float]) -> list[tuple[str, float, float]]:
    """Return (name, figure, bar) for each bar, in milliseconds."""
    turn, prefill = 1000 * engine["round"], 1000 * engine["prefill"]
    latencies = summary["latency_ms"]
    return [
        ("between events, p99", latencies["itl"]["p99"], 3 * turn + 5),
        ("first token, p99", latencies["ttft"]["p99"], prefill + 5 * turn + 10),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; always return 0, because the bars depend on the machine."""
    options = command_line("latency", __doc__)
    options.add_argument(
        "--share", type=float, default=0.5, help="share of the saturated rate to send"
    )
    options.add_argument("--seconds", type=float, default=20.0, help="seconds of the measured load")
    options.add_argument("--slots", type=int, default=32, help="slots of the server")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    options.add_argument(
        "--prompt-length", default="64", help="prompt length in characters, as in minserve bench"
    )
    options.add_argument(
        "--output-length", default="64", help="answer length in tokens, as in minserve bench"
    )
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    with Subject(max_slots=args.slots, threads=args.threads) as subject:
        asyncio.run(subject.started())
        full = ["--arrivals", "closed", "--max-concurrency", str(args.slots)]
        load(subject, args, *full, "--seconds", "2")
        peak = load(subject, args, *full, "--seconds", str(args.seconds / 2))
        rate = args.share * peak["requests_per_second"]
        before = sums(subject.url)
        summary = load(subject, args, "--rate", str(rate), "--seconds", str(args.seconds))
        engine = times(before, sums(subject.url))
    rows = judge(summary, engine)
    print(
        f"saturated at {peak['requests_per_second']:.1f} requests/s, asked {rate:.1f}; a round of "
        f"{1000 * engine['round']:.2f} ms, a prefill of {1000 * engine['prefill']:.2f} ms; "
        + "; ".join(summary["client"]["bottleneck"])
    )
    print_table(
        f"{args.share:.0%} of saturation",
        ["", "ms", "bar, ms", ""],
        [[n, f"{v:.2f}", f"{bar:.2f}", "pass" if v <= bar else "short"] for n, v, bar in rows],
    )
    save_json(args.json, {"peak": peak, "summary": summary, "engine": engine})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
