"""Drives a ModelRunner and an Engine for measurements; the only module here that makes plans.

A decode round is what the runner does between two waits of the host: one step or several, whose
tokens it draws on the device (a `plain` plan).
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.events import StepEvents
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams, is_adjusted, is_greedy, top_of
from engine.protocol.token_ids import pack_ids, unpack_ids
from engine.runner.model_runner import ModelRunner
from engine.scheduler.decode_scheduler import ROUND_SECONDS
from engine.step_plan import MOST_STEPS, Admission, DecodeRow, PrefillChunk, StepPlan, StepResult

#: Sequences begin with tokens this far apart.
FIRST_TOKENS_APART = 7
GREEDY = SamplingParams(temperature=0, max_tokens=1 << 30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=1 << 30, ignore_eos=True)
#: Likewise, with what is laid on the logits of all tokens that were there before.
PENALISED = msgspec.structs.replace(SAMPLED, repetition_penalty=1.1, presence_penalty=0.1)

#: Likewise, with log-probabilities of each token and of the best.
REPORTED = msgspec.structs.replace(SAMPLED, logprobs=5)

_CLIENT = "loadtest"


class WrongAnswerError(RuntimeError):
    """The measured code gave a wrong answer."""


def load(config: EngineConfig, batches: Sequence[int]) -> ModelRunner:
    """Return a warm runner, with CUDA graphs for `batches` and the largest batch only.

    Graphs of other batches would take time and change nothing.
    """
    runner = ModelRunner(config)
    runner.warm_up(batches)
    return runner


def round_steps(step_seconds: float, greatest: int | None) -> int:
    """Return the steps of a round that takes about ROUND_SECONDS, at most `greatest`."""
    return max(1, min(MOST_STEPS, greatest or MOST_STEPS, int(ROUND_SECONDS / step_seconds)))


class Decoding:
    """`batch` sequences that decode together, from the initial state, each with its own seed."""

    def __init__(self, runner: ModelRunner, batch: int, sampling: SamplingParams) -> None:
        self._runner = runner
        self._greedy, self._adjusted = is_greedy(sampling), is_adjusted(sampling)
        self._top = top_of(sampling)
        self._drawn = 0  # tokens of each sequence
        vocab = runner.info.vocab_size
        #: Of every sequence, the last token, which is read next.
        self.tokens = [row * FIRST_TOKENS_APART % vocab for row in range(batch)]
        self._begun = False
        requests = (_request(row, [0], _seeded(sampling, row)) for row in range(batch))
        runner.run(
            StepPlan(
                admit=[
                    Admission(request, key=row, slot=row, source=None, cached_tokens=0)
                    for row, request in enumerate(requests)
                ]
            )
        )

    def run(self, rounds: int, steps: int = 1) -> float:
        """Decode `rounds` rounds of `steps` tokens per sequence; return the seconds of a step.

        The time is from a round's plan to the ids on the host. If the runner can start a round
        before the previous one has ended, it does. Raises WrongAnswerError if tokens are missing or
        logits were not finite.
        """
        if self._runner.overlaps:
            return self._overlapped(rounds, steps) / (rounds * steps)
        total = 0.0
        for _ in range(rounds):
            plan = self._plan(steps)
            start = time.perf_counter()
            result = self._runner.run(plan)
            total += time.perf_counter() - start
            self._take(result, steps)
        return total / (rounds * steps)

    def _overlapped(self, rounds: int, steps: int) -> float:
        start = time.perf_counter()
        ahead = self._runner.start(self._plan(steps))
        for _ in range(rounds - 1):
            pending, ahead = ahead, self._runner.start(self._plan(steps))
            self._take(self._runner.finish(pending), steps)
        self._take(self._runner.finish(ahead), steps)
        return time.perf_counter() - start

    def _plan(self, steps: int) -> StepPlan:
        if self._begun:
            return self._round(StepPlan(again=True), steps)
        self._begun = True
        rows = [
            DecodeRow(key=row, slot=row, token=token, position=self._drawn + 1)
            for row, token in enumerate(self.tokens)
        ]
        at = list(range(len(rows)))
        return self._round(StepPlan(decode=rows, at=at), steps)

    def _round(self, plan: StepPlan, steps: int) -> StepPlan:
        plan.plain, plan.steps = True, steps
        plan.greedy, plan.adjusted, plan.top = self._greedy, self._adjusted, self._top
        return plan

    def _take(self, result: StepResult, steps: int) -> None:
        batch = len(self.tokens)
        if result.non_finite:
            raise WrongAnswerError(f"logits of {len(result.non_finite)} rows are not finite")
        drawn = result.drawn
        if drawn is None:
            raise WrongAnswerError("a round has drawn nothing")
        if drawn.ended:
            raise WrongAnswerError(f"{len(drawn.ended)} rows ended before their time")
        tokens = unpack_ids(drawn.tokens)
        if len(tokens) != batch * steps:
            raise WrongAnswerError(f"{len(tokens)} tokens, not {batch} x {steps}")
        self.tokens = list(tokens[steps - 1 :: steps])
        self._drawn += steps

    def release(self) -> None:
        """End the sequences."""
        self._runner.run(StepPlan(release=list(range(len(self.tokens)))))


def _request(request_id: int, prompt: list[int], sampling: SamplingParams) -> Request:
    return Request(id=request_id, prompt=pack_ids(prompt), sampling=sampling)


def _seeded(sampling: SamplingParams, seed: int, **other: Any) -> SamplingParams:
    return msgspec.structs.replace(sampling, seed=seed, **other)


@contextmanager
def decoding(runner: ModelRunner, batch: int, sampling: SamplingParams) -> Iterator[Decoding]:
    """Yield sequences that end with the block, even if it fails."""
    running = Decoding(runner, batch, sampling)
    try:
        yield running
    finally:
        running.release()


def read_prompt(runner: ModelRunner, ids: array[int], decode: int = 0) -> tuple[float, list[float]]:
    """Read one prompt in pieces of the step's budget, and sample its first token.

    Returns the seconds of that, and of each of `decode` decode steps of this one sequence.
    """
    budget = runner.config.max_step_tokens or len(ids)
    request = _request(0, [0], GREEDY)
    runner.run(StepPlan(admit=[Admission(request, key=0, slot=0, source=None, cached_tokens=0)]))
    token, steps = 0, []
    start = time.perf_counter()
    for begin in range(0, len(ids), budget):
        piece = ids[begin : begin + budget]
        last = begin + budget >= len(ids)
        result = runner.run(StepPlan(prefill=[PrefillChunk(0, 0, begin, piece, None, 0, last)]))
        if last:
            token = result.sampled[0].token
    seconds = time.perf_counter() - start
    for position in range(1, decode + 1):
        begin_step = time.perf_counter()
        result = runner.run(StepPlan(decode=[DecodeRow(0, 0, token, position)]))
        steps.append(time.perf_counter() - begin_step)
        token = result.sampled[0].token
    runner.run(StepPlan(release=[0]))
    return seconds, steps


def random_prompt(length: int, vocab_size: int) -> array[int]:
    """Return random token ids, without the last of the vocabulary, which may end a text."""
    return array("i", torch.randint(max(1, vocab_size - 1), (length,)).tolist())


def engine_seconds(runner: ModelRunner, batch: int, tokens: int, sampling: SamplingParams) -> float:
    """Return the seconds in which a whole Engine advances `batch` requests by a token.

    The time is from when all prompts (one token each) have been read to the end of the first
    request. Requests have `tokens` tokens each, more than there are rounds until all prompts have
    been read. The runner's configuration keeps no states (`share_slots` and `host_state_bytes` 0),
    because prompts may be equal.

    Raises WrongAnswerError unless every request gets all its tokens.
    """
    engine = Engine(runner)
    vocab = runner.info.vocab_size
    for row in range(batch):
        prompt = [row * FIRST_TOKENS_APART % vocab]
        params = _seeded(sampling, row, max_tokens=tokens)
        engine.add(_CLIENT, _request(row, prompt, params))
    read = drawn = finished = 0
    start = end = math.nan
    while engine.has_work:
        events = engine.step().get(_CLIENT)
        if events is None:
            continue
        finished += _finished(events, tokens)
        if read < batch:
            read += events.stats.prefill_tokens
            start = time.perf_counter()
        elif math.isnan(end):
            drawn += events.stats.decode_tokens
            if finished:
                end = time.perf_counter()
    # An engine counts its sequences from 0 and releases the last ones with its next step: the next
    # engine's would be taken for them.
    runner.run(StepPlan(release=list(range(batch))))
    if finished != batch or math.isnan(end):
        raise WrongAnswerError(f"{finished} of {batch} requests finished, {drawn} tokens timed")
    return (end - start) * batch / drawn


def _finished(events: StepEvents, tokens: int) -> int:
    if events.failed:
        raise WrongAnswerError(f"a request failed: {events.failed[0].message}")
    for one in events.finished:
        if one.completion_tokens != tokens or one.reason != "length":
            raise WrongAnswerError(f"{one.completion_tokens} of {tokens} tokens: {one.reason}")
    return len(events.finished)
