"""SequenceState: what one sequence does with kept states: what it starts from, and what it leaves.

`state_manager` says how that comes about; here is what is known of it, from the sequence's
admission to its end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.cache.resume_point import ResumePoint
from engine.cache.tiered_store import CachedState
from engine.protocol.requests import FinishReason, KeepState
from engine.protocol.token_ids import ID_BYTES

if TYPE_CHECKING:
    from engine.sequence import Sequence


@dataclass(eq=False, slots=True)
class SequenceState:
    """Of one sequence."""

    source: ResumePoint | None  # that it starts from
    keep: KeepState | None
    id: str = ""  # under which it will be kept
    spare: CachedState | None = None
    base: int = -1  # how much of its text the state in `spare` has read; negative: not yet there
    kept_tokens: int | None = None  # of the answer, where not all of them are
    loads: int = 0  # how often it was read from its file
    left: bool = False  # the source is not needed any more
    rebuilds: Sequence | None = None  # the sequence whose state this one rebuilds
    reason: FinishReason = "stop"  # with which that one ended
    answer: array[int] = field(default_factory=lambda: array("i"))  # that is kept of it

    @property
    def has_base(self) -> bool:
        """Its base stands."""
        return self.base >= 0 and self.spare is not None and self.spare.has_row

    def due(self, length: int) -> CachedState | None:
        """Its spare, where that is to become its base when `length` tokens are read."""
        if self.spare is None or self.base >= 0:
            return None
        return self.spare if self.spare.position == self.before + length else None

    @property
    def before(self) -> int:
        """Tokens that the state at the beginning of its text has read."""
        if self.source is None:
            return 0
        return self.source.tokens - len(self.source.tail) // ID_BYTES

    def answer_of(self, sequence: Sequence) -> array[int]:
        """What is kept of the sequence's answer."""
        return sequence.tokens[: self.kept_tokens]
