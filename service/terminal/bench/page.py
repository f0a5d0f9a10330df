"""The HTML report of a run: a single self-contained file with plots as SVG."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.terminal.bench.output import RATES, TITLES
from service.terminal.bench.responses import Record
from service.terminal.bench.summary import series

MOST_POINTS = 4000  # of one curve or point cloud
STYLE = (
    "body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;"
    "border-bottom:1px solid #ccc}td:first-child,th:first-child{text-align:left}"
    ".warning{color:#a00;font-weight:bold}svg{max-width:100%;height:auto}"
)


def save_page(path: Path, summary: dict[str, Any], records: Sequence[Record]) -> None:
    """Write the report of a run. Raises OSError."""
    latencies = summary["latency_ms"]
    columns = list(next(iter(latencies.values()), {}))
    lines = [
        [f"{name}: {TITLES[name]}", *(f"{found[column]:.2f}" for column in columns)]
        for name, found in latencies.items()
    ]
    rates = [[title, f"{summary[name]:,.1f}"] for name, title in RATES.items()]
    if "goodput" in summary:
        good = summary["goodput"]
        limits = ", ".join(f"{n} {1000 * v:g} ms" for n, v in good["slo_seconds"].items())
        rates.append([f"goodput, requests/s within {limits}", f"{good['requests_per_second']:.2f}"])
    outcomes = [[outcome, str(count)] for outcome, count in summary["outcomes"].items()]
    client = {name: value for name, value in summary["client"].items() if name != "bottleneck"}
    warnings = "".join(
        f"<p class=warning>The client was the bottleneck: {html.escape(reason)}</p>"
        for reason in summary["client"]["bottleneck"]
    )
    parts = [
        warnings,
        _table(["latency from the intended send time, ms", *columns], lines),
        _table(["rate", ""], rates),
        _table(["outcome", "requests"], outcomes),
        _plots(records, summary["seconds"]),
        _table(["run", ""], [[n, str(v)] for n, v in summary.get("run", {}).items()]),
        _table(["client", ""], [[n, f"{v:.3g}"] for n, v in client.items()]),
    ]
    title = f"Load test of {html.escape(str(summary.get('run', {}).get('url', 'a server')))}"
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n",
        encoding="utf-8",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"


def _plots(records: Sequence[Record], seconds: float) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    spread, rates, over_time, flight = figure.subplots(2, 2).flat
    for name, values in series(records).items():
        if values:
            ordered = sorted(values)
            keep = _thinned(len(ordered))
            shares = [(place + 1) / len(ordered) for place in keep]
            spread.plot([1000 * ordered[place] for place in keep], shares, label=name)
    spread.set(xscale="log", xlabel="ms", ylabel="share of all", title="latencies, cumulative")
    spread.legend()
    served = [record for record in records if record.ok]
    cloud = [served[place] for place in _thinned(len(served))]
    first = [(record.due, 1000 * record.ttft) for record in cloud if record.ttft is not None]
    whole_time = [(record.due, 1000 * record.e2e) for record in cloud]
    for name, points in (("ttft", first), ("e2e", whole_time)):
        if points:
            over_time.plot(*zip(*points, strict=True), ".", markersize=2, label=name)
    over_time.set(xlabel="s, intended send time", ylabel="ms", title="latencies over time")
    over_time.set_yscale("log")
    over_time.legend()
    whole = max(1, math.ceil(seconds))
    done, sent = [0] * (whole + 1), [0] * (whole + 1)
    for record in records:
        sent[min(whole, int(record.due))] += 1
        if record.ok:
            done[min(whole, int(record.end))] += 1
    rates.step(range(whole + 1), sent, where="post", label="due")
    rates.step(range(whole + 1), done, where="post", label="answered")
    rates.set(xlabel="s", ylabel="requests/s", title="arrivals and answers")
    rates.legend()
    changes = sorted([(r.due, 1) for r in records] + [(r.end, -1) for r in records])
    level, levels = 0, []
    for when, change in changes:
        level += change
        levels.append((when, level))
    flight.plot(*zip(*[levels[place] for place in _thinned(len(levels))], strict=True))
    flight.set(xlabel="s", ylabel="requests", title="in flight")
    for axis in (spread, rates, over_time, flight):
        axis.grid(alpha=0.3)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    return picture.getvalue()[picture.getvalue().index("<svg") :]


def _thinned(count: int) -> list[int]:
    """Return about MOST_POINTS evenly spaced indices below `count`, always with the last one."""
    step = max(1, count // MOST_POINTS)
    return sorted({*range(0, count, step), *([count - 1] if count else [])})
