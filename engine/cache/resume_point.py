"""ResumePoint and NamedState: a state with what of its text it has not read, and its name."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.storage.snapshot import Snapshot
from engine.cache.tiered_store import CachedState


@dataclass(eq=False, slots=True)
class ResumePoint:
    """A state with the tokens of its text that it has not read."""

    state: CachedState
    tail: bytes  # packed, at least one
    tokens: int  # of the text, with the tail
    drawn: bool  # the tail, of one token, was generated
    recent: tuple[int, ...]  # the text's last tokens

    @classmethod
    def of(cls, state: CachedState, found: Snapshot) -> ResumePoint:
        """What a snapshot says of a state."""
        return cls(state, found.tail, found.tokens, found.drawn, found.recent)

    def snapshot(self, content: bytes, extra: dict[str, str] | None = None) -> Snapshot:
        """What a file of it holds, where `content` is the state's bytes."""
        return Snapshot(content, self.tail, self.tokens, self.drawn, self.recent, extra or {})


@dataclass(eq=False, slots=True)
class NamedState:
    """A state's name. Times are seconds since the epoch."""

    owner: str
    id: str
    point: ResumePoint
    created: float
    ttl: float
    expires: float
    file: str = ""  # that it is written to, or will be
    tag: bytes = b""  # of that file, once it is there
    used: float = 0.0  # as far as the file's time tells
    writing: bool = False  # it is not there yet
    # Of a file that has a former state of the name, since this one could not be written.
    former_tag: bytes = b""

    @property
    def key(self) -> tuple[str, str]:
        """Owner and id."""
        return self.owner, self.id

    @property
    def known_tag(self) -> bytes:
        """The tag of what lies under the name's file as far as is known; b"": nothing."""
        return self.tag or self.former_tag

    def is_of(self, created: float, found: Snapshot) -> bool:
        """Whether a file with these is this name's, written once."""
        point = self.point
        ours = point.state.digest, point.tail, point.tokens, self.created
        return ours == (found.digest, found.tail, found.tokens, created)
