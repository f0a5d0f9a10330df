"""The garbage collector of a process that serves for long."""

from __future__ import annotations

import gc


def calm() -> None:
    """The collector leaves alone what lives as long as the process, which it would look through
    again and again: up to a third of a busy process's time, in pauses of a tenth of a second. It
    still runs often: refusals leave cycles behind, and to free 50,000 objects at once takes a third
    of a second.

    To be called once all that is to last is there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 20, 50)
