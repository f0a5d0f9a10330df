"""Prints the figures of one run, or of two runs side by side, on the terminal."""

from __future__ import annotations

from typing import Any

from service.terminal.bench.report import print_table
from service.terminal.bench.summary import BUSY, SERIES

TITLES = SERIES | {"refusal": "until a refusal (429, 503)"}
RATES = {
    "requests_per_second": "requests/s",
    "prompts_per_second": "prompts/s",
    "tokens_per_second": "tokens/s",
    "prompt_tokens_per_second": "prompt tokens/s",
}


def print_summary(summary: dict[str, Any]) -> None:
    """Print the figures of one run."""
    latencies = summary["latency_ms"]
    if latencies:
        columns = list(next(iter(latencies.values())))
        rows = [
            [f"{name}: {TITLES[name]}", *(f"{found[column]:.2f}" for column in columns)]
            for name, found in latencies.items()
        ]
        print_table("latency from the intended send time, ms", ["series", *columns], rows)
    rates = ", ".join(f"{summary[name]:,.1f} {title}" for name, title in RATES.items())
    print(f"{rates} over {summary['seconds']:.1f} s")
    prompts = summary["prompts"]
    print(
        f"{prompts['count']:,} prompts answered: {prompts['bytes']:,} bytes, {prompts['tokens']:,} "
        f"tokens, {prompts['cached_tokens']:,} of them from the prefix cache"
    )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in summary["outcomes"].items())
    print(f"{summary['requests']} requests: {counts}")
    for outcome, message in summary["messages"].items():
        print(f"{outcome}, the first: {message}")
    if "goodput" in summary:
        good = summary["goodput"]
        limits = ", ".join(f"{n} {1000 * v:g} ms" for n, v in good["slo_seconds"].items())
        print(
            f"goodput: {good['requests_per_second']:,.2f} requests/s within {limits} "
            f"({good['share']:.1%} of all{_left_out(good['not_measured'])})"
        )
    client = summary["client"]
    print(
        f"client: {client['processes']} processes, busiest {client['busiest']:.0%} of a core, "
        f"loop late by {client['loop_late_p99_ms']:.2f} ms at p99, "
        f"sends by {client['sent_late_p99_ms']:.2f} ms"
    )
    for reason in client["bottleneck"]:
        print(f"THE CLIENT WAS THE BOTTLENECK: {reason}")
    if client["busiest"] > BUSY:
        print("use more --processes")


def _left_out(requests: int) -> str:
    return f" but {requests} of which not every limit could be measured" if requests else ""


def print_comparison(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Print the figures that both runs have, and the second divided by the first."""
    rows = []
    for name, title in RATES.items():
        if name not in first or name not in second:
            continue  # a run saved before this rate was measured
        rows.append(_row(title, first[name], second[name]))
    if "goodput" in first and "goodput" in second:
        name = "requests_per_second"
        rows.append(_row("goodput, requests/s", first["goodput"][name], second["goodput"][name]))
    for name in TITLES:
        ours, theirs = first["latency_ms"].get(name), second["latency_ms"].get(name)
        if ours and theirs:
            rows += [_row(f"{name} {column}, ms", ours[column], theirs[column]) for column in ours]
    print_table("two runs", ["figure", "first", "second", "second / first"], rows)
    for which, run in (("first", first), ("second", second)):
        for reason in run["client"]["bottleneck"]:
            print(f"in the {which} run the client was the bottleneck: {reason}")


def _row(title: str, first: float, second: float) -> list[str]:
    ratio = f"{second / first:.3f}" if first else "-"
    return [title, f"{first:,.2f}", f"{second:,.2f}", ratio]
