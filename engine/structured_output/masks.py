"""What masks cost, and how many slow ones a round may have.

A mask takes microseconds as a rule. Within the limits of engine.structured_output.compiler one can
take ten milliseconds, and a request may have hundreds of prompts: everybody would wait for seconds
at each of their tokens. So those whose masks are slow take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOW_SECONDS = 1e-3
ROUND_SECONDS = 0.02  # for slow masks
_NEWS = 0.2  # the part that the latest one has in what is known


@dataclass(eq=False, slots=True)
class MaskCost:
    """Of one grammar, whoever has it."""

    seconds: float = 0.0  # that a mask takes, by one thread, lately

    @property
    def is_slow(self) -> bool:
        return self.seconds >= SLOW_SECONDS

    def note(self, seconds: float) -> None:
        """One has taken so long."""
        self.seconds += _NEWS * (seconds - self.seconds)


class MaskBudget:
    """Of a round."""

    def __init__(self) -> None:
        self._left = ROUND_SECONDS

    def has_room(self, cost: MaskCost | None) -> bool:
        """For one more, which counts from now on; the first one always has room."""
        if cost is None or not cost.is_slow:
            return True
        if self._left <= 0:
            return False
        self._left -= cost.seconds
        return True
