"""Engine: one model's scheduler and runner, advanced round by round.

A round is planned, started, finished and committed. Where the runner's device works by itself, the
next round is started before this one's results are awaited, unless the host has a part in sampling
for both: while the device goes on, the host takes in messages, commits, and sends what the round
brought.

When the runner raises, the sequences that took part in the round fail, those of a round started
after it too, and the engine lives on. A lost device (DeviceLost) is lost to the process for good:
every request fails and the engine is `broken`; its process has to end.

Invariants:

- Rounds are started, finished and committed in the order in which they were planned. At most two
  are started and not finished.
- Plan N+1 may be made and started before round N is finished. If round N fails, round N+1 fails
  too, whatever it brought.
- A plan is started only if it is not empty.
- Messages are taken in only between two calls of the scheduler, never within one.
- No method raises on account of a request.
- Once `broken` is set, no request is in flight and none is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.cache.cache_config import CacheConfig
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

# How long messages are taken in, and how often looked for, while a round is awaited that the device
# works on by itself. After that the host waits for it alone, and answers nobody: a device that
# hangs is to be noticed.
LOOK_SECONDS = 0.05
NAP_SECONDS = 20e-6
# Between looks for messages, while a grammar or the disk is all that there is to wait for.
WAIT_SECONDS = 0.005
STORE_SECONDS = 2.0  # at the end, for states that somebody waits for to be written


class PlanRunner(Protocol):
    """What the engine needs of a runner: engine.runner.model_runner.ModelRunner, or a test's own.

    Per round: `start`, then `finish`, in the order of the plans.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def config(self) -> EngineConfig:
        """With `max_step_tokens` chosen."""

    @property
    def most_steps(self) -> int:
        """Decode steps of a round at most; 1 where the host has a part in all sampling."""

    @property
    def overlaps(self) -> bool:
        """Whether `start` returns before the work is done, and may be called for the next plan
        before `finish`."""

    @property
    def grammars(self) -> GrammarCache | None:
        """The model's; None where requests cannot have one."""

    def start(self, plan: StepPlan) -> Any:
        """Begins a round. Returns what `is_done` and `finish` take. Raises what the device does."""

    def is_done(self, pending: Any) -> bool:
        """Whether `finish` would return without waiting."""

    def finish(self, pending: Any) -> StepResult:
        """Waits for the oldest round that was started. Raises what the device does."""


class Engine:
    """Token ids in, token ids out; not thread-safe: one thread makes all calls.

    A client is any hashable value that tells API processes apart; request ids are unique within
    their client. No method raises on account of a request.
    """

    def __init__(self, runner: PlanRunner, clock: Callable[[], float] = time.monotonic) -> None:
        """`runner` has its model loaded; `clock` gives seconds. Raises ConfigError where the
        state folder cannot be used."""
        self._runner = runner
        self._clock = clock
        config, info = runner.config, runner.info
        if config.max_step_tokens is None:
            raise ValueError("the runner has not chosen max_step_tokens")
        self.info = info
        self.broken: EngineDead | None = None
        self._grammars = runner.grammars
        home, variant = StatePlacement(config.rank, config.engines), _variant(info)
        file_store = None
        if config.state_folder is not None:
            folder, sync = Path(config.state_folder), config.state_sync == "fsync"
            file_store = open_file_store(folder, info.fingerprint, variant, home, sync)
        cache = StateCacheManager(
            CacheConfig(
                device_rows=config.share_slots,
                first_row=config.max_slots,
                host_rows=host_rows(
                    config, state_bytes=info.state_bytes, vocab_size=info.vocab_size
                ),
                layout=StateLayout(
                    info.fingerprint, info.vocab_size, info.cell_shape, info.conv_shape
                ),
                with_whole_chunks=config.deterministic,
                ttl=config.state_ttl,
                most_states=config.max_states,
                disk_bytes=config.disk_state_bytes,
                disk_cache_bytes=config.disk_cache_bytes,
                variant=variant,
                placement=home,
            ),
            file_store,
        )
        self._cache = cache
        self._state_calls = StateCallHandler(cache)
        self._scheduler = Scheduler(
            SchedulerConfig(
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
                slots=config.max_slots,
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
        self._started: _StartedStep | None = None  # not finished yet
        self._latest: tuple[Hashable, ...] = ()  # the client that asked for something last

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Loads the model and warms it up.

        Raises CheckpointError, DeviceError or ConfigError.
        """
        # Here, so that all else works without torch.
        from engine.runner.model_runner import ModelRunner

        runner = ModelRunner(config)
        runner.warm_up()
        return cls(runner)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to report."""
        return self._started is not None or self._scheduler.has_work

    def add(self, client: Hashable, request: Request) -> None:
        """Enqueues a request; a refusal comes as an event of the next step."""
        self._latest = (client,)
        self._scheduler.enqueue(client, request, self._clock())

    def reject(self, client: Hashable, request: int, error: EngineError) -> None:
        """Reports a request of this id, which was never added, as failed in the next step."""
        self._scheduler.reject(client, request, error)

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason = "abort",
        kept: Iterable[int] = (),
    ) -> None:
        """Ends requests early; arguments as of `Scheduler.abort`."""
        self._scheduler.abort(client, ids, reason, self._clock(), kept)

    def ask(self, client: Hashable, call: StateCall) -> None:
        """Does what a client asks of named states; `replies` will have the answer, now or after a
        later step."""
        self._latest = (client,)
        self._state_calls.handle(client, call)

    def replies(self) -> list[tuple[Hashable, StateReply]]:
        """The answers to state calls since the last call, with their clients."""
        replies, self._state_calls.replies = self._state_calls.replies, []
        return replies

    def load_now(self) -> Stats:
        """The present load, without what steps did."""
        return self._scheduler.load()

    def close(self) -> None:
        """Returns when all that is to be in files is; no other call may follow."""
        if not self.broken:
            self._cache.write_all()
            while self._cache.exporting:
                self.step()
        self._cache.close()

    def abort_all(self) -> None:
        """Ends every request early. Those that wait for their states to be written, and for
        snapshots, go on waiting for up to STORE_SECONDS."""
        self._scheduler.abort_all(self._clock())
        until = time.monotonic() + STORE_SECONDS
        while (self._cache.storing or self._cache.exporting) and not self.broken:
            if time.monotonic() > until:
                break
            self._advance()
        self._cache.stop_all("the server shuts down")

    def step(self, take_in: Callable[[], None] | None = None) -> dict[Hashable, StepEvents]:
        """Completes a round; the next one may be under way when this returns.

        Args:
            take_in: takes messages in; it may `add`, `abort` and `ask`, and raises nothing. It is
                called once the round is done, or has failed, so that nothing more is delivered of a
                request that was aborted meanwhile. Where the device works by itself, it is also
                called repeatedly before that, so that the host has less to do when the device waits
                for it.

        Returns what there is to tell, by client.
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
            ahead = self._start()  # it runs while what there is to tell is sent
        self._started = ahead

    def _await_others(self, take_in: Callable[[], None] | None) -> None:
        """Gives way to the grammars being compiled, or to the files being read and written, which
        may be all that there is to do."""
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
        """Of a round after one that failed; what it brings is lost with that."""
        try:
            self._finish(ahead)
        except Exception as error:
            return error
        return None

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        log.error("a step failed", exc_info=error)
        self._scheduler.fail(plan, _step_failed(error))
        if isinstance(error, DeviceLost):
            self.broken = EngineDead(f"the engine ends after a CUDA error: {_reason(error)}")
            self._scheduler.fail_all(self.broken)


@dataclass(frozen=True, slots=True)
class _StartedStep:
    """A round that was started, or that could not be: then `error` says why."""

    plan: StepPlan
    pending: Any
    error: Exception | None


def _variant(info: ModelInfo) -> str:
    """What decides over the numbers of states; on a GPU their last bits also differ by what else
    was read with them, unless it is deterministic."""
    parts = info.fingerprint, info.dtype, info.quantization, info.device_name, info.deterministic
    return "|".join(map(str, parts))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _step_failed(error: Exception) -> StepFailed:
    return StepFailed(f"a step of the engine failed: {_reason(error)}")
