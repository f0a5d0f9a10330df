"""StateCall and StateReply: what an API process asks of the states that the engine keeps."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol.failed import Failed

# What each does: see StateCall.
StateAction = Literal["get", "fork", "move", "delete", "list", "export", "import"]
Tier = Literal["device", "host", "disk"]


class StateCall(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Asks something of the kept states of `owner`; `StateReply` of the same `call` answers.

    get: the state `id`, which counts as a use of it. fork: the same state under another id,
    `target` ("": a new one). move: likewise, but then `id` is forgotten, and its place in the quota
    is the other's. delete: forgets `id`. list: up to `limit` states in order of their
    ids, from the first after `id` on. export: `id` as a file. import: the file `content` under the
    id `target` ("": a new one).

    Where there is a folder of states, what fork, move and import keep is there before they are
    answered, or they fail (StateNotStored) and nothing has changed; where the error says so (a disk
    that hangs, or a folder that cannot be synced) it is kept, or may be yet. What delete could not
    remove is there still.
    """

    call: int
    action: StateAction
    owner: str = ""
    id: str = ""
    target: str = ""
    content: bytes = b""
    limit: int = 100
    ttl: float | None = None  # of what fork, move and import keep; None: the engine's own
    brief: bool = False  # it need not last: the folder is not waited for, and memory will do


class StateInfo(msgspec.Struct, frozen=True, array_like=True):
    """One kept state. Times are seconds since the epoch."""

    id: str
    owner: str
    tokens: int  # that it stands after
    bytes: int  # of the state, wherever it lies
    tier: Tier
    fingerprint: str  # of the model that it belongs to
    created: float
    expires: float  # unless it is used before
    recent: list[int] = []  # the last tokens, up to four, whose text may end within a character
    busy: bool = False  # a request is under way that will take its place
    # It lies in the folder of states, where a restart finds it; None: there is no such folder.
    stored: bool | None = None


class StateReply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The one answer to an `StateCall`; where `failed` is set, nothing was done (its `request` is
    the call)."""

    call: int
    failed: Failed | None = None
    states: list[StateInfo] = []  # one, but for delete (none) and list
    content: bytes = b""  # of export
    more: bool = False  # of list: there are states after these
