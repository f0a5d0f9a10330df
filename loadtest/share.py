"""The share of the engine's tokens that arrives over HTTP.

    python -m loadtest.share --model 113m --device cuda     # plain batches, 1,024 slots
    python -m loadtest.share --engines 2 --api-workers 4 --processes 4   # on two GPUs
    python -m loadtest.share --model 113m --device cpu --slots 32 --batch 1 --stream \\
        --prompt-length 64 --output-length 128 --peer

First the engine alone decodes in all slots, in this process. Then a closed loop of requests keeps
its own server full, with twice as many prompts as slots (--waiting); answers are texts of a
tokenizer of the model's size. With --engines the server has several, each on a GPU, and "alone" is
the rate of one times their number.

--peer decodes 64 rows of the same model in PyTorch (in a CUDA graph, or compiled with frozen
weights), so that figures of other servers can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import EngineConfig
from engine.runner.model_runner import ModelRunner
from loadtest.grammars import make_tokenizer
from loadtest.lm_driving import GREEDY, engine_seconds, load
from loadtest.lm_measure import typical
from loadtest.lm_models import SIZES, subject
from loadtest.peers.models import plain_decoder
from loadtest.report import command_line, print_environment, print_table, save_json
from loadtest.subject import Subject
from service.terminal.bench.command import measure
from service.terminal.bench.options import LENGTHS, parser

SHARE_BAR = 0.85  # of the engine's own tokens/s, plain answers of batches
# llama-server on a Llama of the 113 M model's size, 32 streams of 64 in and 128 out on 4 cores of a
# Zen 5 server: 727 tokens/s, where PyTorch's 64 rows of this model came to 4,429, and a median of
# 632 ms until the first token.
LLAMA_SERVER, LLAMA_TTFT = 727 / 4429, 632.0
TIMES_LLAMA_SERVER, OF_LLAMA_TTFT = 3.0, 1 / 3
PEER_ROWS = 64
# Of each request to the engine alone: many rounds, of a small model on a GPU too.
TOKENS_ALONE = {"cpu": 128, "cuda": 512}
LEAST_TOKENIZER = 1000  # tokens; bytes alone are 256, and smaller models answer with ids


def engine_alone(runner: ModelRunner, args: argparse.Namespace) -> float:
    """Return the tokens per second of the engine, over all slots."""

    sampling = msgspec.structs.replace(GREEDY, logprobs=args.logprobs)
    tokens = TOKENS_ALONE[torch.device(args.device).type]

    def once() -> float:
        return engine_seconds(runner, args.slots, tokens, sampling)

    return float(args.slots / typical(once, args.seconds / 4))


def peer_alone(model: Any, args: argparse.Namespace) -> float:
    """Return the tokens per second of PyTorch."""
    decoder = plain_decoder(model, PEER_ROWS, "compile" if args.device == "cpu" else "graph")

    def steps() -> float:
        start = time.perf_counter()
        for _ in range(10):
            decoder.step()
        decoder.tokens.tolist()  # waits for the device
        return (time.perf_counter() - start) / 10

    steps()
    return float(PEER_ROWS / typical(steps, args.seconds / 4))


def over_http(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the summary of the load test over HTTP."""
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": args.device,
        "max_slots": args.slots,
        "max_waiting": 4 * args.slots,
        "engines": args.engines,
        "api_workers": args.api_workers,
    }
    if args.threads:
        settings["threads"] = args.threads
    at_once = -(-args.slots * args.engines // args.batch)
    if not args.stream:
        at_once += -(-args.waiting * at_once // 100)
    asked = [
        *("--arrivals", "closed", "--max-concurrency", str(at_once)),
        *("--batch", str(args.batch), "--temperature", "0", "--timeout", "600"),
        *("--prompt-length", args.prompt_length, "--output-length", args.output_length),
        *("--processes", str(args.processes), "--ids", str(SIZES[args.model]["vocab_size"] - 1)),
        *([] if args.stream else ["--no-stream"]),
        *([] if args.logprobs is None else ["--body", json.dumps({"logprobs": args.logprobs})]),
    ]
    with Subject(**settings) as server:
        asyncio.run(server.started())
        warm = ["--url", server.url, *asked, "--seconds", "2"]
        measure(parser().parse_args(warm))
        full = ["--url", server.url, *asked, "--seconds", str(args.seconds)]
        summary, _ = measure(parser().parse_args(full))
    return dict(summary)


def checks(
    args: argparse.Namespace, summary: dict[str, Any], engine: float, peer: float | None
) -> list[list[str]]:
    """Return rows of figure, bar and result."""
    rate = float(summary["tokens_per_second"])
    rows = []

    def row(what: str, value: float, bar: float, passes: bool, unit: str) -> None:
        rows.append([what, unit.format(value), unit.format(bar), "pass" if passes else "short"])

    share = rate / engine
    if not args.stream:
        row("of the engine's tokens/s", share, SHARE_BAR, share >= SHARE_BAR, "{:.0%}")
    if peer is not None and args.stream:
        bar = TIMES_LLAMA_SERVER * LLAMA_SERVER
        row("of PyTorch's 64 rows", rate / peer, bar, rate / peer >= bar, "{:.0%}")
        first, most = float(summary["latency_ms"]["ttft"]["p50"]), OF_LLAMA_TTFT * LLAMA_TTFT
        row("first token, p50, ms", first, most, first <= most, "{:.0f}")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every request was answered; the bars depend on the machine's speed."""
    options = command_line("share", __doc__)
    options.add_argument(
        "--model", choices=list(SIZES), default="113m", help="a model with random weights"
    )
    options.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N",
    )
    options.add_argument("--slots", type=int, default=1024, help="slots of each engine")
    options.add_argument("--batch", type=int, default=64, help="prompts per request")
    options.add_argument(
        "--stream", action="store_true", help="ask for streams, with an event per token"
    )
    options.add_argument(
        "--waiting",
        type=int,
        default=100,
        help="without --stream, requests beyond those that fill the slots, in percent: a free slot "
        "then finds a prompt while others of its request are still under way",
    )
    options.add_argument("--prompt-length", default="16", help=f"tokens: {LENGTHS}")
    options.add_argument("--output-length", default="128", help=f"tokens: {LENGTHS}")
    options.add_argument(
        "--logprobs", type=int, help="ask for log-probabilities, with this many most likely tokens"
    )
    options.add_argument(
        "--seconds", type=float, default=20.0, help="seconds of the load over HTTP"
    )
    options.add_argument("--threads", type=int, help="CPU threads of the engine")
    options.add_argument(
        "--engines", type=int, default=1, help="engines of the server, each on a GPU"
    )
    options.add_argument("--api-workers", type=int, default=1, help="API processes of the server")
    options.add_argument("--processes", type=int, default=1, help="client processes")
    options.add_argument("--peer", action="store_true", help="measure PyTorch too")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    device = torch.device(args.device)
    with subject(args.model, "mingru", device, "bfloat16") as made:
        folder = made.folder
        if SIZES[args.model]["vocab_size"] >= LEAST_TOKENIZER:
            make_tokenizer(folder, SIZES[args.model]["vocab_size"])
        peer = peer_alone(made.model, args) if args.peer else None
        values = {"threads": args.threads} if args.threads else {}
        # Prompts of one token are often the same: what is known of them would not be read again.
        config = EngineConfig(
            model=str(folder),
            device=args.device,
            max_slots=args.slots,
            share_slots=0,
            host_state_bytes=0,
            **values,
        )
        runner = load(config, [args.slots])
        engine = engine_alone(runner, args) * args.engines
        del runner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        summary = over_http(folder, args)
    rate = float(summary["tokens_per_second"])
    latency = summary["latency_ms"]["e2e"]
    alone = "engine alone" if args.engines == 1 else f"{args.engines} engines alone"
    print(
        f"{alone} {engine:,.0f} tokens/s in {args.slots} slots; over HTTP {rate:,.0f} "
        f"({rate / engine:.0%}), a request in {latency['p50']:.0f} ms at p50, "
        f"{latency['p99']:.0f} at p99"
        + (f"; PyTorch {peer:,.0f}" if peer else "")
        + "".join(f"; {one}" for one in summary["client"]["bottleneck"])
    )
    what = "streams" if args.stream else f"plain batches of {args.batch} prompts"
    print_table(what, ["", "measured", "bar", ""], checks(args, summary, engine, peer))
    save_json(args.json, {"engine": engine, "peer": peer, "summary": summary})
    return 0 if set(summary["outcomes"]) == {"ok"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
