"""ResumePoint and NamedState: a state from which a text continues, and a state with a name."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.storage.snapshot import Snapshot
from engine.cache.tiered_store import CachedState


@dataclass(eq=False, slots=True)
class ResumePoint:
    """A state with the last tokens of its text that it has not read."""

    state: CachedState
    tail: bytes  # packed, at least one token
    tokens: int  # length of the text, including the tail
    drawn: bool  # the tail is one token, which was generated
    recent: tuple[int, ...]  # the last tokens of the text
    turns: int = 0  # how many requests have made the text

    @classmethod
    def of(cls, state: CachedState, found: Snapshot) -> ResumePoint:
        """Combine a state with what a snapshot says about it."""
        return cls(state, found.tail, found.tokens, found.drawn, found.recent, found.turns)

    def snapshot(self, content: bytes, extra: dict[str, str] | None = None) -> Snapshot:
        """Return the content of its file; `content` is the state's bytes."""
        told = content, self.tail, self.tokens, self.drawn, self.recent
        return Snapshot(*told, extra or {}, self.turns)


@dataclass(eq=False, slots=True)
class NamedState:
    """A named state; times are in seconds since the epoch."""

    owner: str
    id: str
    point: ResumePoint
    created: float
    ttl: float
    expires: float
    file: str = ""  # name of the file to which it is written, or will be
    tag: bytes = b""  # tag of that file, once written
    used: float = 0.0  # last use, as recorded in the file's time
    writing: bool = False  # the file is not written yet
    # Tag of a file that still has a former state of the name, since this one could not be written.
    former_tag: bytes = b""
    brief: bool = False  # it was never to be written to a shared store

    @property
    def key(self) -> tuple[str, str]:
        """(owner, id)."""
        return self.owner, self.id

    @property
    def known_tag(self) -> bytes:
        """The tag that the name's file has, as far as is known; b"": no file."""
        return self.tag or self.former_tag

    def is_of(self, created: float, found: Snapshot) -> bool:
        """Return whether a file with these contents was written for this state."""
        point = self.point
        ours = point.state.digest, point.tail, point.tokens, self.created
        return ours == (found.digest, found.tail, found.tokens, created)
