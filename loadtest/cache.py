"""What kept states cost a request, and what they save, in the engine without HTTP.

    python -m loadtest.cache

First, prompts that no cached state matches, with the prefix cache on and off in turn (processor
time, because only the ratio matters). Then a long context: read, found in the cache, continued by
the state's name. Last, the time to fork, export and import a state. Medians, on one thread.

    python -m loadtest.cache --model 113m --only sizes

prints only how many states fit in main memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.config import EngineConfig, ModelConfig, host_rows
from engine.engine import Engine
from engine.models import loader
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateCall, StateReply
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner
from engine.state_spec import hidden_bytes_of
from engine.step_plan import StepPlan
from loadtest.lm_models import SIZES, size_config, subject
from loadtest.report import command_line

CLIENT = "loadtest"
IN_FLIGHT = 128
# Tokens of a prompt, tokens of its answer, requests.
LOADS = ((8, 1, 600), (32, 8, 400), (200, 4, 200))


class Served:
    """An engine over a runner, with request ids that the runner has not seen."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.engine = Engine(runner)
        self.requests = 0

    def ask(self, prompt: list[int], count: int, **fields: Any) -> Request:
        self.requests += 1
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        return Request(id=self.requests, prompt=pack_ids(prompt), sampling=sampling, **fields)

    def run(self, requests: Iterator[Request]) -> None:
        """Serve all requests, up to IN_FLIGHT at a time."""
        in_flight, left = 0, True
        while left or self.engine.has_work:
            while left and in_flight < IN_FLIGHT:
                request = next(requests, None)
                left = request is not None
                if request is not None:
                    self.engine.add(CLIENT, request)
                    in_flight += 1
            for events in self.engine.step().values():
                in_flight -= len(events.finished) + len(events.failed)
                for failed in events.failed:
                    raise RuntimeError(failed.message)

    def call(self, action: Any, **fields: Any) -> StateReply:
        self.engine.ask(CLIENT, StateCall(call=0, action=action, **fields))
        while not (replies := self.engine.replies()):
            self.engine.step()
        ((_, reply),) = replies
        if reply.failed is not None:
            raise RuntimeError(reply.failed.message)
        return reply

    def close(self) -> None:
        """Close the engine.

        The next engine's first plan releases what ended last.
        """
        self._runner.run(StepPlan(release=list(range(2 * self.requests + 2))))


def _seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    work()
    return clock() - begun


def _load(runner: ModelRunner, length: int, count: int, number: int, seed: int) -> float:
    """Return the processor seconds for requests that have nothing in common."""
    chance, served = random.Random(seed), Served(runner)
    vocabulary = range(runner.info.vocab_size)
    prompts = [chance.choices(vocabulary, k=length) for _ in range(number)]
    requests = (served.ask(prompt, count) for prompt in prompts)
    seconds = _seconds(lambda: served.run(requests), time.process_time)
    served.close()
    return seconds / number


def measure_cost(on: ModelRunner, off: ModelRunner, repeats: int) -> None:
    """Print the table of what kept states cost a request."""
    print("prompt  answer   without     with  (us a request)  ratio")
    for length, count, number in LOADS:
        pairs = [
            (_load(off, length, count, number, seed), _load(on, length, count, number, seed))
            for seed in range(repeats)
        ]
        ratio = statistics.median(with_ / without for without, with_ in pairs)
        without, with_ = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
        print(f"{length:6}  {count:6}  {without:8.0f} {with_:8.0f}  {'':14}  {ratio:.3f}")


def measure_gain(runner: ModelRunner, context: int, repeats: int) -> None:
    """Print the milliseconds to the first token after a long context, for each way to have it."""
    served, chance = Served(runner), random.Random(1)
    vocabulary = range(runner.info.vocab_size)
    stem = chance.choices(vocabulary, k=context)

    def first_token(prompt: list[int], **fields: Any) -> float:
        request = served.ask(prompt, 1, **fields)
        return 1000 * _seconds(lambda: served.run(iter([request])))

    print(f"\ncontext of {context:,} tokens, ms until the first token after it")
    print(f"  read:                    {first_token(stem, keep=KeepState(id='context')):10.2f}")
    one = statistics.median(first_token([token]) for token in vocabulary[:repeats])
    again = statistics.median(first_token(stem) for _ in range(repeats))
    ends = [chance.choices(vocabulary, k=4) for _ in range(repeats)]
    more = statistics.median(first_token([*stem, *end]) for end in ends)
    named = statistics.median(first_token(end, state="context") for end in ends)
    print(f"  a prompt of one token:   {one:10.2f}")
    print(f"  the same prompt again:   {again:10.2f}")
    print(f"  four tokens after it:    {more:10.2f}")
    print(f"  the same by name:        {named:10.2f}")
    fork = statistics.median(
        _seconds(lambda: served.call("fork", id="context")) for _ in range(50 * repeats)
    )
    exported = served.call("export", id="context")
    out = statistics.median(
        _seconds(lambda: served.call("export", id="context")) for _ in range(10 * repeats)
    )
    back = statistics.median(
        _seconds(lambda: served.call("import", content=exported.content))
        for _ in range(10 * repeats)
    )
    print(f"\nus: fork {fork * 1e6:.0f}, export {out * 1e6:.0f}, import {back * 1e6:.0f}; ", end="")
    print(f"state {exported.states[0].bytes:,} bytes, snapshot {len(exported.content):,} bytes")
    served.close()


def print_sizes(config: ModelConfig) -> None:
    """Print how many states of a model fit in 1 GiB of main memory."""
    one = config.state_bytes
    row = one + hidden_bytes_of(config.d_model)
    rows = host_rows(EngineConfig(host_state_bytes=2**30), state_bytes=one, d_model=config.d_model)
    print(f"a state {one:,} bytes, a row of main memory {row:,}: {rows:,} states in 1 GiB\n")


def main() -> None:
    parser = command_line("cache", __doc__)
    parser.add_argument(
        "--model",
        default="shakespeare-mingru",
        help=f"a bundled model, a folder, or a size with random weights: {', '.join(SIZES)}",
    )
    parser.add_argument("--only", choices=["sizes"], help="print only the sizes of states")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--context", type=int, default=20_000, help="length of the context, tokens")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    args = parser.parse_args()
    if args.model not in SIZES:
        print_sizes(loader.load_config(loader.resolve(args.model)))
        if args.only is None:
            _measure(args.model, args)
        return
    print_sizes(size_config(args.model, "mingru", "bfloat16"))
    if args.only is None:
        with subject(args.model, "mingru", torch.device("cpu"), "bfloat16") as made:
            _measure(str(made.folder), args)


def _measure(model: str, args: argparse.Namespace) -> None:
    config = EngineConfig(model=model, device=args.device, threads=args.threads, max_slots=64)
    on = ModelRunner(config)
    off = ModelRunner(dataclasses.replace(config, share_slots=0, host_state_bytes=0))
    on.warm_up()
    off.warm_up()
    info = on.info
    print(f"{info.name} on {info.device_name}, {info.dtype}, {args.threads} threads\n")
    measure_cost(on, off, args.repeats)
    measure_gain(on, args.context, args.repeats)


if __name__ == "__main__":
    main()
