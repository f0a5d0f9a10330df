"""What states cost over HTTP, and what they save.

    python -m loadtest.state
    python -m loadtest.state --context 5000 --samples 8 --length 500 --sessions 500   # a laptop

Starts its own server and asks it over one connection, sessions over several. Parts, chosen with
--only:
    copies         keep, fork, download, upload a state, and continue from one
    context        the first token after a long context: read, cached, named, kept, brought back
    samples        many samples of one prompt in one request, against one request each
    continuations  many continuations of one context scored at once, against one request each
    sessions       idle sessions, resumed at random, and their memory

The last table sets the figures against the project's bars: "pass" or "short".
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from engine.config import SHARE_SLOTS
from loadtest.report import command_line, percentile, print_environment, print_table, save_json
from loadtest.state.asker import Asker, Texts
from loadtest.state.contexts import continuations, first_tokens, reading_seconds, samples
from loadtest.state.copies import copies, restore_cost
from loadtest.state.sessions import sessions
from loadtest.subject import SMALLEST, Subject

PARTS = ("copies", "context", "samples", "continuations", "sessions")
MOST_BYTES = 5e9  # of memory for a hundred thousand sessions
MANY = 100_000
SLACK = 0.005  # seconds

Verdict = tuple[str, str, str, bool]


def judge(found: dict[str, Any]) -> list[Verdict]:
    """Return figure, bar and whether it is reached, for the parts that were measured."""
    verdicts: list[Verdict] = []
    if "copies" in found:
        cost, step = restore_cost(found["copies"]), found["copies"]["decode_step"]
        verdicts.append(_row("a device state restored, ms", 1e3 * cost, 2e3 * step))
    if "context" in found:
        times = {name: percentile(one, 50) for name, one in found["context"]["times"].items()}
        alone = times["prompt of one token"]
        for name in ("state", "session"):
            verdicts.append(_row(f"first token, {name}, ms", 1e3 * times[name], 2e3 * alone))
        bar = alone + found["context"]["reading"] + SLACK
        verdicts.append(_row("first token, cached, ms", 1e3 * times["cached"], 1e3 * bar))
    if "samples" in found:
        one = found["samples"]
        bar = 1.1 * one["prefill"] + one["decode"]
        verdicts.append(_row("samples of one prompt, s", one["together"], bar))
    if "sessions" in found:
        one = found["sessions"]
        per = 2**20 * one["memory_at_end_mib"] / one["sessions"]
        verdicts.append(_row("bytes of an idle session", per, MOST_BYTES / MANY))
        verdicts.append(_row("errors", one["errors"], 0))
    return verdicts


def _row(name: str, value: float, bar: float) -> Verdict:
    return name, f"{value:,.3f}", f"{bar:,.3f}", value <= bar


async def _measure(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    await subject.started()
    asker, texts = Asker(subject.url), Texts(args.seed)
    found: dict[str, Any] = {}
    if "copies" in args.only:
        found["copies"] = await copies(asker, texts, args.asks, subject.url)
    if "context" in args.only:
        times = await first_tokens(asker, texts, args.context, args.asks, args.share_slots)
        found["context"] = {"times": times, "reading": _reading(args)}
    asker.close()
    if "samples" in args.only:
        found["samples"] = await samples(subject.url, texts, args.length, args.samples, args.tokens)
    if "continuations" in args.only:
        found["continuations"] = await continuations(
            subject.url, texts, args.length, args.continuations
        )
    if "sessions" in args.only:
        found["sessions"] = await sessions(
            subject, texts, args.sessions, args.resumes, args.clients, args.seed
        )
    return found


def _reading(args: argparse.Namespace) -> float:
    from engine.models.loader import load_config, resolve
    from service.text.tokenizer import Tokenizer

    folder = resolve(args.model)
    tokenizer = Tokenizer.load(folder, load_config(folder).vocab_size)
    return reading_seconds(tokenizer, args.context, args.asks) if tokenizer else 0.0


def _print(found: dict[str, Any], args: argparse.Namespace) -> None:
    if "copies" in found:
        one = found["copies"]
        _print_times(
            f"a state of {one['state_bytes']:,} bytes, {one['file_bytes']:,} as a file; a decode "
            f"step of {1e3 * one['decode_step']:.3f} ms",
            one["times"],
        )
    if "context" in found:
        reading = 1e3 * found["context"]["reading"]
        _print_times(
            f"first token after {args.context:,} tokens; parsing and tokenising them takes "
            f"{reading:.2f} ms",
            found["context"]["times"],
        )
    if "samples" in found:
        one, tokens = found["samples"], args.samples * args.tokens
        print(
            f"{args.samples} samples of {args.tokens} tokens after {args.length:,}: "
            f"{tokens / one['together']:,.0f} tokens/s as n, {tokens / one['apart']:,.0f} as "
            f"requests; one prefill {one['prefill']:.3f} s, their decode {one['decode']:.3f} s, "
            f"together {one['together']:.3f} s"
        )
    if "continuations" in found:
        one = found["continuations"]
        print(
            f"{args.continuations} continuations of {args.length:,} tokens: "
            f"{one['together']:.3f} s in one request, {one['apart']:.3f} s in one each, "
            f"{one['apart'] / one['together']:.1f} times as long"
        )
    if "sessions" in found:
        one = found["sessions"]
        print(
            f"{one['sessions']:,} sessions begun in {one['create_seconds']:.1f} s, "
            f"{one['resumes']:,} resumed at random in {one['resume_seconds']:.1f} s, "
            f"{one['errors']} errors {one['first_errors'] or ''}; {one['memory_at_end_mib']:,.0f} "
            f"MiB: {one['sessions'] / max(one['memory_at_end_mib'] / 2**10, 1e-9):,.0f} per GiB"
        )


def _print_times(title: str, times: dict[str, list[float]]) -> None:
    rows = [
        [name, *(f"{1e3 * percentile(values, p):.3f}" for p in (50, 99))]
        for name, values in times.items()
    ]
    print_table(title, ["", "p50, ms", "p99, ms"], rows)


def _options() -> argparse.ArgumentParser:
    options = command_line("state", __doc__)
    options.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts to measure (default: all)",
    )
    options.add_argument("--model", default=SMALLEST, help="a bundled model or a folder")
    options.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    options.add_argument("--asks", type=int, default=50, help="timed requests of each kind")
    options.add_argument(
        "--context", type=int, default=100_000, help="length of the long context, tokens"
    )
    options.add_argument(
        "--length",
        type=int,
        default=10_000,
        help="tokens of the prompts of samples and continuations",
    )
    options.add_argument("--samples", type=int, default=64, help="samples of one prompt")
    options.add_argument("--tokens", type=int, default=32, help="tokens of each sample")
    options.add_argument(
        "--continuations", type=int, default=100, help="continuations of one context"
    )
    options.add_argument("--sessions", type=int, default=MANY, help="idle sessions to hold")
    options.add_argument("--resumes", type=int, default=20_000, help="sessions to resume at random")
    options.add_argument("--clients", type=int, default=4, help="connections that use the sessions")
    options.add_argument(
        "--share-slots",
        type=int,
        default=SHARE_SLOTS,
        help="cached and kept states on the device",
    )
    options.add_argument(
        "--host-state-bytes", type=int, default=3 * 10**9, help="main memory for states, bytes"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    return options


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a request for a session failed, 2 if nothing could be measured, else 0."""
    args = _options().parse_args(argv)
    print_environment()
    settings = {
        "model": args.model,
        "device": args.device,
        "threads": args.threads,
        "share_slots": args.share_slots,
        "host_state_bytes": args.host_state_bytes,
    }
    try:
        with Subject(**settings) as subject:
            found = asyncio.run(_measure(subject, args))
    except (RuntimeError, OSError) as error:
        print(f"not measured: {error}")
        return 2
    _print(found, args)
    rows = [[what, seen, bar, "pass" if ok else "short"] for what, seen, bar, ok in judge(found)]
    print_table("bars", ["what", "seen", "bar", ""], rows)
    save_json(args.json, found)
    return 1 if found.get("sessions", {}).get("errors") else 0


if __name__ == "__main__":
    raise SystemExit(main())
