"""Kept states on the wire: the endpoints of /v1/states, and the fields by which other requests
start from a state or leave one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from engine.config import MOST_TTL
from service.schemas.common import (
    INT32_MAX,
    Many,
    Priority,
    Prompt,
    RequestModel,
    Timeout,
    Usage,
)

SESSION = "session:"  # how the id of a session's state begins
CHARACTERS = r"[A-Za-z0-9._:-]"
MOST_ID = 128  # characters
MOST_LISTED = 1000  # states on a page
MOST_SALT = 64  # bytes of UTF-8


def _is_segment(id: str) -> str:
    """Of a path: clients leave out "." and take ".." as the way up."""
    if id in (".", ".."):
        raise ValueError('"." and ".." are no ids: no path can name them')
    return id


StateId = Annotated[
    str,
    Field(
        pattern=rf"^{CHARACTERS}{{1,{MOST_ID}}}$",
        description=f'1 to {MOST_ID} letters, digits, . _ : and -, but for "." and ".."',
    ),
    AfterValidator(_is_segment),
]
SessionId = Annotated[
    str,
    Field(
        pattern=rf"^{CHARACTERS}{{1,{MOST_ID - len(SESSION)}}}$",
        description="goes on where the session stopped, or begins it; one request at a time. Its "
        f'state has the id "{SESSION}" and this',
    ),
]
Ttl = Annotated[
    float,
    Field(gt=0, le=MOST_TTL, description="seconds after its last use that a state is kept"),
]
CacheSalt = Annotated[
    str,
    Field(
        max_length=MOST_SALT,
        description="what is read is known again to requests of the same key and salt only",
    ),
]
CachePoints = Annotated[
    Many[Annotated[int, Field(ge=1, le=INT32_MAX)]],
    Field(
        max_length=64,
        description="prompt lengths, in tokens, at which a state is cached beside those that are "
        "always: for prompts to come that are the same up to there",
    ),
]


class SnapshotSource(RequestModel):
    """A state that the client holds itself."""

    snapshot: str = Field(description="base64: what return_state: snapshot gave, or a download")


StateSource = Annotated[
    Annotated[StateId, Tag("<id>")] | Annotated[SnapshotSource, Tag("<snapshot>")],
    Discriminator(
        lambda value: {str: "<id>", dict: "<snapshot>"}.get(type(value)),
        custom_error_type="state_type",
        custom_error_message="must be a state's id or an object with its snapshot",
    ),
    Field(description="after which the prompt, which may then be empty, is read"),
]


def _kind_of_return(value: Any) -> str | None:
    if type(value) is bool:
        return "<bool>"
    return "<name>" if isinstance(value, str) and value in ("id", "snapshot") else None


ReturnState = Annotated[
    Annotated[bool, Tag("<bool>")] | Annotated[Literal["id", "snapshot"], Tag("<name>")],
    Discriminator(
        _kind_of_return,
        custom_error_type="return_state",
        custom_error_message='must be true, false, "id" or "snapshot"',
    ),
    Field(
        description="keeps the state at the answer's end and tells its id (true is id), or gives "
        "it away as a base64 snapshot and keeps nothing"
    ),
]


class KeptState(BaseModel):
    """A state as it was kept. Times are seconds since 1970."""

    id: str | None = Field(default=None, description="null where it was only given away")
    object: Literal["state"] = "state"
    tokens: int = Field(description="of the text that it stands after")
    bytes: int
    fingerprint: str = Field(description="of the model that it belongs to")
    tier: Literal["device", "host", "disk"] | None = None
    created: float | None = None
    expires: float | None = Field(default=None, description="unless it is used before")
    busy: bool = Field(default=False, description="a request will take its place when it ends")
    stored: bool | None = Field(
        default=None,
        description="whether it lies in the state folder, where a restart finds it; false: in "
        "memory only; null: the server keeps no states on disk",
    )


class LeftState(KeptState):
    """A state that a request has left."""

    snapshot: str | None = Field(default=None, description="base64, with return_state: snapshot")


class StateRequest(RequestModel):
    """A prompt to read into a state."""

    prompt: Prompt
    model: str | None = None
    state: StateSource | None = None
    id: StateId | None = Field(
        default=None, description="under which it is kept, in place of what was there; null: a new"
    )
    ttl: Ttl | None = None
    return_state: ReturnState | None = None
    cache_salt: CacheSalt | None = None
    cache_points: CachePoints | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None


class StateResponse(LeftState):
    """The state that was kept, and what was read for it."""

    model: str
    usage: Usage


class ForkRequest(RequestModel):
    """The copy's own id and time; all may be left out, the body too."""

    id: StateId | None = None
    ttl: Ttl | None = None


class StateQuery(BaseModel):
    """How a state that comes from outside is kept."""

    model_config = ConfigDict(extra="forbid")

    id: StateId | None = Field(default=None, description="null: a new one")
    ttl: Ttl | None = None


class TextQuery(StateQuery):
    """Where a text that is sent as it is goes on from."""

    state: StateId | None = Field(default=None, description="after which it is read")
    priority: Priority | None = None


class ListQuery(BaseModel):
    """Which states are listed."""

    model_config = ConfigDict(extra="forbid")

    after: StateId | None = Field(default=None, description="the last id of the page before")
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 100


class StateList(BaseModel):
    """States in order of their ids; those after `last_id` are asked for with `after`."""

    object: Literal["list"] = "list"
    data: list[KeptState]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedState(BaseModel):
    id: str
    object: Literal["state"] = "state"
    deleted: Literal[True] = True


CREATE_EXAMPLES: dict[str, Any] = {
    "a text": {"value": {"prompt": "ROMEO:\nWhat light through yonder window"}},
    "ids, kept for an hour": {"value": {"prompt": [74, 85, 76], "id": "juliet", "ttl": 3600}},
}
