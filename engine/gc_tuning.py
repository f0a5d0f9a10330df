"""Garbage collector settings for a long-running server process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def tune_gc() -> None:
    """Freeze existing objects and let the garbage collector run less often.

    Call it once everything that lives as long as the process exists. The collector would scan these
    objects again and again: up to a third of a busy process's time, in pauses of a tenth of a
    second.

    The thresholds are higher than the default, because requests leave no cycles behind
    (tests/service/http/test_garbage.py) and a few hundred of them at once are tens of thousands of
    objects. They are low enough that cycles left by libraries are freed quickly: 50,000 objects in
    3 to 30 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector during a CUDA graph capture.

    Garbage may include CUDA graphs of an earlier engine; a capture fails if one is freed meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
