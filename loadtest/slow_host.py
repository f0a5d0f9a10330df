"""How much of a GPU's time the engine uses with a quick or a slow host, simulated.

    python -m loadtest.slow_host --slower 1 2.3 3

The load is that of `loadtest.share`: twice as many prompts under way as there are slots. The whole
engine loop runs as in `loadtest.host`, and its CPU time counts `--slower` times. The mock device
and the mock runner take as long as an H100 and its host do with the 113 M model, by figures of a
run of `loadtest.share`.
"""

from __future__ import annotations

from pathlib import Path

from engine import gc_tuning
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.protocol.events import FromEngine, StepEvents
from engine.step_plan import StepPlan, StepResult
from loadtest.host import ANSWER, MOST_HOST_BYTES, POST, Clock, MockRunner, PostingMailbox, posts
from loadtest.report import command_line, print_environment, print_table, save_json

# Seconds of the device: a step of 1,024 sequences, to read prompts, and for each of them.
STEP, READING, PROMPT = 0.65e-3, 0.3e-3, 5.8e-6
# Seconds of a quick host that the runner takes: for a round, and for each request that begins.
ROUND, BEGINNING = 0.4e-3, 5e-6
SLOTS = 1024
BEGIN, END = 0.2, 0.85  # the part of a run that counts: slots fill up at first, and drain


class GpuRunner(MockRunner):
    """A mock of an H100, and of a host that is `slower` times as slow as a quick one."""

    def __init__(self, clock: Clock, slower: float) -> None:
        super().__init__(SLOTS, STEP, True, clock, MOST_HOST_BYTES)
        self._slower = slower

    def start(self, plan: StepPlan) -> tuple[StepResult, float]:
        self._clock.spend(self._slower * (ROUND + BEGINNING * len(plan.admit)))
        return super().start(plan)

    def _reading(self, plan: StepPlan) -> float:
        return READING + PROMPT * len(plan.prefill) if plan.prefill else 0.0


class TimedMailbox(PostingMailbox):
    """A PostingMailbox that records the times at which tokens arrive."""

    def __init__(self, posts: list[bytes], at_once: int, clock: Clock) -> None:
        super().__init__(posts, at_once)
        self._clock = clock
        self.came: list[tuple[float, int]] = []

    def send(self, client: object, message: FromEngine) -> None:
        super().send(client, message)
        if isinstance(message, StepEvents):
            self.came.append((self._clock(), self.tokens))


def used(slower: float, turns: int) -> float:
    """Return the share of the decode-only tokens/s that is reached when prompts are read as well.

    The host is `slower` times as slow as a quick one; there are `turns` requests per slot.
    """
    clock = Clock(slower)
    mailbox = TimedMailbox(posts(turns * SLOTS // POST), 2 * SLOTS // POST, clock)
    EngineLoop(Engine(GpuRunner(clock, slower), clock.latest), mailbox).run()
    came = mailbox.came
    (begin, before), (end, after) = came[int(BEGIN * len(came))], came[int(END * len(came))]
    return (after - before) / (end - begin) * STEP / SLOTS


def main(argv: list[str] | None = None) -> int:
    options = command_line("slow_host", __doc__)
    options.add_argument(
        "--slower",
        type=float,
        nargs="+",
        default=[1.0, 1.5, 2.3, 3.0],
        help="how many times slower the host is than a quick one (default: 1 1.5 2.3 3)",
    )
    options.add_argument("--turns", type=int, default=20, help="requests of each slot")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    print_environment()
    figures = {slower: used(slower, args.turns) for slower in args.slower}
    rows = [[f"{slower:g}", f"{part:.0%}"] for slower, part in figures.items()]
    print_table(
        f"of what decoding alone would bring, 113 M on an H100, answers of {ANSWER} tokens",
        ["host slower by", "with prompts"],
        rows,
    )
    save_json(args.json, {"slow_host": figures})
    return 0


if __name__ == "__main__":
    gc_tuning.tune_gc()  # as the engine's process does
    raise SystemExit(main())
