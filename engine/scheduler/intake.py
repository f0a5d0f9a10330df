"""Intake: how many requests a plan admits at most.

While the device works beside the host, more than a few would keep it waiting for the host: now and,
as they tend to end together, when they end. But all slots are to be taken within a few rounds, and
to stay so: that is as many as have come free since others were admitted, and a part of those that
were free before, or these would be for ever; but no more than the host and the graphs of prompts
are good for.
"""

from __future__ import annotations

import sys

AT_ONCE = 64
PART = 1 / 16  # of the slots
LEFT_PART = 1 / 8  # of those that were left
MOST_PART = 3 / 32  # of the slots, however many are free


class Intake:
    """Of a scheduler with `slots` slots, whose rounds overlap with the host's work or do not."""

    def __init__(self, slots: int, overlaps: bool) -> None:
        self._slots = slots
        self._overlaps = overlaps
        self._left_free = 0  # when somebody was admitted last

    def most(self, free: int) -> int:
        """How many with so many free slots."""
        if not self._overlaps:
            return sys.maxsize
        due = free - self._left_free + int(LEFT_PART * self._left_free)
        return max(AT_ONCE, int(PART * self._slots), min(due, int(MOST_PART * self._slots)))

    def note(self, free: int) -> None:
        """Some have been admitted, and left so many slots free."""
        self._left_free = free
