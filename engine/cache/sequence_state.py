"""SequenceState: what a sequence does with named states: which it starts from, which it keeps.

`state_manager` describes the process; this is what is known about one sequence, from its arrival to
its end.
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
    """The named states of one sequence."""

    source: ResumePoint | None  # the state that it starts from; pinned until `source_released`
    keep: KeepState | None  # what to keep at its end
    id: str = ""  # reserved id under which the state will be stored
    target: CachedState | None = None  # pinned; its row will have the state to keep
    base: int = -1  # tokens of its text that the state in `target` has read; -1: not there yet
    kept_tokens: int | None = None  # tokens of the answer to keep; None: all
    loads: int = 0  # how often its source was read from a file
    source_released: bool = False
    rebuilds: Sequence | None = None  # the ended sequence whose state this one recomputes
    reason: FinishReason = "stop"  # finish reason of that sequence
    answer: array[int] = field(default_factory=lambda: array("i"))  # tokens of its answer to keep

    @property
    def has_base(self) -> bool:
        """Whether its base is in its row."""
        return self.base >= 0 and self.target is not None and self.target.has_row

    def base_at(self, length: int) -> CachedState | None:
        """Return its target, if the base is to be copied there when `length` tokens are read."""
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
        """Return the part of the sequence's answer that is kept."""
        return sequence.tokens[: self.kept_tokens]
