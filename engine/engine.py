"""Engine: one model's scheduler and runner, advanced step by step.

A step plans, runs the plan, takes in aborts that came meanwhile, and commits. When the runner
raises, the sequences that took part in the step fail and the engine lives on. A CUDA error is
another matter: it spoils the process's context for good, so every request fails and the engine
is `broken`; its process has to end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, StepFailed
from engine.messages import FinishReason, ModelInfo, Request, StepEvents
from engine.plan import Plan, StepResult
from engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class PlanRunner(Protocol):
    """What the engine needs of a runner (engine.runner.Runner; tests bring their own)."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def config(self) -> EngineConfig:
        """With `max_step_tokens` chosen."""

    def run(self, plan: Plan) -> StepResult: ...


class Engine:
    """Token ids in, token ids out; not thread-safe: one thread makes all calls.

    A client is any hashable value that tells API processes apart; request ids are unique within
    their client. No method raises on account of a request.
    """

    def __init__(self, runner: PlanRunner, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._clock = clock
        config, info = runner.config, runner.info
        if config.max_step_tokens is None:
            raise ValueError("the runner has not chosen max_step_tokens")
        self.info = info
        self.broken: EngineDead | None = None
        self._scheduler = Scheduler(
            vocab_size=info.vocab_size,
            eos_token_id=info.eos_token_id,
            slots=config.max_slots,
            share_slots=config.share_slots,
            max_step_tokens=config.max_step_tokens,
            max_waiting=config.max_waiting,
            state_bytes=info.state_bytes,
        )

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Loads the model and warms it up.

        Raises CheckpointError, DeviceError or ConfigError.
        """
        from engine.runner import Runner  # here, so that all else works without torch

        runner = Runner(config)
        runner.warm_up()
        return cls(runner)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to report."""
        return self._scheduler.has_work

    def add(self, client: Hashable, request: Request) -> None:
        """Takes a request; a refusal comes as an event of the next step."""
        self._scheduler.add(client, request, self._clock())

    def reject(self, client: Hashable, request: int, error: EngineError) -> None:
        """Reports a request of this id as failed; it was never added."""
        self._scheduler.reject(client, request, error)

    def abort(self, client: Hashable, ids: Iterable[int], reason: FinishReason = "abort") -> None:
        """Ends requests early, with `reason` as their finish_reason."""
        self._scheduler.abort(client, ids, reason, self._clock())

    def abort_all(self) -> None:
        """Ends every request early."""
        self._scheduler.abort_all(self._clock())

    def drain(self) -> None:
        """From now on new requests are refused; those in flight are served."""
        self._scheduler.drain()

    def step(self, take_in: Callable[[], None] | None = None) -> dict[Hashable, StepEvents]:
        """Advances every sequence and returns what there is to tell, by client.

        `take_in` is called once the model has run: it may `add` and `abort`, so that nothing more
        is delivered of a request that was aborted while the step ran.
        """
        plan = self._scheduler.plan(self._clock())
        if not plan.empty:
            try:
                result = self._runner.run(plan)
            except Exception as error:
                self._fail(plan, error)
            else:
                if take_in is not None:
                    take_in()
                self._scheduler.commit(plan, result, self._clock())
        return self._scheduler.events()

    def _fail(self, plan: Plan, error: Exception) -> None:
        log.exception("a step failed")
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._scheduler.fail(plan, StepFailed(f"a step of the engine failed: {reason}"))
        if _is_sticky(error):
            self.broken = EngineDead(f"the engine ends after a CUDA error: {reason}")
            self._scheduler.fail_all(self.broken)


def _is_sticky(error: Exception) -> bool:
    """Whether the device is lost to this process: every later CUDA call would fail as well.

    Running out of memory is none of these; torch reports it as torch.OutOfMemoryError.
    """
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
