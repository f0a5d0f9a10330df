"""The engine's host side alone: tokens per second that its loop can plan, commit and send.

The whole engine process's loop runs, scheduler, events and encoding included, around a mock runner
that says that every sequence drew the same token:
    free     it costs nothing: what is left is the time that the host needs per token
    paced    its steps take as long as a device's would, while the host does other things: how much
             of the device's time the engine uses
    turning  the same with four times as many requests as slots and answers of `--answers` tokens,
             so that some end and others begin all the time
Time is the process's CPU time without the mock's own, to which waiting for the mock device adds as
much as is left to wait, so that other work on the machine does not count.

    python -m loadtest.host --batch 1 64 1024 --step-ms 0.12 0.26 0.57
"""

from __future__ import annotations

import argparse
import math
import random
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
ENDLESS = 1 << 30
TURNS = 4  # requests per slot


class Clock:
    """CPU time of this process, corrected."""

    def __init__(self) -> None:
        self._correction = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._correction

    def skip_to(self, moment: float) -> None:
        """Waits, without waiting."""
        self._correction += max(0.0, moment - self())

    def forget_since(self, moment: float) -> None:
        """Time since then does not count."""
        self._correction -= self() - moment


class MockRunner:
    """Draws TOKEN for everybody, up to max_tokens, and says that a step took `step_seconds`; with
    `paced`, it does, and reading prompts takes as long as one.

    A paced round begins when the one before it has ended and goes on while the host does other
    things, as on a GPU.
    """

    most_steps = MOST_STEPS
    overlaps = True
    grammars = None

    def __init__(self, slots: int, step_seconds: float, paced: bool, clock: Clock) -> None:
        self._clock = clock
        self._step_seconds = step_seconds
        self._paced = paced
        self._busy_until = 0.0
        self._most: dict[int, int] = {}  # tokens, by key
        self._rows: list[int] = []  # of the batch: tokens still to draw
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

    def start(self, plan: Plan) -> tuple[StepResult, float]:
        begin = self._clock()
        seconds = self._step_seconds * plan.steps if plan.decodes else 0.0
        reading = self._step_seconds if plan.prefill else 0.0
        self._busy_until = max(self._busy_until, begin) + reading + seconds
        for admission in plan.admit:
            self._most[admission.key] = admission.request.sampling.max_tokens
        sampled = [Sampled(chunk.key, TOKEN, None) for chunk in plan.prefill if chunk.sample]
        drawn = self._draw(plan) if plan.plain else None
        self._clock.forget_since(begin)
        return StepResult(sampled, drawn, decode_seconds=seconds), self._busy_until

    def _draw(self, plan: Plan) -> Drawn:
        if not plan.again:
            self._rows = []
        for ended in plan.leave:
            self._rows[ended] = 0
        self._rows += [0] * (1 + max(plan.at, default=-1) - len(self._rows))
        for at, row in zip(plan.at, plan.decode, strict=True):
            self._rows[at] = self._most[row.key] - row.position
        steps = plan.steps
        over = {number: left for number, left in enumerate(self._rows) if left <= steps}
        self._rows = [left - steps if left > steps else 0 for left in self._rows]
        return Drawn(self._token * (len(self._rows) * steps), over)

    def finish(self, pending: tuple[StepResult, float]) -> StepResult:
        result, end = pending
        if self._paced:
            self._clock.skip_to(end)
        return result


class EncodingMailbox:
    """One client: submits `requests`, encodes what comes, and ends the loop after `tokens` tokens
    or when all have been answered."""

    def __init__(self, requests: list[Request], tokens: float) -> None:
        self._coming = requests
        self._unanswered = len(requests)
        self._wanted = tokens
        self._encoder = msgspec.msgpack.Encoder()
        self.tokens = 0

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine]]:
        coming, self._coming = self._coming, []
        for request in coming:
            yield "client", request
        if self.tokens >= self._wanted or not self._unanswered:
            yield "client", Shutdown()

    def send(self, client: Hashable, message: FromEngine) -> None:
        self._encoder.encode(message)
        if isinstance(message, StepEvents):
            self.tokens += message.stats.decode_tokens
            self._unanswered -= len(message.finished)


def measure(
    batch: int, lengths: list[int], tokens: float, step_seconds: float, paced: bool
) -> float:
    """Tokens per second of streams of these lengths in `batch` slots, until `tokens` have come or
    all have ended, in rounds of as many steps as the engine takes of steps of `step_seconds`."""
    requests = [
        Request(
            id=id,
            prompt=pack_ids([1]),
            sampling=SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
        )
        for id, length in enumerate(lengths)
    ]
    mailbox = EncodingMailbox(requests, tokens)
    clock = Clock()
    engine = Engine(MockRunner(batch, step_seconds, paced, clock), clock)
    begin = clock()
    EngineLoop(engine, mailbox).run()
    return mailbox.tokens / (clock() - begin)


def turning(batch: int, low: int, high: int) -> list[int]:
    """Lengths of answers, the same ones every time."""
    chance = random.Random(batch)
    return [chance.randint(low, high) for _ in range(TURNS * batch)]


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 64, 1024])
    options.add_argument(
        "--step-ms", type=float, nargs="+", default=[0.12, 0.26, 0.57], help="one for each batch"
    )
    options.add_argument("--tokens", type=int, default=1 << 19, help="in all, at each batch size")
    options.add_argument("--seconds", type=float, default=1.0, help="of each run that is paced")
    options.add_argument(
        "--answers", type=int, nargs=2, default=[128, 384], help="shortest and longest, turning"
    )
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    if len(args.step_ms) != len(args.batch):
        options.error("--step-ms needs as many values as --batch")
    figures, rows = [], []
    for batch, step_ms in zip(args.batch, args.step_ms, strict=True):
        device = 1000 * batch / step_ms
        endless, short = [ENDLESS] * batch, turning(batch, *args.answers)
        cases = {
            "free": (endless, args.tokens, False),
            "paced": (endless, args.seconds * device, True),
            "turning": (short, math.inf, True),
        }
        rates = {
            name: median(
                [measure(batch, lengths, tokens, step_ms / 1000, paced) for _ in range(args.repeat)]
            )
            for name, (lengths, tokens, paced) in cases.items()
        }
        figures.append({"batch": batch, "step_ms": step_ms, "device": device, **rates})
        rows.append(
            [
                str(batch),
                f"{rates['free']:,.0f}",
                f"{1e6 / rates['free']:.3f}",
                f"{step_ms:g}",
                f"{device:,.0f}",
                f"{rates['paced']:,.0f} ({rates['paced'] / device:.0%})",
                f"{rates['turning']:,.0f} ({rates['turning'] / device:.0%})",
            ]
        )
    print_environment()
    print_table(
        "engine loop on one core, mock runner; tokens/s",
        ["batch", "free", "us per token", "ms per step", "the device's", "paced", "turning"],
        rows,
    )
    save_json(args.json, {"host": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
