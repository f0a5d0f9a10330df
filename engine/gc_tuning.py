"""The garbage collector of a process that serves for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def tune_gc() -> None:
    """The collector leaves alone what lives as long as the process, which it would look through
    again and again: up to a third of a busy process's time, in pauses of a tenth of a second. It
    runs less often than by default, since requests leave no cycles behind
    (tests/service/http/test_garbage.py) and a few hundred of them at once are tens of thousands of
    objects; but often enough that what libraries leave behind of them is freed in a moment: 50,000
    objects in circles, lists or errors, in 3 to 30 ms.

    To be called once all that is to last is there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Garbage may be graphs of an engine that was there before: a capture fails when one goes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
