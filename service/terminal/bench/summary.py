"""summarize: the figures of a run: latencies, rates, goodput, errors, and the client's own load."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from service.terminal.bench.client import Report
from service.terminal.bench.report import percentile
from service.terminal.bench.responses import Record, unpack

PERCENTS = (50, 90, 99, 99.9)
SERIES = {"ttft": "time to first token", "tpot": "time per output token after the first",
          "itl": "between events of one answer", "e2e": "end to end"}  # fmt: skip
LATE_SECONDS = 0.005  # lateness of the client's loop at p99 above which it is the bottleneck
BUSY = 0.8  # share of a core above which a client process is the bottleneck
SECONDS_OF = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Slo:
    """The latency limits of a good request, in seconds, by series.

    For `itl` the request's own 99th percentile counts.
    """

    limits: dict[str, float]

    def keeps(self, record: Record) -> bool | None:
        """Whether a request was answered within the limits.

        None if that is not measurable: an answer of one token, for example, has no time between
        tokens.
        """
        if not record.ok:
            return False
        measured = True
        for name, limit in self.limits.items():
            match name:
                case "ttft":
                    value = record.ttft
                case "e2e":
                    value = record.e2e
                case "tpot":
                    value = max(unpack(record.per_token), default=None)
                case _:
                    gaps = unpack(record.gaps)
                    value = percentile(gaps, 99) if gaps else None
            if value is None:
                measured = False
            elif value > limit:
                return False
        return True if measured else None


def parse_slo(text: str) -> Slo:
    """Parse limits such as `ttft=200ms,itl=30ms,e2e=5s`. Raises ValueError."""
    limits = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        unit = value.lstrip("0123456789.")
        if name not in SERIES or unit not in SECONDS_OF:
            raise ValueError(
                f"{part!r} is not a limit; allowed: {', '.join(SERIES)}, as in ttft=200ms,e2e=5s"
            )
        limits[name] = float(value.removesuffix(unit)) * SECONDS_OF[unit]
    return Slo(limits)


def figures(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles of values in seconds, in milliseconds."""
    ordered = sorted(values)
    found = {"mean": 1000 * sum(ordered) / len(ordered)}
    return found | {f"p{p:g}": 1000 * percentile(ordered, p) for p in PERCENTS}


def series(records: Iterable[Record]) -> dict[str, array[float]]:
    """Return all latencies of the answered requests, in seconds, by series."""
    found = {name: array("d") for name in SERIES}
    for record in records:
        if record.ok:
            if record.ttft is not None:
                found["ttft"].append(record.ttft)
            found["tpot"].extend(unpack(record.per_token))
            found["itl"].extend(unpack(record.gaps))
            found["e2e"].append(record.e2e)
    return found


def summarize(reports: Sequence[Report], slo: Slo | None = None) -> dict[str, Any]:
    """Return the figures of a run, from the reports of all its processes.

    Raises ValueError for a run without a request.
    """
    records = sorted(
        (record for report in reports for record in report.records), key=lambda record: record.due
    )
    if not records:
        raise ValueError("no request was sent")
    seconds = max(max(record.end for record in records) - records[0].due, 1e-9)
    served = [record for record in records if record.ok]
    summary: dict[str, Any] = {
        "requests": len(records),
        "seconds": seconds,
        "requests_per_second": len(served) / seconds,
        "prompts_per_second": sum(record.prompts for record in served) / seconds,
        "tokens_per_second": sum(record.tokens for record in served) / seconds,
        "prompt_tokens_per_second": sum(record.prompt_tokens for record in served) / seconds,
        "prompts": {
            "count": sum(record.prompts for record in served),
            "bytes": sum(record.prompt_bytes for record in served),
            "tokens": sum(record.prompt_tokens for record in served),
            "cached_tokens": sum(record.cached_tokens for record in served),
        },
        "outcomes": dict(Counter(record.outcome for record in records).most_common()),
        "messages": _messages(records),
        "latency_ms": {name: figures(values) for name, values in series(records).items() if values},
        "client": _client(reports, records),
    }
    refused = [record.e2e for record in records if record.outcome.startswith(("429", "503"))]
    if refused:
        summary["latency_ms"]["refusal"] = figures(refused)
    if slo is not None:
        judged = [kept for record in records if (kept := slo.keeps(record)) is not None]
        good = sum(judged)
        summary["goodput"] = {
            "slo_seconds": slo.limits,
            "requests_per_second": good / seconds,
            "share": good / len(judged) if judged else 0.0,
            "not_measured": len(records) - len(judged),
        }
    return summary


def _messages(records: Sequence[Record]) -> dict[str, str]:
    """Return the first message of each kind of error."""
    found: dict[str, str] = {}
    for record in records:
        if record.message:
            found.setdefault(record.outcome, record.message)
    return found


def _client(reports: Sequence[Report], records: Sequence[Record]) -> dict[str, Any]:
    """Return how busy and how late the client was; `bottleneck` lists what limited the run."""
    late = percentile([value for report in reports for value in unpack(report.late)] or [0.0], 99)
    sent_late = percentile([record.sent - record.due for record in records], 99)
    busiest = max(report.busy for report in reports)
    reasons = []
    if late > LATE_SECONDS:
        busy = "" if busiest > BUSY else ", because other processes used its core"
        reasons.append(f"its event loop was {1000 * late:.1f} ms late at p99{busy}")
    if busiest > BUSY:
        reasons.append(f"a client process used {busiest:.0%} of a core")
    return {
        "processes": len(reports),
        "loop_late_p99_ms": 1000 * late,
        "sent_late_p99_ms": 1000 * sent_late,
        "busiest": busiest,
        "bottleneck": reasons,
    }
