"""An engine in which faults can be set off: for `engine.worker --engine`, by signals.

SIGUSR1: the next round ends with an error as CUDA reports them, after which the device is lost.
SIGUSR2: the next round ends with another error, after which the engine goes on.
"""

from __future__ import annotations

import signal
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine

ERRORS = {
    signal.SIGUSR1: "CUDA error: an illegal memory access was encountered (injected)",
    signal.SIGUSR2: "a fault of one round (injected)",
}


def load(config: EngineConfig) -> Engine:
    """The engine that `Engine.load` gives, with the faults in its runner."""
    engine = Engine.load(config)
    runner: Any = engine._runner
    start = runner.start
    waiting: list[str] = []

    def start_or_fail(plan: Any) -> Any:
        if waiting:
            raise RuntimeError(waiting.pop())
        return start(plan)

    runner.start = start_or_fail
    for number, message in ERRORS.items():
        signal.signal(number, lambda *_, message=message: waiting.append(message))
    return engine
