"""The file of a named state: a snapshot with owner, id and lifetime in its metadata.

All of it is validated on reading, since others may put files into the folder too.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.storage import snapshot
from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.snapshot import Snapshot, StateLayout
from engine.errors import InvalidRequest, StateMalformed
from engine.protocol.validation import check_ttl

MOST_TIME = 2.0**40  # seconds since the epoch
MOST_ID = 128  # characters
ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")


@dataclass(frozen=True)
class StateFile:
    """The content of a file; times are in seconds, `created` since the epoch."""

    owner: str
    id: str
    ttl: float
    created: float
    snapshot: Snapshot


def is_id(id: str) -> bool:
    """Return whether a state can have this id."""
    return 0 < len(id) <= MOST_ID and ID_CHARACTERS.issuperset(id)


def check_id(param: str, id: str) -> None:
    """Check a state's id; raises InvalidRequest that names `param`."""
    if not is_id(id):
        raise InvalidRequest(
            f"{param} is {id[: MOST_ID + 1]!r}; allowed: 1 to {MOST_ID} letters, digits and . _ : "
            "or -",
            param=param,
        )


def name_of(owner: str, id: str, shape: StateLayout) -> str:
    """Return the name of a state's file."""
    return StateFileStore.name(shape.fingerprint, owner, id)


def entries(owner: str, id: str, ttl: float, created: float) -> dict[str, str]:
    """Return the extra metadata of the snapshot, from which `parse` restores the fields."""
    return {"owner": owner, "id": id, "ttl": repr(ttl), "created": repr(created)}


def parse(name: str, content: bytes, shape: StateLayout) -> StateFile:
    """Parse and validate the file of this name. Raises EngineError if it is invalid."""
    found = snapshot.read(content, shape)
    try:
        owner, id = found.extra["owner"], found.extra["id"]
        ttl, created = float(found.extra["ttl"]), float(found.extra["created"])
        written_to = name_of(owner, id, shape)
    except (KeyError, ValueError) as error:
        raise StateMalformed(f"a metadata entry is missing or malformed: {error!r}") from None
    check_id("id", id)
    check_ttl("ttl", ttl)
    if not 0 <= created <= MOST_TIME:
        raise StateMalformed(f"created is {created}; allowed: 0 to {MOST_TIME:g}")
    if written_to != name:
        raise StateMalformed("the file's name does not match its owner and id")
    return StateFile(owner, id, ttl, created, found)
