"""ResumePoint and NamedState: a kept state with what of its text it has not read, and the name of
one."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.storage.snapshot import Snapshot
from engine.cache.tiered_store import CachedState


@dataclass(eq=False, slots=True)
class ResumePoint:
    """A kept state with the tokens of its text that it has not read."""

    kept: CachedState
    tail: bytes  # packed, at least one
    tokens: int  # of the text, with the tail
    drawn: bool  # the tail, of one token, was generated
    recent: tuple[int, ...]  # the text's last tokens

    @classmethod
    def of(cls, kept: CachedState, found: Snapshot) -> ResumePoint:
        """What a snapshot says of a state."""
        return cls(kept, found.tail, found.tokens, found.drawn, found.recent)

    def snapshot(self, state: bytes, extra: dict[str, str] | None = None) -> Snapshot:
        """What a file of it holds, whose bytes are `state`."""
        return Snapshot(state, self.tail, self.tokens, self.drawn, self.recent, extra or {})


@dataclass(eq=False, slots=True)
class NamedState:
    """A state's name. Times are seconds since the epoch."""

    owner: str
    id: str
    standing: ResumePoint
    created: float
    ttl: float
    expires: float
    file: str = ""  # that it is written to, or will be
    tag: bytes = b""  # of that file, once it is there
    used: float = 0.0  # as far as the file's time tells
    writing: bool = False  # it is not there yet
    # Of a file that has a former state of the name, since this one could not be written.
    behind: bytes = b""

    @property
    def seen(self) -> bytes:
        """The tag of what lies under the name's file as far as is known; b"": nothing."""
        return self.tag or self.behind

    def says(self, created: float, found: Snapshot) -> bool:
        """Whether a file with these is this name's, written once."""
        standing = self.standing
        ours = standing.kept.digest, standing.tail, standing.tokens, self.created
        return ours == (found.digest, found.tail, found.tokens, created)
