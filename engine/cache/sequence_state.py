"""SequenceState: what one sequence does with named states: what it starts from, and what it leaves.

`state_manager` says how that comes about; here is what is known of it, from the sequence's arrival
to its end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.cache.resume_point import ResumePoint
from engine.cache.tiered_store import CachedState
from engine.protocol.requests import FinishReason, KeepState
from engine.protocol.token_ids import ID_BYTES
from engine.sequence import Sequence


@dataclass(eq=False, slots=True)
class SequenceState:
    """Of one sequence."""

    source: ResumePoint | None  # that it starts from; pinned until `source_released`
    keep: KeepState | None  # what it is to leave
    id: str = ""  # under which that will be stored; reserved
    target: CachedState | None = None  # whose row will have what it leaves; pinned
    base: int = -1  # tokens of its text that the state in `target` has read; -1: not yet there
    kept_tokens: int | None = None  # of the answer, where not all of them are
    loads: int = 0  # how often its source was read from a file
    source_released: bool = False
    rebuilds: Sequence | None = None  # the ended sequence whose state this one computes anew
    reason: FinishReason = "stop"  # with which that one ended
    answer: array[int] = field(default_factory=lambda: array("i"))  # that is kept of it

    @property
    def has_base(self) -> bool:
        """Its base is in its row."""
        return self.base >= 0 and self.target is not None and self.target.has_row

    def base_at(self, length: int) -> CachedState | None:
        """Its target, where that is to have its base when `length` tokens are read."""
        if self.target is None or self.base >= 0:
            return None
        return self.target if self.target.position == self.before + length else None

    @property
    def before(self) -> int:
        """Tokens that the state at the beginning of its text has read."""
        if self.source is None:
            return 0
        return self.source.tokens - len(self.source.tail) // ID_BYTES

    def answer_of(self, sequence: Sequence) -> array[int]:
        """What is kept of the sequence's answer."""
        return sequence.tokens[: self.kept_tokens]
