"""Overload: five times what a server can answer, and its latency right after.

    python -m loadtest.overload

Its own server with the bundled model is measured in a closed loop that fills its slots (the peak),
at half of that rate (normal latency), at five times the peak for a minute, and at half again at
once after it. Bars: refusals are quick, every accepted request is answered, tokens/s stay at the
peak's, memory does not grow, and latency afterwards is normal. Exit code 1 if a request is lost or
left in flight; the other bars depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from loadtest.report import command_line, print_environment, print_table, save_json
from loadtest.subject import Subject
from service.terminal.bench.command import measure
from service.terminal.bench.options import parser

REFUSAL_BAR = 50.0  # ms at p99
PEAK_BAR = 0.95  # of the peak's tokens/s
MEMORY_BAR = 64.0  # MiB more at the end of the overload than a third into it
AFTER_BAR = 1.25  # times the normal median, end to end
LOOK = 0.5  # seconds between looks at memory
# Of cached states, which would fill gibibytes: this is full before memory is watched.
CACHE_BYTES = 2**25

UNANSWERED, IN_FLIGHT = NEVER = ("neither answered nor refused", "left in flight")


class Memory(threading.Thread):
    """Watches a server's memory."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(daemon=True)
        self._subject = subject
        # Looking for them takes long enough to hold the load test up.
        self._pids = subject.processes()
        self._over = threading.Event()
        self.seen: list[float] = []  # MiB

    def run(self) -> None:
        while not self._over.wait(LOOK):
            self.seen.append(self._subject.memory(self._pids))

    def growth(self) -> float:
        """MiB at the end, less those after a third of the time, when all caches are full."""
        self._over.set()
        self.join()
        return self.seen[-1] - self.seen[len(self.seen) // 3] if self.seen else float("nan")


def load(subject: Subject, args: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Run the HTTP load test once and return its summary."""
    lengths = ["--prompt-length", args.prompt_length, "--output-length", args.output_length]
    asked = ["--url", subject.url, "--timeout", "300", *lengths, *options]
    summary, _ = measure(parser().parse_args(asked))
    return summary


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures. Raises RuntimeError if the server does not start."""
    settings = {
        "max_slots": args.slots,
        "max_waiting": args.waiting,
        "threads": args.threads,
        "host_state_bytes": CACHE_BYTES,
    }
    with Subject(**settings) as subject:
        asyncio.run(subject.started())
        full = ["--arrivals", "closed", "--max-concurrency", str(args.slots)]
        load(subject, args, *full, "--seconds", "3")  # so that what grows once has grown
        peak = load(subject, args, *full, "--seconds", str(args.probe))
        half = ["--rate", str(peak["requests_per_second"] / 2), "--seconds", str(args.probe)]
        normal = load(subject, args, *half, "--seed", "1")
        memory = Memory(subject)
        memory.start()
        rate = args.times * peak["requests_per_second"]
        begun = time.monotonic()
        over = load(subject, args, "--rate", str(rate), "--seconds", str(args.seconds))
        spent = time.monotonic() - begun
        growth = memory.growth()
        idle = asyncio.run(subject.idle(float("inf")))
        after = load(subject, args, *half, "--seed", "1")
    return {
        "peak": peak,
        "normal": normal,
        "overload": over,
        "after": after,
        "rate": rate,
        "spent": spent,
        "growth": growth,
        "idle": idle,
    }


def judge(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return the rows of what was measured, the bar, and whether it is reached."""
    peak, over = found["peak"], found["overload"]
    normal, after = found["normal"], found["after"]
    refusal = over["latency_ms"].get("refusal", {}).get("p99", float("nan"))
    share = over["tokens_per_second"] / peak["tokens_per_second"]
    others = {k: v for k, v in over["outcomes"].items() if k != "ok" and not k.startswith("429")}
    slower = after["latency_ms"]["e2e"]["p50"] / normal["latency_ms"]["e2e"]["p50"]
    return [
        ("refusals, p99", f"{refusal:.1f} ms", f"{REFUSAL_BAR:g} ms", refusal <= REFUSAL_BAR),
        (UNANSWERED, f"{sum(others.values())} {others or ''}", "0", not others),
        ("tokens/s of the peak", f"{share:.1%}", f"{PEAK_BAR:.0%}", share >= PEAK_BAR),
        (
            "memory growth",
            f"{found['growth']:+.0f} MiB",
            f"{MEMORY_BAR:g} MiB",
            found["growth"] <= MEMORY_BAR,
        ),
        (IN_FLIGHT, str(found["idle"] is None), "False", found["idle"] is not None),
        ("median after it, of normal", f"{slower:.2f}", f"{AFTER_BAR}", slower <= AFTER_BAR),
    ]


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a request got no answer or is left in flight, else 0.

    The other bars depend on this machine's speed and memory, so they do not affect the exit code.
    """
    options = command_line("overload", __doc__)
    options.add_argument(
        "--times", type=float, default=5.0, help="overload as a multiple of the peak's rate"
    )
    options.add_argument("--seconds", type=float, default=60.0, help="seconds of the overload")
    options.add_argument("--probe", type=float, default=10.0, help="seconds of each other run")
    options.add_argument("--slots", type=int, default=32, help="slots of the server")
    options.add_argument("--waiting", type=int, default=64, help="most requests in the queue")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    options.add_argument(
        "--prompt-length", default="64", help="prompt length in characters, as in minserve bench"
    )
    options.add_argument(
        "--output-length", default="32", help="answer length in tokens, as in minserve bench"
    )
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    found = run(args)
    rows = [
        [
            name,
            f"{found[name]['requests_per_second']:.1f}",
            f"{found[name]['tokens_per_second']:,.0f}",
            *(f"{found[name]['latency_ms']['e2e'][p]:.0f}" for p in ("p50", "p99")),
            ", ".join(f"{v} {k}" for k, v in found[name]["outcomes"].items()),
            "; ".join(found[name]["client"]["bottleneck"]),
        ]
        for name in ("peak", "normal", "overload", "after")
    ]
    columns = ["run", "answered/s", "tokens/s", "e2e p50, ms", "p99", "outcomes", "client limited"]
    print_table(f"{found['rate']:.0f} requests/s for {args.seconds:g} s", columns, rows)
    verdicts = judge(found)
    print_table(
        "overload",
        ["what", "seen", "bar", ""],
        [[what, seen, bar, "pass" if good else "short"] for what, seen, bar, good in verdicts],
    )
    save_json(args.json, found)
    lost = [what for what, *_, good in verdicts if what in NEVER and not good]
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
