"""The command `minserve bench`: a single run, a sweep, or a comparison of two saved runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from service.terminal.bench.extra import check_installed
from service.terminal.bench.options import parser, workload_of
from service.terminal.bench.output import print_comparison, print_summary
from service.terminal.bench.page import save_page
from service.terminal.bench.processes import run
from service.terminal.bench.report import print_environment, print_table, save_json
from service.terminal.bench.responses import Record
from service.terminal.bench.summary import parse_slo, summarize
from service.terminal.bench.sweep import Probe, highest_rate

# Options that a report does not repeat.
SILENT = {"api_key", "json", "html", "compare"}


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Do one run; return its summary and its records. Raises OSError, ValueError, RuntimeError."""
    reports = run(workload_of(args), args.processes)
    summary = summarize(reports, parse_slo(args.slo) if args.slo else None)
    summary["run"] = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in vars(args).items()
        if value is not None and name not in SILENT
    }
    return summary, [record for report in reports for record in report.records]


def load(path: Path) -> dict[str, Any]:
    """Read the summary of a run that was written with --json. Raises OSError, ValueError."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not {"latency_ms", "client"} <= found.keys():
        raise ValueError(f"{path} is not the summary of a single run; write one with --json")
    return found


def sweep(args: argparse.Namespace) -> int:
    """Search the highest rate within the SLO and print it; return exit code 0 if there is one."""
    if not args.slo or args.arrivals == "closed":
        raise ValueError("--sweep needs --slo and arrivals with a rate, not --arrivals closed")
    low, colon, high = args.sweep.partition(":")
    if not colon:
        raise ValueError(f"--sweep is {args.sweep!r}; allowed: LOW:HIGH, as in 10:1000")

    def probe(rate: float) -> Probe:
        args.rate = rate
        summary, _ = measure(args)
        found = Probe(rate, summary["goodput"]["share"], bool(summary["client"]["bottleneck"]))
        why = " (the client was the bottleneck)" if found.client_limited else ""
        print(f"{rate:.2f} requests/s: {found.share:.2%} within the SLO{why}", flush=True)
        return found

    most = float(high)
    best, probes = highest_rate(
        float(low), most, probe, share=args.sweep_share, precision=args.sweep_precision
    )
    rows = [[f"{p.rate:.2f}", f"{p.share:.2%}"] for p in sorted(probes, key=lambda p: p.rate)]
    print_table(f"sweep, {args.slo}", ["requests/s", "within the SLO"], rows)
    if best is None:
        print(f"even {low} requests/s do not keep the SLO")
    elif best == most:
        print(f"highest rate within the SLO: at least {best:.2f} requests/s, where the sweep ends")
    else:
        print(f"highest rate within the SLO: {best:.2f} requests/s")
    found = {"highest_rate": best, "at_least": best == most, "slo": args.slo}
    save_json(args.json, {**found, "probes": [vars(p) for p in probes]})
    return 0 if best is not None else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 if every request was answered with 200, else 1; 2 for errors."""
    args = parser().parse_args(argv)
    try:
        if args.html and (args.compare or args.sweep):
            raise ValueError("--html is not allowed together with --compare or --sweep")
        if args.html:
            check_installed("matplotlib")  # before the run, so that no run is lost
        if args.compare:
            print_comparison(*map(load, args.compare))
            return 0
        print_environment()
        if args.sweep:
            return sweep(args)
        summary, records = measure(args)
        print_summary(summary)
        save_json(args.json, summary)
        if args.html:
            save_page(args.html, summary, records)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        print(f"minserve bench: error: {error}", file=sys.stderr)
        return 2
    return 0 if set(summary["outcomes"]) == {"ok"} else 1
