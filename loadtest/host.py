"""The engine's host side alone: tokens per second that its loop can plan, commit and send.

The whole engine process's loop runs, scheduler, events and encoding included, around a mock runner
that says that every sequence drew the same token. Once it costs nothing: what is left is the time
that the host needs per token. Once its steps take as long as a device's would while the host does
other things: how much of the device's time the engine uses. Time is the process's CPU time, to
which waiting for the mock device adds as much as is left to wait, so that other work on the machine
does not count.

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


class Clock:
    """CPU time of this process, and what was skipped."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped

    def skip_to(self, moment: float) -> None:
        """Waits, without waiting."""
        self._skipped += max(0.0, moment - self())


class MockRunner:
    """Draws TOKEN for everybody and says that a step took `step_seconds`; with `paced`, it does.

    A paced round begins when the one before it has ended and goes on while the host does other
    things, as on a GPU.
    """

    most_steps = MOST_STEPS
    overlaps = True

    def __init__(self, slots: int, step_seconds: float, paced: bool, clock: Clock) -> None:
        self._clock = clock
        self._step_seconds = step_seconds
        self._paced = paced
        self._busy_until = 0.0
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
        seconds = self._step_seconds * plan.steps
        self._busy_until = max(self._busy_until, self._clock()) + seconds
        drawn = Drawn(self._token * (len(plan.decode) * plan.steps), {}) if plan.plain else None
        sampled = [Sampled(chunk.key, TOKEN, None) for chunk in plan.prefill if chunk.sample]
        return StepResult(sampled, drawn, decode_seconds=seconds), self._busy_until

    def finish(self, pending: tuple[StepResult, float]) -> StepResult:
        result, end = pending
        if self._paced:
            self._clock.skip_to(end)
        return result


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


def measure(batch: int, tokens: int, step_seconds: float, paced: bool) -> float:
    """Tokens per second of `batch` streams, `tokens` in all, in rounds of as many steps as the
    engine takes of steps that last `step_seconds`."""
    sampling = SamplingParams(temperature=0, max_tokens=1 << 30, ignore_eos=True)
    prompt = pack_ids([1])
    requests = [Request(id=id, prompt=prompt, sampling=sampling) for id in range(batch)]
    mailbox = EncodingMailbox(requests, tokens)
    clock = Clock()
    engine = Engine(MockRunner(batch, step_seconds, paced, clock), clock)
    begin = clock()
    EngineLoop(engine, mailbox).run()
    return tokens / (clock() - begin)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 64, 1024])
    options.add_argument(
        "--step-ms", type=float, nargs="+", default=[0.12, 0.26, 0.57], help="one for each batch"
    )
    options.add_argument("--tokens", type=int, default=1 << 19, help="in all, at each batch size")
    options.add_argument("--seconds", type=float, default=1.0, help="of each run that is paced")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    if len(args.step_ms) != len(args.batch):
        options.error("--step-ms needs as many values as --batch")
    figures, rows = [], []
    for batch, step_ms in zip(args.batch, args.step_ms, strict=True):
        device = 1000 * batch / step_ms
        free, paced = (
            median([measure(batch, tokens, step_ms / 1000, pace) for _ in range(args.repeat)])
            for pace, tokens in ((False, args.tokens), (True, int(args.seconds * device)))
        )
        figures.append(
            {"batch": batch, "step_ms": step_ms, "free": free, "paced": paced, "device": device}
        )
        rows.append(
            [
                str(batch),
                f"{free:,.0f}",
                f"{1e6 / free:.3f}",
                f"{step_ms:g}",
                f"{device:,.0f}",
                f"{paced:,.0f}",
                f"{paced / device:.1%}",
            ]
        )
    print_environment()
    print_table(
        "engine loop on one core; tokens/s with a runner that costs nothing, and with a paced one",
        ["batch", "free", "us per token", "ms per step", "the device's", "paced", "of device"],
        rows,
    )
    save_json(args.json, {"host": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
