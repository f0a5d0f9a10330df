"""Checks that the dashboard shows something and that the rules compute.

    python -m loadtest.watched

Starts its own server with the bundled model and a Prometheus with docker/prometheus, sends a minute
of every kind of traffic (the engine is killed once), and asks Prometheus for every query of every
panel of docker/grafana, every recorded series and every alert. Exit code 1 for a query without a
number, a rule that fails, or an alert that should fire and does not. Needs a checkout, which holds
those files, and the program `prometheus`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.report import command_line, print_environment, print_table
from loadtest.subject import Subject
from loadtest.watched.prometheus import Prometheus
from loadtest.watched.traffic import SETTINGS, Traffic

DASHBOARD = Path(__file__).resolve().parents[2] / "docker/grafana/dashboards/minserve.json"
# What Grafana puts in the place of its variables.
VARIABLES = {"$instance": ".+", "$__rate_interval": "1m"}
FIRE = {"MinserveEngineRestarts", "MinserveStepsFail"}  # for the engine was killed
SETTLE = 11.0  # seconds until what came last is scraped, and evaluated, every 5 s

Row = tuple[str, str, str, str]  # what, of what, values, verdict


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return every panel's title, legend and query, as Grafana would send them."""
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found.append((panel["title"], target["legendFormat"], query))
    return found


def shown(values: list[float]) -> tuple[str, str]:
    """Return the values in short, and the verdict: at least one value, each a number."""
    numbers = [value for value in values if math.isfinite(value)]
    text = ", ".join(f"{value:.4g}" for value in numbers[:4])
    if len(values) > 4:
        text += f", ... ({len(values)})"
    return text or "nothing", "pass" if numbers else "FAIL"


def judge(prometheus: Prometheus, dashboard: dict[str, Any]) -> list[Row]:
    """Return a row for every query and rule."""
    rows: list[Row] = []
    for title, legend, query in queries(dashboard):
        rows.append((title, legend, *shown(prometheus.values(query))))
    for rule in prometheus.rules():
        if rule["health"] != "ok":
            rows.append((rule["type"], rule["name"], rule.get("lastError", ""), "FAIL"))
        elif rule["type"] == "recording":
            rows.append(("recorded", rule["name"], *shown(prometheus.values(rule["name"]))))
        else:
            wrong = rule["name"] in FIRE and rule["state"] != "firing"
            rows.append(("alert", rule["name"], rule["state"], "FAIL" if wrong else "pass"))
    return rows


def run(args: argparse.Namespace) -> list[Row]:
    """Return all rows. Raises RuntimeError if the server or Prometheus does not start."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        subject = stack.enter_context(Subject(state_store=f"file://{folder}", **SETTINGS))
        asyncio.run(subject.started())
        with Prometheus(subject.url.removeprefix("http://"), args.prometheus) as prometheus:
            time.sleep(SETTLE)  # a counter's first value is no growth
            traffic = Traffic(subject, args.seconds)
            asyncio.run(traffic.run())
            print("answers by status:", dict(sorted(traffic.answers.items())))
            time.sleep(SETTLE)
            return judge(prometheus, json.loads(DASHBOARD.read_text(encoding="utf-8")))


def main(argv: list[str] | None = None) -> int:
    """Run the check and return the exit code."""
    options = command_line("watched", __doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="seconds of traffic")
    options.add_argument(
        "--prometheus", default="prometheus", help="path or name of the Prometheus program"
    )
    args = options.parse_args(argv)
    print_environment()
    rows = run(args)
    print_table("queries and rules", ("what", "of what", "values", "verdict"), rows)
    failed = sum(row[-1] != "pass" for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} pass")
    return 1 if failed else 0
