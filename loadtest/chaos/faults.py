"""An engine with faults that signals set off, for `engine.worker --engine`.

SIGUSR1: the next step loses the device, after which the engine ends.
SIGUSR2: the next step ends with another error, after which the engine goes on.
"""

from __future__ import annotations

import signal
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import DeviceLost

ERRORS = {
    signal.SIGUSR1: DeviceLost("CUDA error: an illegal memory access was encountered (injected)"),
    signal.SIGUSR2: RuntimeError("a fault of one step (injected)"),
}


def load(config: EngineConfig) -> Engine:
    """Load an engine as `Engine.load` does, with the faults in its runner."""
    engine = Engine.load(config)
    runner: Any = engine._runner
    start = runner.start
    waiting: list[Exception] = []

    def start_or_fail(plan: Any) -> Any:
        if waiting:
            raise waiting.pop()
        return start(plan)

    runner.start = start_or_fail
    for number, error in ERRORS.items():
        signal.signal(number, lambda *_, error=error: waiting.append(error))
    return engine
