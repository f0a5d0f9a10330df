"""StateCall and StateReply: how API processes manage the states that the engine keeps."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol.failed import Failed

# The class StateCall describes each action.
StateAction = Literal["get", "fork", "move", "delete", "list", "export", "import"]
Tier = Literal["device", "host", "disk", "store"]


class StateCall(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Manages the kept states of `owner`; a `StateReply` with the same `call` answers it.

    - get: return the state `id`; counts as a use of it.
    - fork: keep the same state under another id, `target` ("": a new id) as well.
    - move: like fork, but forget `id`; the quota is not charged twice.
    - delete: forget `id`.
    - list: return up to `limit` states in order of id, starting after `id`.
    - export: return state `id` as a file.
    - import: keep the file `content` under the id `target` ("": a new id).

    With a state folder, the results of fork, move and import are in it before the reply, except
    with `brief`. Otherwise they fail with StateNotStored and nothing has changed, unless the error
    says that the state is kept or may yet be (a disk that hangs, a folder that cannot be synced).
    States that delete could not remove still exist.
    """

    call: int
    action: StateAction
    owner: str = ""
    id: str = ""
    target: str = ""
    content: bytes = b""
    limit: int = 100
    ttl: float | None = None  # lifetime for fork, move and import; None: the engine's default
    brief: bool = False  # keep it in memory without waiting for the state folder; it need not last


class StateInfo(msgspec.Struct, frozen=True, array_like=True):
    """One kept state; times are in seconds since the epoch."""

    id: str
    owner: str
    tokens: int  # length of the text after which it was kept
    bytes: int  # size of the state
    tier: Tier
    fingerprint: str  # fingerprint of the model that made the state
    created: float
    expires: float  # unless it is used before
    recent: list[int] = []  # the last tokens, up to four, in case the text ends within a character
    busy: bool = False  # a running request is going to replace it
    # Whether it is in the state folder or the shared store and survives a restart; None: there is
    # neither.
    stored: bool | None = None
    turns: int = 0  # how many requests have made its text


class StateReply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to a `StateCall`; if `failed` is set, nothing was done.

    `failed.request` is the call's number.
    """

    call: int
    failed: Failed | None = None
    states: list[StateInfo] = []  # one state; none for delete, several for list
    content: bytes = b""  # the file, for export
    more: bool = False  # for list: more states follow
