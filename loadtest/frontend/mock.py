"""The mock engine, in the engine's process: ids for every request, as fast as they are taken.

Its EngineConfig's `model` is the path of a Board.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path

from engine.config import SLOTS, EngineConfig
from engine.errors import EngineDead, EngineError
from engine.models.loader import resolve
from engine.protocol.events import Finished, ModelInfo, Stats, StepEvents, Timing
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateCall, StateReply
from engine.protocol.token_ids import pack_ids
from loadtest.frontend.board import Board

NAP = 20e-6  # seconds between looks at the board
PAUSE = 1e-3  # where it says that there are no steps
TIMING = Timing(0.0, 0.0, 0.0)


def token_of(step: int) -> int:
    """Return the token of a step, a letter."""
    return ord("a") + step % 26


@cache
def _tokens_of(steps: int) -> bytes:
    """Return the packed tokens of the first `steps` steps."""
    return pack_ids(token_of(step) for step in range(steps))


@cache
def _reports_of(steps: int) -> PackedLogprobs:
    """Return log-probabilities for the first `steps` steps, without alternatives."""
    words = array("f")
    for step in range(steps):
        words.extend([-(1 + step % 7) / 8, 0.0])
    return PackedLogprobs(0, words.tobytes())


class MockEngine:
    """A SteppedEngine (engine.loop) of one client.

    A streamed request gets one token per step. Any other gets all its tokens at once, with their
    log-probabilities if it asks for them.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.broken: EngineDead | None = None
        self.info = ModelInfo(
            name="mock",
            folder=str(resolve("shakespeare-mingru")),
            fingerprint="",
            family="minrnn",
            cell="mingru",
            vocab_size=257,
            eos_token_ids=(256,),
            parameters=0,
            d_model=1,
            state_bytes=0,
            slots=config.max_slots or SLOTS,
            device="cpu",
            device_name="none",
            dtype="float32",
        )
        self._board = Board(Path(config.model))
        self._client: Hashable = None
        self._live: dict[int, int] = {}  # the last step of each streamed request
        self._order: list[int] | None = None  # their ids, while nothing changes
        self._last: dict[int, list[int]] = defaultdict(list)  # the other way round
        self._ended: list[Finished] = []
        self._measurement = -1  # to which what was sent belongs
        self._step = 0
        self._burst = 0  # steps left of it
        self._sent = 0
        self._due = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._ended)

    def add(self, client: Hashable, request: Request) -> None:
        self._client = client
        tokens = request.sampling.max_tokens
        if not request.stream:
            reports = None if request.sampling.logprobs is None else _reports_of(tokens)
            self._finish(request.id, "length", tokens, _tokens_of(tokens), reports)
            return
        if self._measurement != self._board.measurement:
            self._measurement = self._board.measurement
            self._sent = 0  # as many as the board says were received
        if not self._live:
            self._step = self._burst = 0
            self._due = time.monotonic_ns()
        self._live[request.id] = self._step + tokens
        self._last[self._step + tokens].append(request.id)
        self._order = None

    def _finish(
        self,
        request: int,
        reason: FinishReason,
        count: int,
        answer: bytes = b"",
        reports: PackedLogprobs | None = None,
    ) -> None:
        self._ended.append(Finished(request, reason, 1, 0, count, TIMING, answer, reports))

    def reject(self, client: Hashable, request: int, error: EngineError) -> None:
        raise error

    def ask(self, client: Hashable, call: StateCall) -> None:
        """Ignore the call, since no states are kept."""

    def replies(self) -> list[tuple[Hashable, StateReply]]:
        return []

    def load_now(self) -> Stats:
        return Stats(running=len(self._live))

    def close(self) -> None:
        """Do nothing, since nothing is on disk."""

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason,
        kept: Iterable[int] = (),
    ) -> None:
        for request in list(self._live) if ids is None else ids:
            last = self._live.pop(request, None)
            if last is not None:
                self._last[last].remove(request)
                self._finish(request, reason, 1)
        self._order = None

    def abort_all(self) -> None:
        self.abort(self._client, None, "abort")

    def step(self, take_in: Callable[[], None] | None = None) -> dict[Hashable, StepEvents]:
        if take_in is not None:
            take_in()
        streams = len(self._live)
        requests: list[int] = []
        tokens: list[int] = []
        if streams and self._may_step(streams):
            if self._order is None:
                self._order = list(self._live)
            requests = self._order
            tokens = [token_of(self._step)] * streams
            self._sent += streams
            self._board.stamp(self._step, time.monotonic_ns())
            self._step += 1
            for request in self._last.pop(self._step, ()):
                del self._live[request]
                self._order = None
                self._finish(request, "length", 1)
        elif not self._ended:
            time.sleep(NAP)
            return {}
        ended, self._ended = self._ended, []
        stats = Stats(running=streams, batch_size=streams, decode_tokens=len(tokens))
        return {
            self._client: StepEvents(requests=requests, tokens=tokens, finished=ended, stats=stats)
        }

    def _may_step(self, streams: int) -> bool:
        board = self._board
        if self._step == 0 and streams < board.expected:
            self._due = time.monotonic_ns()
            return False
        if window := board.window * board.chunk:
            if not self._burst and self._sent - board.received <= window * streams:
                self._burst = window
            if not self._burst:
                return False
            self._burst -= 1
            return True
        if not board.period_ns:
            time.sleep(PAUSE)
            return False
        left = self._due - time.monotonic_ns()
        if left > 0:
            time.sleep(left / 1e9)
        self._due += board.period_ns
        return True


def load(config: EngineConfig) -> MockEngine:
    """Return the engine, for `engine.worker --engine`.

    It runs on core `config.threads` - 1.
    """
    if config.threads is not None:
        os.sched_setaffinity(0, {config.threads - 1})
    return MockEngine(config)
