"""SharedStore: where several servers keep the named states of one model.

A server carries out one turn of a text in this order:

1. `open` with a lock: nobody else can begin a turn of this text, and the server learns the text's
   *generation*, the name of the version that the store has. It gets the state too, unless its own
   memory has that generation.
2. The turn, while `renew` keeps the lock. A server that dies stops renewing, and its locks end
   after LEASE_SECONDS.
3. `write` with the lock and the generation from step 1. It stores the new version and gives the
   lock back, in one atomic step, or raises StateConflict: another server has taken the lock, or
   has written, in the meantime. So a server that was cut off or paused cannot overwrite a later
   turn.

A store is trusted no more than a client. What it returns is checked like any imported state, by its
fingerprint and its digest.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from engine.errors import StateBusy, StateConflict, StateMalformed
from engine.protocol.placement import digest_of
from engine.safetensors_container import parse_header

LEASE_SECONDS = 6.0  # a lock that is not renewed for so long is free
RENEW_SECONDS = 2.0  # between two renewals
ABSENT = ""  # the generation of a state that does not exist


@dataclass(frozen=True, slots=True)
class StateName:
    """The name of a state in the store, where the owner is only known by a hash."""

    owner: str  # hash of the owner
    id: str

    @classmethod
    def of(cls, owner: str, id: str) -> StateName:
        """Return the name of this owner's state `id`."""
        digest = hashlib.blake2b(owner.encode(), digest_size=16, person=b"minserve-owner")
        return cls(digest.hexdigest(), id)

    @property
    def digest(self) -> str:
        """A hash of both parts, of fixed length."""
        return digest_of(self.owner, self.id)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What a store says of a state without its content, as far as clients are told it."""

    tokens: int
    turns: int
    size: int  # of the content, in bytes
    created: float  # seconds since the epoch
    ttl: float  # seconds after its last use until it expires
    recent: list[int]  # the last tokens, up to four

    @classmethod
    def of(cls, content: bytes) -> Entry:
        """Read the entry from the header of a named state's file. Raises StateMalformed."""
        metadata = parse_header(content, "the state").metadata
        try:
            return cls(
                tokens=int(metadata["tokens"]),
                turns=int(metadata.get("turns", "0")),
                size=len(content),
                created=float(metadata["created"]),
                ttl=float(metadata["ttl"]),
                recent=[int(part) for part in metadata["recent"].split(",") if part],
            )
        except (KeyError, ValueError) as error:
            raise StateMalformed(f"a metadata entry is missing or malformed: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock on a name; a new one for each turn."""

    name: StateName
    token: str  # random, so that no two locks are equal


@dataclass(frozen=True, slots=True)
class Opened:
    """What `SharedStore.open` has found."""

    generation: str  # ABSENT: there is no such state
    content: bytes | None = None  # a named state's file; None: not asked for, or known


@dataclass(frozen=True, slots=True)
class Listed:
    """A state in a list."""

    id: str
    entry: Entry
    expires: float  # seconds since the epoch


def conflict(name: StateName) -> StateConflict:
    """Return the error of a server that has lost its lock, or whose version was replaced."""
    return StateConflict(
        f"state {name.id!r} was not changed: another server has continued it in the meantime"
    )


def busy(id: str, rest: float | None = None) -> StateBusy:
    """Return the error for a state whose lock is held; `rest`: seconds until the lock may end."""
    return StateBusy(f"state {id!r} is being replaced by another request", retry_after=rest)


class SharedStore(ABC):
    """The states of one model, in a store that other servers use too.

    All methods block, and may be called by several threads at once. Each may raise
    StoreUnavailable: the store does not answer, or its answer makes no sense. It is then unknown
    whether a write, a removal or an unlocking was carried out; repeating it is safe.
    """

    @abstractmethod
    def open(
        self, name: StateName, known: str, lock: Lock | None = None, most: int | None = None
    ) -> Opened:
        """Return a state if its generation is not `known`; restart its lifetime.

        Args:
            name: the state.
            known: a generation whose content is not needed.
            lock: take this lock first.
            most: with `lock`: the most states that the owner may have, this one included; None: any
                number, and a new one counts once it is written.

        Raises:
            StateBusy: another lock is held; `retry_after` is the rest of its lease in seconds.
            StateQuota: the state would be new, and the owner has `most` states.
            StoreUnavailable.
        """

    @abstractmethod
    def describe(self, name: StateName) -> tuple[str, Listed] | None:
        """Return a state's generation and entry, or None, and restart its lifetime."""

    @abstractmethod
    def write(self, lock: Lock, base: str, content: bytes) -> str:
        """Store a new version, give the lock back, and return the new generation.

        Repeating a write that was carried out returns the same generation.

        Args:
            lock: from `open`.
            base: the generation that `open` returned.
            content: the file of the named state.

        Raises:
            StateConflict: another server has taken the lock or has written.
            StateNotStored: the store is full.
            StoreUnavailable.
        """

    @abstractmethod
    def remove(self, lock: Lock, base: str) -> None:
        """Remove a state, and give its lock back. Repeating it is safe.

        Args:
            lock: from `open`.
            base: the generation that `open` returned.

        Raises:
            StateConflict: another server has taken the lock or has written.
            StoreUnavailable.
        """

    @abstractmethod
    def unlock(self, lock: Lock) -> None:
        """Give a lock back, unless it was lost. Raises StoreUnavailable."""

    @abstractmethod
    def renew(self, locks: Iterable[Lock]) -> None:
        """Prolong the locks that are held; one that was given back stays free.

        A state does not expire before its lock.

        Raises StoreUnavailable.
        """

    @abstractmethod
    def list_states(self, owner: str, after: str, limit: int) -> tuple[list[Listed], bool]:
        """Return up to `limit` states of an owner's hash, in order of id, and if there are more.

        Only those with ids after `after`. Raises StoreUnavailable.
        """

    @abstractmethod
    def warnings(self) -> list[str]:
        """Return what could make the store lose states, in words; empty: nothing is known.

        Raises StoreUnavailable.
        """

    def tidy(self) -> None:  # noqa: B027 - most stores do it by themselves
        """Remove states whose lifetime is over; called now and then. Raises StoreUnavailable."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""
