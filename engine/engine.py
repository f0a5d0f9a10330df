"""Engine: one model's scheduler and runner, advanced round by round.

A round is planned, started, finished and committed. On a device that works asynchronously the next
round is started before the current one's results are awaited, unless the host takes part in
sampling for both. While the device works, the host receives messages, commits, and sends the events
of the last round.

If the runner raises, the sequences of that round fail, and those of a round started after it; the
engine goes on. After DeviceLost every request fails and the engine is `broken`; its process must
end.

Invariants:

- Rounds are started, finished and committed in the order in which they were planned. At most two
  are started and not finished.
- Plan N+1 may be made and started before round N is finished. If round N fails, round N+1 fails
  too, whatever its result.
- A plan is started only if it is not empty.
- Messages are received only between two calls of the scheduler, never within one.
- No method raises because of a request.
- Once `broken` is set, no request is in flight and none is accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from engine.cache.cache_config import CacheConfig
from engine.cache.shared.client import SharedStates
from engine.cache.shared.connect import open_shared_store
from engine.cache.state_calls import StateCallHandler
from engine.cache.state_manager import StateCacheManager
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.state_folder import open_file_store
from engine.config import EngineConfig, host_rows
from engine.errors import DeviceLost, EngineDead, EngineError, StepFailed
from engine.protocol.events import ModelInfo, Stats, StepEvents
from engine.protocol.placement import StatePlacement
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateCall, StateReply
from engine.scheduler.scheduler import Scheduler, SchedulerConfig
from engine.step_plan import StepPlan, StepResult
from engine.structured_output.grammar_cache import GrammarCache

log = logging.getLogger(__name__)

# While an asynchronous round runs, messages are received for up to LOOK_SECONDS, polling every
# NAP_SECONDS. After that the host blocks on the device and answers nobody, so that the supervisor
# notices a device that hangs.
LOOK_SECONDS = 0.05
NAP_SECONDS = 20e-6
# Poll interval for messages while only grammars or the disk are being waited for.
WAIT_SECONDS = 0.005
STORE_SECONDS = 2.0  # at shutdown, wait for states that clients expect to be written


class PlanRunner(Protocol):
    """What the engine needs of a runner: ModelRunner, or a fake in tests.

    For each round it calls `start`, then `finish`, in the order of the plans.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def config(self) -> EngineConfig:
        """The engine's config, with `max_step_tokens` chosen."""

    @property
    def most_steps(self) -> int:
        """The most decode steps in a round; 1 if the host takes part in all sampling."""

    @property
    def overlaps(self) -> bool:
        """Whether `start` returns before the work is done.

        If so, it may be called for the next plan before `finish`.
        """

    @property
    def grammars(self) -> GrammarCache | None:
        """The model's grammars; None if requests cannot have one."""

    def start(self, plan: StepPlan) -> Any:
        """Start a round and return a handle for `is_done` and `finish`. Raises device errors."""

    def is_done(self, pending: Any) -> bool:
        """Return whether `finish` would return without waiting."""

    def finish(self, pending: Any) -> StepResult:
        """Wait for the oldest started round and return its result. Raises device errors."""


class Engine:
    """Generates token ids for requests of token ids; not thread-safe: one thread makes all calls.

    A client is any hashable value that identifies an API process; request ids are unique within
    their client. No method raises because of a request.
    """

    def __init__(self, runner: PlanRunner, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an engine from a runner whose model is loaded.

        `clock` returns seconds. Raises ConfigError if the state folder cannot be used.
        """
        self._runner = runner
        self._clock = clock
        config, info = runner.config, runner.info
        slots, share_slots = config.max_slots, config.share_slots
        if config.max_step_tokens is None or slots is None or share_slots is None:
            raise ValueError("the runner has not chosen max_step_tokens and its slots")
        self.info = replace(info, shared_states=config.state_store is not None)
        self.broken: EngineDead | None = None
        self._grammars = runner.grammars
        home, variant = StatePlacement(config.rank, config.engines), _variant(info)
        file_store = shared = None
        layout = StateLayout(info.fingerprint, info.vocab_size, info.state, info.d_model)
        sync = config.state_sync == "fsync"
        if config.state_folder is not None:
            folder = Path(config.state_folder)
            file_store = open_file_store(folder, info.fingerprint, variant, home, sync)
        if config.state_store is not None:
            store = open_shared_store(config.state_store, info.fingerprint, sync)
            threads = None if file_store is None else file_store.threads
            shared = SharedStates(store, layout, threads)
            shared.warn()
        cache = StateCacheManager(
            CacheConfig(
                device_rows=share_slots,
                first_row=slots,
                host_rows=host_rows(config, state_bytes=info.state_bytes, d_model=info.d_model),
                layout=layout,
                with_whole_chunks=config.deterministic,
                ttl=config.state_ttl,
                most_states=config.max_states,
                disk_bytes=config.disk_state_bytes,
                disk_cache_bytes=config.disk_cache_bytes,
                variant=variant,
                placement=home,
            ),
            file_store,
            shared=shared,
        )
        self._cache = cache
        self._state_calls = StateCallHandler(cache)
        self._scheduler = Scheduler(
            SchedulerConfig(
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
                slots=slots,
                state_bytes=info.state_bytes,
                max_step_tokens=config.max_step_tokens,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                most_steps=runner.most_steps,
                overlaps=runner.overlaps,
            ),
            cache,
            self._grammars,
        )
        self._started: _StartedStep | None = None  # the round in flight
        self._latest: tuple[Hashable, ...] = ()  # the client that made the last request or call

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Load the model and warm it up.

        Raises CheckpointError, DeviceError or ConfigError.
        """
        # Imported here so that everything else works without torch.
        from engine.runner.model_runner import ModelRunner

        runner = ModelRunner(config)
        runner.warm_up()
        return cls(runner)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to report."""
        return self._started is not None or self._scheduler.has_work

    def add(self, client: Hashable, request: Request) -> None:
        """Add a request to the queue; a refusal becomes an event of the next step."""
        self._latest = (client,)
        self._scheduler.enqueue(client, request, self._clock())

    def reject(self, client: Hashable, request: int, error: EngineError) -> None:
        """Report a request that was never added as failed, in the next step."""
        self._scheduler.reject(client, request, error)

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason = "abort",
        kept: Iterable[int] = (),
    ) -> None:
        """End requests early; arguments as for `Scheduler.abort`."""
        self._scheduler.abort(client, ids, reason, self._clock(), kept)

    def ask(self, client: Hashable, call: StateCall) -> None:
        """Carry out a state call; `replies` returns the answer, now or after a later step."""
        self._latest = (client,)
        self._state_calls.handle(client, call)

    def replies(self) -> list[tuple[Hashable, StateReply]]:
        """Return the answers to state calls since the last call, with their clients."""
        replies, self._state_calls.replies = self._state_calls.replies, []
        return replies

    def load_now(self) -> Stats:
        """Return the current load, without counters of rounds."""
        return self._scheduler.load()

    def close(self) -> None:
        """Write everything that belongs in files, then close; no other call may follow."""
        if not self.broken:
            self._cache.write_all()
            while self._cache.exporting:
                self.step()
        self._cache.close()

    def abort_all(self) -> None:
        """End every request early.

        Waits up to STORE_SECONDS for states to be written and snapshots to be exported.
        """
        self._scheduler.abort_all(self._clock())
        until = time.monotonic() + STORE_SECONDS
        while (self._cache.storing or self._cache.exporting) and not self.broken:
            if time.monotonic() > until:
                break
            self._advance()
        self._cache.stop_all("the server shuts down")

    def step(self, take_in: Callable[[], None] | None = None) -> dict[Hashable, StepEvents]:
        """Complete a round; the next one may be in flight when this returns.

        Args:
            take_in: receives messages; it may call `add`, `abort` and `ask`, and must not raise. It
                is called once the round is done or has failed, so that nothing more is delivered
                for a request that was aborted meanwhile. On an asynchronous device it is also
                called repeatedly before that, so that the host has less to do while the device
                waits.

        Returns:
            The events to send, by client.
        """
        self._advance(take_in)
        return self._scheduler.events(self._latest)

    def _advance(self, take_in: Callable[[], None] | None = None) -> None:
        current, self._started = self._started or self._start(), None
        if current is None:
            self._await_others(take_in)
            return
        ahead = self._start_ahead() if current.error is None else None
        try:
            if take_in is not None and self._runner.overlaps:
                self._take_in_meanwhile(current, take_in)
            result = self._finish(current)
        except Exception as error:
            self._fail(current.plan, error)
            if ahead is not None:
                self._fail(ahead.plan, self._failure(ahead) or error)
            if take_in is not None:
                take_in()
            return
        if take_in is not None:
            take_in()
        self._scheduler.commit(current.plan, result, self._clock())
        if ahead is not None and ahead.error is not None:
            self._fail(ahead.plan, ahead.error)
            ahead = None
        if ahead is None and self._runner.overlaps and not self.broken:
            ahead = self._start()  # it runs while the events are being sent
        self._started = ahead

    def _await_others(self, take_in: Callable[[], None] | None) -> None:
        """Wait briefly for grammars or files in progress, when there is no round to run."""
        if self._grammars is not None and self._grammars.pending:
            self._grammars.wait(WAIT_SECONDS)
        elif self._cache.pending:
            self._cache.wait(WAIT_SECONDS)
        else:
            return
        if take_in is not None:
            take_in()

    def _start(self) -> _StartedStep | None:
        plan = self._scheduler.schedule(self._clock())
        return None if plan.empty else self._begin(plan)

    def _start_ahead(self) -> _StartedStep | None:
        if not self._runner.overlaps:
            return None
        plan = self._scheduler.schedule_ahead(self._clock())
        return None if plan.empty else self._begin(plan)

    def _begin(self, plan: StepPlan) -> _StartedStep:
        try:
            return _StartedStep(plan, self._runner.start(plan), None)
        except Exception as error:
            return _StartedStep(plan, None, error)

    def _take_in_meanwhile(self, current: _StartedStep, take_in: Callable[[], None]) -> None:
        end = time.perf_counter() + LOOK_SECONDS
        take_in()
        while current.error is None and not self._runner.is_done(current.pending):
            if time.perf_counter() > end:
                return
            time.sleep(NAP_SECONDS)
            take_in()

    def _finish(self, current: _StartedStep) -> StepResult:
        if current.error is not None:
            raise current.error
        return self._runner.finish(current.pending)

    def _failure(self, ahead: _StartedStep) -> Exception | None:
        """Finish a round that followed a failed one; drop its result, return its error, if any."""
        try:
            self._finish(ahead)
        except Exception as error:
            return error
        return None

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        log.error("a step failed", exc_info=error)
        self._scheduler.fail(plan, _step_failed(error))
        if isinstance(error, DeviceLost):
            self.broken = EngineDead(f"the engine ends because of a CUDA error: {_reason(error)}")
            self._scheduler.fail_all(self.broken)


@dataclass(frozen=True, slots=True)
class _StartedStep:
    """A round that was started, or that could not be; then `error` says why."""

    plan: StepPlan
    pending: Any
    error: Exception | None


def _variant(info: ModelInfo) -> str:
    """Return a key of everything that decides the exact values of states.

    On a GPU, unless deterministic, the last bits also depend on the rest of the batch.
    """
    parts = info.fingerprint, info.dtype, info.quantization, info.device_name, info.deterministic
    return "|".join(map(str, parts))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _step_failed(error: Exception) -> StepFailed:
    return StepFailed(f"a step of the engine failed: {_reason(error)}")
