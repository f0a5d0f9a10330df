"""When the garbage collector looks at what, and when it does not."""

from __future__ import annotations

import gc
import subprocess
import sys

from engine.gc_tuning import gc_paused

CALM = """
import gc, sys, weakref
from engine import gc_tuning
class Lasting: pass
one = Lasting()
one.itself = one
gone = weakref.ref(one)
gc_tuning.tune_gc()
assert gc.get_freeze_count() > 1_000
del one  # a cycle that was there before: never looked at again
gc.collect()
assert gone() is not None
other = Lasting()
other.itself = other
gone = weakref.ref(other)
del other
young = 2 * gc.get_threshold()[0]
for _ in range(2_000):
    if gone() is None: break
    keep = [[] for _ in range(young)]
assert gone() is None, "what came later goes by itself"
"""


def test_a_calm_collector_leaves_alone_what_was_there() -> None:
    subprocess.run([sys.executable, "-c", CALM], check=True)


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
