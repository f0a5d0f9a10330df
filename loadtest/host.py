"""The engine's host side alone: tokens per second that its loop can plan, commit and send.

The whole engine process's loop runs, scheduler, events and encoding included, around a runner that
costs nothing: it says at once that every sequence drew the same token. What is left is the time
that the host needs per token, which has to hide behind the device's. How many steps a round takes
follows from the time of a step, so that is given.

    python -m loadtest.host --batch 1 64 1024 --step-ms 0.12 0.26 0.57
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.messages import (
    FromEngine,
    ModelInfo,
    Request,
    SamplingParams,
    Shutdown,
    StepEvents,
    ToEngine,
    pack_ids,
)
from engine.plan import MOST_STEPS, Drawn, Plan, Sampled, StepResult
from loadtest.report import median, print_environment, print_table, save_json

TOKEN = 5


class FreeRunner:
    """Draws TOKEN for everybody, and says that a step took `step_seconds`."""

    most_steps = MOST_STEPS
    overlaps = True

    def __init__(self, slots: int, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._token = pack_ids([TOKEN])
        self.config = EngineConfig(
            model="mock", device="cpu", dtype="float32", max_slots=slots, max_step_tokens=1 << 20
        )
        self.info = ModelInfo(
            name="mock",
            folder="",
            fingerprint="",
            cell="mingru",
            vocab_size=257,
            eos_token_id=256,
            parameters=0,
            state_bytes=0,
            slots=slots,
            device="cpu",
            device_name="none",
            dtype="float32",
        )

    def start(self, plan: Plan) -> StepResult:
        drawn = Drawn(self._token * (len(plan.decode) * plan.steps), {}) if plan.plain else None
        sampled = [Sampled(chunk.key, TOKEN, None) for chunk in plan.prefill if chunk.sample]
        seconds = self._step_seconds * plan.steps
        return StepResult(sampled, drawn, decode_seconds=seconds)

    def finish(self, pending: StepResult) -> StepResult:
        return pending


class EncodingMailbox:
    """One client: submits `requests`, encodes what comes, and ends the loop at `tokens` tokens."""

    def __init__(self, requests: list[Request], tokens: int) -> None:
        self._requests = requests
        self._left = tokens
        self._encoder = msgspec.msgpack.Encoder()
        self.bytes = 0

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine]]:
        requests, self._requests = self._requests, []
        for request in requests:
            yield "client", request
        if self._left <= 0:
            yield "client", Shutdown()

    def send(self, client: Hashable, message: FromEngine) -> None:
        self.bytes += len(self._encoder.encode(message))
        if isinstance(message, StepEvents):
            self._left -= message.stats.decode_tokens


def measure(batch: int, tokens: int, step_seconds: float) -> float:
    """Tokens per second of `batch` streams, `tokens` in all, in rounds of as many steps as the
    engine takes of steps that last `step_seconds`."""
    sampling = SamplingParams(temperature=0, max_tokens=1 << 30, ignore_eos=True)
    prompt = pack_ids([1])
    requests = [Request(id=id, prompt=prompt, sampling=sampling) for id in range(batch)]
    mailbox = EncodingMailbox(requests, tokens)
    engine = Engine(FreeRunner(batch, step_seconds))
    begin = time.perf_counter()
    EngineLoop(engine, mailbox).run()
    return tokens / (time.perf_counter() - begin)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 64, 1024])
    options.add_argument(
        "--step-ms", type=float, nargs="+", default=[0.12, 0.26, 0.57], help="one for each batch"
    )
    options.add_argument("--tokens", type=int, default=1 << 19, help="in all, at each batch size")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    figures = []
    if len(args.step_ms) != len(args.batch):
        options.error("--step-ms needs as many values as --batch")
    for batch, step in zip(args.batch, args.step_ms, strict=True):
        rate = median([measure(batch, args.tokens, step / 1000) for _ in range(args.repeat)])
        figures.append({"batch": batch, "step_ms": step, "tokens_per_second": rate})
    print_environment()
    print_table(
        "engine loop on one core, runner that costs nothing",
        ["batch", "ms per step", "tokens/s", "us per token", "of a step's time"],
        [
            [
                str(one["batch"]),
                f"{one['step_ms']:g}",
                f"{one['tokens_per_second']:,.0f}",
                f"{1e6 / one['tokens_per_second']:.3f}",
                f"{1000 * one['batch'] / one['tokens_per_second'] / one['step_ms']:.0%}",
            ]
            for one in figures
        ],
    )
    save_json(args.json, {"host": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
