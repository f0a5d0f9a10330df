"""The engine's host side alone: tokens/s that its loop can plan, commit and send.

    python -m loadtest.host --batch 1 64 1024 --step-ms 0.12 0.26 0.57
    python -m loadtest.host --batch 1024 --step-ms 0.57 --share

The loop of the engine's process runs, with scheduler, events and encoding, around a mock runner for
which every sequence draws the same token:
    free     the runner costs nothing, so what is left is the host's time per token
    paced    its steps take as long as a device's, while the host works: how much of the device's
             time the engine uses
    turning  paced, with four times as many requests as slots and answers of `--answers` tokens, so
             that requests begin and end all the time

`--share` adds what a request costs the host beyond its tokens, in microseconds of CPU time from
decoding it to encoding its answer. The load is that of `loadtest.share`: a closed loop of POSTs of
64 prompts of 16 random ids with plain answers of 128 tokens, and as many rows for cached states as
on a GPU server. The cost of the same rounds with nobody coming or going is subtracted.

Times are the process's CPU time without the mock's own, so other work on the machine counts little.
Waiting for the mock device adds what is left to wait.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine import gc_tuning
from engine.config import SHARE_SLOTS, EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop, Mailbox
from engine.protocol.events import FromEngine, ModelInfo, StepEvents
from engine.protocol.requests import Request, Shutdown, ToEngine
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.scheduler import decode_scheduler
from engine.step_plan import MOST_STEPS, Drawn, Sampled, StepPlan, StepResult
from loadtest.report import command_line, median, print_environment, print_table, save_json

TOKEN = 5000  # not one of the small integers that Python keeps
ENDLESS = 1 << 30
TURNS = 4  # requests per slot

# The load of loadtest.share, with the 113 M model.
POST = 64  # prompts
PROMPT, ANSWER = 16, 128  # tokens
SHARE_TURNS = 12  # requests per slot
VOCABULARY = 32_000
STATE_BYTES = 4 * 12 * 1152
MOST_HOST_BYTES = 2**32  # that a GPU server takes for cached states where there is enough


class Clock:
    """CPU time of this process, multiplied by `times`, plus a correction."""

    def __init__(self, times: float = 1.0) -> None:
        self._times = times
        self._correction = 0.0
        self._latest = 0.0
        self.waited = 0.0

    def __call__(self) -> float:
        self._latest = self._times * time.process_time() + self._correction
        return self._latest

    def latest(self) -> float:
        """Return the time of the latest call, without a system call.

        Reading the CPU time can cost a hundred times as much as the time of day, which an engine
        reads.
        """
        return self._latest

    def skip_to(self, moment: float) -> None:
        """Advance the clock to `moment` without waiting."""
        seconds = max(0.0, moment - self())
        self._correction += seconds
        self._latest += seconds
        self.waited += seconds

    def spend(self, seconds: float) -> None:
        """Advance the clock by `seconds` of simulated work."""
        self._correction += seconds

    def forget_since(self, moment: float) -> None:
        """Set the clock back to `moment`."""
        self._correction -= self() - moment
        self._latest = moment


class MockRunner:
    """Draws TOKEN for every row up to max_tokens, and reports steps of `step_seconds`.

    With `paced`, steps take this long, and reading the prompts of a round takes as long as one
    step. A paced round begins when the one before it has ended and continues while the host works,
    as on a GPU.
    """

    most_steps = MOST_STEPS
    overlaps = True
    grammars = None

    def __init__(
        self, slots: int, step_seconds: float, paced: bool, clock: Clock, host_bytes: int = 0
    ) -> None:
        self._clock = clock
        self._step_seconds = step_seconds
        self._paced = paced
        self._busy_until = 0.0
        self._most: dict[int, int] = {}  # tokens, by key
        self._rows: list[int] = []  # of the batch: tokens still to draw
        self._token = pack_ids([TOKEN])
        self.config = EngineConfig(
            model="mock",
            device="cpu",
            dtype="float32",
            max_slots=slots,
            share_slots=SHARE_SLOTS,
            max_step_tokens=1 << 20,
            host_state_bytes=host_bytes,
        )
        self.info = ModelInfo(
            name="mock",
            folder="",
            fingerprint="",
            family="minrnn",
            cell="mingru",
            vocab_size=VOCABULARY,
            eos_token_ids=(VOCABULARY - 1,),
            parameters=0,
            d_model=1,
            state_bytes=STATE_BYTES,
            slots=slots,
            device="cpu",
            device_name="none",
            dtype="float32",
        )

    def start(self, plan: StepPlan) -> tuple[StepResult, float]:
        begin = self._clock()
        seconds = self._step_seconds * plan.steps if plan.decodes else 0.0
        self._busy_until = max(self._busy_until, begin) + self._reading(plan) + seconds
        for admission in plan.admit:
            self._most[admission.key] = admission.request.sampling.max_tokens
        sampled = [Sampled(chunk.key, TOKEN, None) for chunk in plan.prefill if chunk.sample]
        drawn = self._draw(plan) if plan.plain else None
        self._clock.forget_since(begin)
        return StepResult(sampled, drawn, decode_seconds=seconds), self._busy_until

    def _reading(self, plan: StepPlan) -> float:
        """Return the seconds that reading the plan's prompts takes."""
        return self._step_seconds if plan.prefill else 0.0

    def _draw(self, plan: StepPlan) -> Drawn:
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

    def is_done(self, pending: tuple[StepResult, float]) -> bool:
        return True  # `finish` passes the time

    def finish(self, pending: tuple[StepResult, float]) -> StepResult:
        result, end = pending
        if self._paced:
            self._clock.skip_to(end)
        return result


class EncodingMailbox:
    """One client that submits `requests` and encodes the messages that it gets.

    It ends the loop after `tokens` tokens, or when all requests have been answered.
    """

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


class PostingMailbox:
    """One client that keeps `at_once` of `posts` in flight, and ends the loop after the last.

    Each post is the encoded requests of one POST, whose ids are one block of numbers.
    """

    def __init__(self, posts: list[bytes], at_once: int) -> None:
        self._posts = posts
        self._left = [POST for _ in posts]  # requests of each that are not answered
        self._next, self._may_come = 0, at_once
        self._unanswered = len(posts)
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()
        self.tokens = 0

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine]]:
        decode = self._decoder.decode
        while self._may_come and self._next < len(self._posts):
            post = self._posts[self._next]
            self._next, self._may_come = self._next + 1, self._may_come - 1
            for message in decode(post):
                yield "client", message
        if not self._unanswered:
            yield "client", Shutdown()

    def send(self, client: Hashable, message: FromEngine) -> None:
        self._encoder.encode(message)
        if isinstance(message, StepEvents):
            self.tokens += message.stats.decode_tokens
            for finished in message.finished:
                post = finished.request // POST
                self._left[post] -= 1
                if not self._left[post]:
                    self._may_come += 1
                    self._unanswered -= 1


def measure(
    batch: int, lengths: list[int], tokens: float, step_seconds: float, paced: bool
) -> float:
    """Return the tokens per second of streams of these lengths in `batch` slots.

    Runs until `tokens` tokens have come or all streams have ended, in rounds of as many steps as
    the engine chooses for steps of `step_seconds`.
    """
    requests = [_request(id, pack_ids([1]), length) for id, length in enumerate(lengths)]
    mailbox = EncodingMailbox(requests, tokens)
    clock = Clock()
    engine = Engine(MockRunner(batch, step_seconds, paced, clock), clock.latest)
    begin = clock()
    EngineLoop(engine, mailbox).run()
    return mailbox.tokens / (clock() - begin)


def per_request(batch: int, step_seconds: float, paced: bool) -> float:
    """Return the CPU seconds that a request costs the host, its tokens excluded.

    The load is that of loadtest.share.
    """
    count = -(-SHARE_TURNS * batch // POST)
    mailbox = PostingMailbox(posts(count), -(-5 * batch // (4 * POST)))
    endless = [
        _request(id, pack_ids([1]), 2 * SHARE_TURNS * ANSWER, stream=False) for id in range(batch)
    ]
    with _rounds_of_one_length():
        busy = _busy_seconds(mailbox, batch, step_seconds, paced)
        resident = EncodingMailbox(endless, mailbox.tokens)
        tokens = _busy_seconds(resident, batch, step_seconds, paced) / resident.tokens
    return (busy - tokens * mailbox.tokens) / (count * POST)


@contextmanager
def _rounds_of_one_length() -> Iterator[None]:
    """Make rounds equally long however long the answers are.

    Else the rounds that are subtracted would be of another kind.
    """
    longest, decode_scheduler.LONG_ROUND_SECONDS = (
        decode_scheduler.LONG_ROUND_SECONDS,
        decode_scheduler.QUIET_ROUND_SECONDS,
    )
    try:
        yield
    finally:
        decode_scheduler.LONG_ROUND_SECONDS = longest


def _busy_seconds(mailbox: Mailbox, batch: int, step_seconds: float, paced: bool) -> float:
    """Return the CPU seconds that the engine's loop uses."""
    clock = Clock()
    engine = Engine(MockRunner(batch, step_seconds, paced, clock, MOST_HOST_BYTES), clock.latest)
    begin = clock()
    EngineLoop(engine, mailbox).run()
    return clock() - begin - clock.waited


def posts(count: int) -> list[bytes]:
    """Return the messages of `count` POSTs, the same ones every time."""
    chance, encoder = random.Random(count), msgspec.msgpack.Encoder()
    prompts = (
        array("i", chance.choices(range(VOCABULARY), k=PROMPT)).tobytes()
        for _ in range(count * POST)
    )
    requests = [
        _request(id, prompt, ANSWER, stream=False, timeout=600.0)
        for id, prompt in enumerate(prompts)
    ]
    firsts = range(0, len(requests), POST)
    return [encoder.encode(requests[first : first + POST]) for first in firsts]


def _request(
    id: int, prompt: bytes, length: int, stream: bool = True, timeout: float | None = None
) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    return Request(id=id, prompt=prompt, sampling=sampling, stream=stream, timeout=timeout)


def turning(batch: int, low: int, high: int) -> list[int]:
    """Return the lengths of answers, the same ones every time."""
    chance = random.Random(batch)
    return [chance.randint(low, high) for _ in range(TURNS * batch)]


def main(argv: list[str] | None = None) -> int:
    options = command_line("host", __doc__)
    options.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 64, 1024],
        help="numbers of slots (default: 1 64 1024)",
    )
    options.add_argument(
        "--step-ms",
        type=float,
        nargs="+",
        default=[0.12, 0.26, 0.57],
        help="milliseconds of a device step, one value per batch (default: 0.12 0.26 0.57)",
    )
    options.add_argument(
        "--tokens", type=int, default=1 << 19, help="tokens in all, for each batch"
    )
    options.add_argument("--seconds", type=float, default=1.0, help="seconds of each paced run")
    options.add_argument(
        "--answers",
        type=int,
        nargs=2,
        default=[128, 384],
        help="shortest and longest answer of turning, tokens (default: 128 384)",
    )
    options.add_argument("--share", action="store_true", help="measure what a request costs, too")
    options.add_argument(
        "--repeat", type=int, default=3, help="runs of each measurement; the median counts"
    )
    options.add_argument("--json", type=Path, help="write every figure to this file")
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
    saved = {"host": figures}
    if args.share:
        saved["share"] = print_share(args.batch, args.step_ms, args.repeat)
    save_json(args.json, saved)
    return 0


def print_share(batches: list[int], step_ms: list[float], repeat: int) -> list[dict[str, float]]:
    """Measure and print what a request costs; return the figures, in microseconds."""
    figures, rows = [], []
    for batch, ms in zip(batches, step_ms, strict=True):
        figure: dict[str, float] = {"batch": batch, "step_ms": ms}
        row = [str(batch), f"{ms:g}"]
        for name, paced in ("free", False), ("paced", True):
            runs = [1e6 * per_request(batch, ms / 1000, paced) for _ in range(repeat)]
            figure |= {name: median(runs), f"{name}_least": min(runs)}
            row.append(f"{median(runs):.1f} ({min(runs):.1f})")
        figures.append(figure)
        rows.append(row)
    print_table(
        "us of host CPU per request beyond its tokens, median (least)",
        ["batch", "ms per step", "free", "paced"],
        rows,
    )
    return figures


if __name__ == "__main__":
    gc_tuning.tune_gc()  # as the engine's process does
    raise SystemExit(main())
