"""The Grafana dashboard as a list of questions, and the JSON that Grafana reads.

    python docker/grafana/dashboard.py > docker/grafana/dashboards/minserve.json

Rows stand in the order in which an operator asks: is it up, how fast, how loaded, how well used,
what is wrong. A test holds the JSON against this file; docker/verify/watched.py evaluates every
query against a Prometheus that watches a running service.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

SOURCE = {"type": "prometheus", "uid": "prometheus"}
OF = '{job="minserve",instance=~"$instance"}'
WIDTH, HEIGHT = 24, 7  # of Grafana's grid: a row's columns, a panel's lines


def of(name: str, matchers: str = "") -> str:
    """A series of the chosen instances."""
    return f"{name}{OF[:-1]}{',' if matchers else ''}{matchers}}}"


def rate(name: str, matchers: str = "") -> str:
    """Its growth per second over a window that fits the picture."""
    return f"rate({of(name, matchers)}[$__rate_interval])"


def quantile(share: float, name: str) -> str:
    """A quantile of a histogram over all chosen instances."""
    return f"histogram_quantile({share}, sum by (le) ({rate(name + '_bucket')}))"


def mean(name: str, by: str = "") -> str:
    """The mean of a histogram."""
    group = f" by ({by})" if by else ""
    return f"sum{group} ({rate(name + '_sum')}) / sum{group} ({rate(name + '_count')})"


@dataclass(frozen=True)
class Panel:
    """A question: its queries by legend, and how the answer is shown."""

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    log: bool = False  # a logarithmic axis
    most: float | None = None
    steps: list[tuple[float | None, str]] = field(default_factory=list)  # colours from a value on


def halves(name: str) -> dict[str, str]:
    """Median and 99th percentile."""
    return {"p50": quantile(0.5, name), "p99": quantile(0.99, name)}


GOOD_FROM_ONE = [(None, "red"), (1.0, "green")]
BAD_FROM_ONE = [(None, "green"), (1.0, "red")]

ROWS: dict[str, list[Panel]] = {
    "Is it up?": [
        Panel(
            "Instances that answer",
            "Of those that Prometheus asks. Fewer than all: MinserveDown.",
            {"{{instance}}": of("up")},
            kind="stat", width=6, steps=GOOD_FROM_ONE,
        ),
        Panel(
            "Alerts that fire", "Each has an entry in docker/README.md.",
            {"alerts": 'count(ALERTS{alertname=~"Minserve.+",alertstate="firing"}) or vector(0)'},
            kind="stat", width=6, steps=BAD_FROM_ONE,
        ),
        Panel(
            "Model", "What is loaded, and on what.",
            {"{{name}} {{dtype}} on {{device_name}}": of("minserve_model_info")},
            kind="stat", width=12,
        ),
        Panel(
            "Requests by outcome",
            "invalid: the client was wrong. refused: no room, or not ready. "
            "cancelled: the client left. timeout: the request's time was over. "
            "error: the server failed.",
            {"{{outcome}}": f"sum by (outcome) ({rate('minserve_requests_total')})"},
            unit="reqps", width=12,
        ),
        Panel(
            "Requests by endpoint", "All outcomes.",
            {"{{endpoint}}": f"sum by (endpoint) ({rate('minserve_requests_total')})"},
            unit="reqps", width=12,
        ),
    ],
    "How fast?": [
        Panel(
            "Time to first token", "From a request's arrival, the queue included.",
            halves("minserve_time_to_first_token_seconds"), unit="s", log=True,
        ),
        Panel(
            "Time between tokens", "Per token, after the first.",
            halves("minserve_inter_token_latency_seconds"), unit="s", log=True,
        ),
        Panel(
            "Whole answers", "From a request's arrival until the last byte.",
            halves("minserve_e2e_request_latency_seconds"), unit="s", log=True,
        ),
        Panel(
            "Scores", "From a request's arrival until the last byte.",
            halves("minserve_score_latency_seconds"), unit="s", log=True,
        ),
        Panel(
            "Where the time goes",
            "Means per request: waiting for a slot, reading the prompt, generating.",
            {
                "queue": mean("minserve_request_queue_time_seconds"),
                "prompt": mean("minserve_request_prefill_time_seconds"),
                "decode": mean("minserve_request_decode_time_seconds"),
            },
            unit="s",
        ),
        Panel(
            "An engine step", "Means: what a step spent on prompts, and on decoding.",
            {"{{phase}}": mean("minserve_engine_step_seconds", "phase")}, unit="s",
        ),
    ],
    "How loaded?": [
        Panel(
            "Running and waiting", "Sequences that hold a slot, requests that wait for one.",
            {
                "running": f"sum({of('minserve_requests_running')})",
                "waiting": f"sum({of('minserve_requests_waiting')})",
            },
        ),
        Panel(
            "Slots used", "Of --max-slots.",
            {"{{instance}}": of("instance:minserve_state_slots_used:ratio")},
            unit="percentunit", most=1.0,
        ),
        Panel(
            "Queue used", "Of --max-waiting or --max-waiting-tokens, whichever is nearer.",
            {"{{instance}}": of("instance:minserve_queue_used:ratio")},
            unit="percentunit", most=1.0,
        ),
        Panel(
            "Sequences in a step", "The batch.",
            {**halves("minserve_step_batch_size"), "mean": mean("minserve_step_batch_size")},
        ),
        Panel(
            "Refused",
            "queue_full: more than the queue holds. share_full: more than one key's part of it. "
            "state_quota: more states than one key may have.",
            {
                "{{code}}": "sum by (code) ("
                + rate("minserve_request_errors_total", 'code=~"queue_full|share_full|state_quota"')
                + ")"
            },
            unit="reqps",
        ),
        Panel(
            "Prompt tokens that wait", "In the queue.",
            {"tokens": f"sum({of('minserve_waiting_prompt_tokens')})"},
        ),
    ],
    "How well used?": [
        Panel(
            "Tokens per second",
            "Prompts read (what a cached state had read left out), and generated.",
            {
                "prompts": f"sum({rate('minserve_prompt_tokens_total')})",
                "generated": f"sum({rate('minserve_generation_tokens_total')})",
            },
        ),
        Panel(
            "Prompt tokens found in the cache", "Of those looked up.",
            {
                "share": f"sum({rate('minserve_prefix_cache_hits_tokens_total')}) / "
                f"sum({rate('minserve_prefix_cache_queries_tokens_total')})"
            },
            unit="percentunit", most=1.0,
        ),
        Panel(
            "Cache hits, and misses by reason",
            "new: nothing of the prompt was known. unheld: its state had left. unaligned: "
            "--deterministic, not at a multiple of 128. short: not worth it.",
            {
                "hit": f"sum({rate('minserve_prefix_cache_hits_total')})",
                "{{reason}}": f"sum by (reason) ({rate('minserve_prefix_cache_misses_total')})",
            },
            unit="reqps",
        ),
        Panel(
            "Bytes of states", "By where they lie.",
            {"{{tier}}": f"sum by (tier) ({of('minserve_state_bytes')})"}, unit="bytes",
        ),
        Panel(
            "States that had to leave", "By the tier that was full.",
            {"{{tier}}": f"sum by (tier) ({rate('minserve_state_evictions_total')})"}, unit="ops",
        ),
        Panel(
            "States kept under an id", "Sessions are such states.",
            {"states": f"sum({of('minserve_states')})"},
        ),
        Panel(
            "States looked up in the shared store",
            "memory: this server had the newest version. store: it was read. refused: another turn "
            "was running. unavailable: MinserveStateStoreUnavailable.",
            {"{{result}}": f"sum by (result) ({rate('minserve_state_fetches_total')})"},
            unit="ops",
        ),
        Panel(
            "Seconds to look up a state", "In the shared store; a request waits for it.",
            halves("minserve_state_fetch_seconds"), unit="s", log=True,
        ),
        Panel(
            "Seconds to store a state", "In the shared store, until it has acknowledged.",
            halves("minserve_state_store_write_seconds"), unit="s", log=True,
        ),
        Panel(
            "Prompt tokens of a request", "",
            halves("minserve_request_prompt_tokens"), width=12, log=True,
        ),
        Panel(
            "Generated tokens of a request", "",
            halves("minserve_request_generation_tokens"), width=12, log=True,
        ),
    ],
    "What is wrong?": [
        Panel(
            "Errors by code", "Refusals and clients' own mistakes included.",
            {"{{code}}": f"topk(8, sum by (code) ({rate('minserve_request_errors_total')}))"},
            unit="reqps",
        ),
        Panel(
            "Answers by status", "Every path.",
            {"{{status}}": f"sum by (status) ({rate('minserve_http_requests_total')})"},
            unit="reqps",
        ),
        Panel(
            "Engines started again", "In the hour before.",
            {"{{instance}}": f"increase({of('minserve_engine_restarts_total')}[1h])"},
            steps=BAD_FROM_ONE,
        ),
        Panel(
            "Requests by engine", "How evenly several engines are loaded.",
            {"{{engine}}": f"sum by (engine) ({of('minserve_engine_requests')})"},
        ),
        Panel(
            "Engines that are missing", "Of those that are meant to serve.",
            {"{{instance}}": f"{of('minserve_engines')} - {of('minserve_engines_serving')}"},
            steps=BAD_FROM_ONE,
        ),
        Panel(
            "States that could not be stored", "In the hour before; MinserveStatesNotStored.",
            {"{{instance}}": f"increase({of('minserve_state_store_errors_total')}[1h])"},
            steps=BAD_FROM_ONE,
        ),
        Panel(
            "Connections cut",
            "stalled: the client read nothing. late_head: it sent no whole head.",
            {"{{reason}}": f"sum by (reason) ({rate('minserve_connections_cut_total')})"},
            unit="ops",
        ),
        Panel(
            "Until a client that left is released", "Messages of the engine; MinserveHoldsSlots.",
            halves("minserve_disconnect_release_rounds"),
        ),
        Panel(
            "Checking an unknown grammar", "Waiting for a turn left out.",
            halves("minserve_grammar_compile_seconds"), unit="s", log=True,
        ),
    ],
}  # fmt: skip


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    steps = panel.steps or [(None, "green")]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": color} for value, color in steps],
        },
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "stat":
        options = {
            "colorMode": "value",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "name" if panel.title == "Model" else "auto",
        }
    elif panel.log:
        del defaults["min"]  # a logarithm has no zero
        defaults["custom"] = {"scaleDistribution": {"type": "log", "log": 10}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + order),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for order, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "uid": "minserve",
        "title": "minserve",
        "tags": ["minserve"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "instance",
                    "label": "Instance",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": 'label_values(up{job="minserve"}, instance)',
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".+",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The JSON, with a panel on each line."""
    whole = dashboard()
    panels = ",\n".join("  " + json.dumps(panel) for panel in whole.pop("panels"))
    return json.dumps(whole, indent=1)[:-2] + f',\n "panels": [\n{panels}\n ]\n}}\n'


if __name__ == "__main__":
    sys.stdout.write(text())
