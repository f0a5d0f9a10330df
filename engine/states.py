"""States: the kept states that have a name, by owner and id; how long they stay, how many may.

A name refers to a state that never changes, so to fork one is to name it once more. With a shelf
every named state is written to a file too, and what lies there at the start is there again.
"""

from __future__ import annotations

import bisect
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from engine import snapshot
from engine.errors import (
    EngineError,
    InvalidRequest,
    StateBusy,
    StateMalformed,
    StateNotFound,
    StateQuota,
)
from engine.messages import StateInfo
from engine.ranking import Ranking
from engine.shelf import Shelf
from engine.snapshot import Shape, Snapshot
from engine.tiers import NOWHERE, Kept, Tiers
from engine.traffic import MORE_BYTES
from engine.validation import check_ttl

log = logging.getLogger(__name__)

MOST_PENDING = 1024  # reads and writes that wait for the disk
MOST_TIME = 2.0**40  # seconds since the epoch

MOST_ID = 128  # characters
ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")


@dataclass(eq=False, slots=True)
class Standing:
    """A kept state with the tokens of its text that it has not read."""

    kept: Kept
    tail: bytes  # packed, at least one
    tokens: int  # of the text, with the tail
    drawn: bool  # the tail, of one token, was generated
    recent: tuple[int, ...]  # the text's last tokens

    def snapshot(self, state: bytes, extra: dict[str, str] | None = None) -> Snapshot:
        """What a file of it holds, whose bytes are `state`."""
        return Snapshot(state, self.tail, self.tokens, self.drawn, self.recent, extra or {})


@dataclass(eq=False, slots=True)
class Named:
    """A state's name. Times are seconds since the epoch."""

    owner: str
    id: str
    standing: Standing
    created: float
    ttl: float
    expires: float
    file: str = ""  # that it is written to, or will be


def check_id(param: str, id: str) -> None:
    """Raises InvalidRequest."""
    if not id or len(id) > MOST_ID or not ID_CHARACTERS.issuperset(id):
        raise InvalidRequest(
            f"{param} is {id[: MOST_ID + 1]!r}; allowed: 1 to {MOST_ID} letters, digits and . _ : "
            "or -",
            param=param,
        )


class States:
    """`fetch` gets the bytes of a state in a row, some rounds later; `clock` is the time of day."""

    def __init__(
        self,
        tiers: Tiers,
        shape: Shape,
        *,
        ttl: float,
        most: int,
        shelf: Shelf | None,
        disk_bytes: int,
        fetch: Callable[[Kept, Callable[[bytes | None], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._shape = shape
        self._ttl = ttl
        self._most = most
        self._shelf = shelf
        self._disk_bytes = disk_bytes
        self._fetch = fetch
        self._clock = clock
        self._named: dict[tuple[str, str], Named] = {}
        self._ids: dict[str, list[str]] = {}  # by owner, in order
        self._expiry: Ranking[tuple[str, str]] = Ranking()
        self._busy: set[tuple[str, str]] = set()  # a request will take their place
        self._new: set[tuple[str, str]] = set()  # those of them that were not there
        self._making: dict[str, int] = {}  # how many these are, by owner
        self.files = 0

    def __len__(self) -> int:
        return len(self._named)

    def find(self, owner: str, id: str, param: str = "id") -> Named:
        """Raises StateNotFound; the state's time begins anew."""
        named = self._named.get((owner, id))
        if named is None:
            raise StateNotFound(f"there is no state {id!r}", param=param)
        named.expires = self._clock() + named.ttl
        self._expiry.put((owner, id), (named.expires, id, owner))
        self._tiers.touch(named.standing.kept)
        return named

    def has(self, owner: str, id: str) -> bool:
        return (owner, id) in self._named

    def check_part(self, owner: str, id: str) -> None:
        """Raises StateQuota where the owner has no part in memory left for a state of this id."""
        if (owner, id) not in self._named and not self._tiers.has_part(owner):
            raise StateQuota(
                "the states of one key may not take all memory; delete some, or wait for others"
            )

    def begin(self, owner: str, id: str, param: str, leaving: int = 0) -> str:
        """A request, or a call, will put a state under this id, or a new one: the id, which is its
        own until `end`. So many others of the owner's are about to go. Raises InvalidRequest,
        StateBusy or StateQuota."""
        if id:
            check_id(param, id)
        else:
            id = f"st_{secrets.token_hex(16)}"
        if (owner, id) in self._busy:
            raise StateBusy(f"state {id!r} is being replaced by another request", param=param)
        if (owner, id) not in self._named:
            count = len(self._ids.get(owner, ())) + self._making.get(owner, 0)
            if count >= self._most + leaving:
                raise StateQuota(f"{count} states are kept already; allowed: up to {self._most}")
            self._making[owner] = self._making.get(owner, 0) + 1
            self._new.add((owner, id))
        self._busy.add((owner, id))
        return id

    def end(self, owner: str, id: str) -> None:
        """What `begin` began is over; called before the state is put there."""
        self._busy.discard((owner, id))
        if (owner, id) in self._new:
            self._new.remove((owner, id))
            self._making[owner] -= 1
            if not self._making[owner]:
                del self._making[owner]

    def put(self, owner: str, id: str, standing: Standing, ttl: float | None) -> Named:
        """Names a state, which is held by one more from then on, in the place of what had the
        name."""
        now, ttl = self._clock(), self._ttl if ttl is None else ttl
        self._tiers.hold(standing.kept)
        self._forget(owner, id)
        named = Named(owner, id, standing, now, ttl, now + ttl)
        self._add(named)
        if self._shelf is not None:
            self._write(named, self._shelf)
        return named

    def move(self, named: Named, target: str, ttl: float | None) -> Named:
        """The same state under another id (or a new one), in the place of this one. Raises as
        `begin` and `delete`."""
        owner, id = named.owner, named.id
        if (owner, id) in self._busy:
            raise StateBusy(f"state {id!r} is being replaced by a request", param="id")
        target = self.begin(owner, target, "target", leaving=1)
        self.end(owner, target)
        moved = self.put(owner, target, named.standing, ttl)
        if target != id:
            self._forget(owner, id, for_good=True)
        return moved

    def delete(self, owner: str, id: str) -> None:
        """Raises StateNotFound, or StateBusy while a request will take its place."""
        if (owner, id) not in self._named:
            raise StateNotFound(f"there is no state {id!r}", param="id")
        if (owner, id) in self._busy:
            raise StateBusy(f"state {id!r} is being replaced by a request", param="id")
        self._forget(owner, id, for_good=True)

    def drop(self, kept: set[Kept]) -> None:
        """These are lost, and all that their names stood for."""
        for named in [one for one in self._named.values() if one.standing.kept in kept]:
            self._forget(named.owner, named.id, for_good=True)

    def listed(self, owner: str, after: str, limit: int) -> tuple[list[StateInfo], bool]:
        """Up to `limit` states after an id, in order, and whether there are more."""
        ids = self._ids.get(owner, [])
        first = bisect.bisect_right(ids, after)
        chosen = [self._named[owner, id] for id in ids[first : first + limit]]
        return [self.info(named) for named in chosen], first + limit < len(ids)

    def info(self, named: Named) -> StateInfo:
        place = named.standing.kept.place
        return StateInfo(
            id=named.id,
            owner=named.owner,
            tokens=named.standing.tokens,
            bytes=self._shape.bytes,
            tier="disk" if place == NOWHERE else "device" if place >= 0 else "host",
            fingerprint=self._shape.fingerprint,
            created=named.created,
            expires=named.expires,
            recent=list(named.standing.recent),
            busy=(named.owner, named.id) in self._busy,
        )

    def expire(self) -> None:
        """Forgets those whose time is over and which nobody is about to replace."""
        late: list[tuple[str, str]] = []
        while (key := self._expiry.first()) is not None and (
            self._named[key].expires <= self._clock()
        ):
            self._expiry.discard(key)
            late.append(key)
        for key in late:
            named = self._named[key]
            if key in self._busy:
                named.expires = self._clock() + named.ttl
                self._expiry.put(key, (named.expires, named.id, named.owner))
            else:
                self._forget(*key, for_good=True)

    def load(self, shelf: Shelf) -> None:
        """What a former process has left on the shelf, as far as it is what that wrote; other
        models' states are left alone."""
        now = self._clock()
        most = self._shape.most_bytes + MORE_BYTES
        for name, content, status in shelf.scan(self._shape.fingerprint, most):
            try:
                found = snapshot.read(content, self._shape)
                owner, id = found.extra["owner"], found.extra["id"]
                ttl, created = float(found.extra["ttl"]), float(found.extra["created"])
                check_id("id", id)
                check_ttl("ttl", ttl)
                if not 0 <= created <= MOST_TIME:
                    raise StateMalformed(f"created is {created}")
                if shelf.name(self._shape.fingerprint, owner, id) != name:
                    raise StateMalformed("the file has another name than its state")
            except EngineError as error:
                log.warning("%s: not taken over: %s", name, error.message)
                continue
            except (KeyError, ValueError) as error:
                log.warning("%s: not taken over: %r", name, error)
                continue
            written = min(status.st_mtime, now)
            if written + ttl <= now:
                shelf.delete(name)
                continue
            kept = Kept(found.tokens - len(found.tail) // 4, owner, files={name}, written={name})
            standing = Standing(kept, found.tail, found.tokens, found.drawn, found.recent)
            self._tiers.hold(kept)
            self._add(Named(owner, id, standing, created, ttl, written + ttl, name))
            self.files += 1

    def _add(self, named: Named) -> None:
        key = named.owner, named.id
        self._named[key] = named
        self._tiers.note_name(named.standing.kept)
        bisect.insort(self._ids.setdefault(named.owner, []), named.id)
        self._expiry.put(key, (named.expires, named.id, named.owner))

    def _forget(self, owner: str, id: str, for_good: bool = False) -> None:
        named = self._named.pop((owner, id), None)
        if named is None:
            return
        kept = named.standing.kept
        self._expiry.discard((owner, id))
        ids = self._ids[owner]
        del ids[bisect.bisect_left(ids, id)]
        if not ids:
            del self._ids[owner]
        if named.file and self._shelf is not None:
            self.files -= 1
            self._tiers.note_lost(kept, named.file)
            if for_good:
                self._shelf.delete(named.file)
        self._tiers.note_name(kept, -1)
        self._tiers.release(kept)

    def _write(self, named: Named, shelf: Shelf) -> None:
        if (self.files + 1) * self._shape.most_bytes > self._disk_bytes:
            log.warning("disk_state_bytes are used up: state %r is in memory only", named.id)
            shelf.delete(self._file(named, shelf))  # of a former state
            return
        kept, standing = named.standing.kept, named.standing
        file = named.file = self._file(named, shelf)
        self.files += 1
        extra = {
            "owner": named.owner,
            "id": named.id,
            "ttl": repr(named.ttl),
            "created": repr(named.created),
        }

        def unwritten() -> None:
            self._tiers.note_lost(kept, file)
            shelf.delete(file)  # what a former state has left there is not this one
            named.file = ""
            self.files -= 1

        def written(result: bytes | OSError) -> None:
            if self._named.get((named.owner, named.id)) is not named:
                return  # the name has gone, or a later write follows
            if isinstance(result, OSError):
                unwritten()
            else:
                self._tiers.note_written(kept, file)

        def fetched(state: bytes | None) -> None:
            current = self._named.get((named.owner, named.id)) is named
            if not current:
                return
            if state is None or shelf.pending >= MOST_PENDING:
                if state is not None:
                    log.warning("the disk is too slow: state %r is in memory only", named.id)
                unwritten()
                return
            given = standing.snapshot(state, extra)
            kept.files |= {file}
            shelf.write(file, lambda: snapshot.write(given, self._shape), written)

        self._fetch(kept, fetched)

    def _file(self, named: Named, shelf: Shelf) -> str:
        return shelf.name(self._shape.fingerprint, named.owner, named.id)
