"""Wire types of kept states: the /v1/states endpoints, and the state fields of other requests."""

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

SESSION = "session:"  # prefix of the id of a session's state
CHARACTERS = r"[A-Za-z0-9._:-]"
MOST_ID = 128  # characters
MOST_LISTED = 1000  # states on a page
MOST_SALT = 64  # bytes of UTF-8


def _is_segment(id: str) -> str:
    """Check that an id can be a segment of a path: clients resolve "." and ".." themselves."""
    if id in (".", ".."):
        raise ValueError('an id cannot be "." or "..", because no path can name it')
    return id


StateId = Annotated[
    str,
    Field(
        pattern=rf"^{CHARACTERS}{{1,{MOST_ID}}}$",
        description=f'1 to {MOST_ID} letters, digits, . _ : and -; not "." or "..".',
    ),
    AfterValidator(_is_segment),
]
SessionId = Annotated[
    str,
    Field(
        pattern=rf"^{CHARACTERS}{{1,{MOST_ID - len(SESSION)}}}$",
        description="Continues the session of this name, or begins it; one request at a time. Its "
        f'state has the id "{SESSION}" followed by the name.',
    ),
]
Ttl = Annotated[
    float,
    Field(
        gt=0,
        le=MOST_TTL,
        description="Seconds that the state is kept after its last use. Default: the server's "
        "setting.",
    ),
]
CacheSalt = Annotated[
    str,
    Field(
        max_length=MOST_SALT,
        description="Only requests with the same key and salt get prefix cache hits on what this "
        "request reads.",
    ),
]
NoCache = Annotated[
    bool,
    Field(
        description="Whether to keep the prompt and its answer out of the prefix cache: nothing is "
        "read from it, and nothing is left in it. Not with cache_salt or cache_points. Default: "
        "false."
    ),
]
Turn = Annotated[
    int,
    Field(
        ge=1,
        le=INT32_MAX,
        description="With session_id or state only: the number of this turn in the text that is "
        "continued, from 1 on. If the text has had this turn, the answer is 409 turn_done, and if "
        "turns before it are missing, 409 turn_ahead; nothing is done then. Default: not checked.",
    ),
]
CachePoints = Annotated[
    Many[Annotated[int, Field(ge=1, le=INT32_MAX)]],
    Field(
        max_length=64,
        description="Prompt lengths, in tokens, at which a state is added to the prefix cache in "
        "addition to the usual places, for later prompts that share this prefix.",
    ),
]


class SnapshotSource(RequestModel):
    """A state that the client holds."""

    snapshot: str = Field(
        description="The state in base64: a snapshot of return_state, or a downloaded file."
    )


StateSource = Annotated[
    Annotated[StateId, Tag("<id>")] | Annotated[SnapshotSource, Tag("<snapshot>")],
    Discriminator(
        lambda value: {str: "<id>", dict: "<snapshot>"}.get(type(value)),
        custom_error_type="state_type",
        custom_error_message="must be a state's id or an object with its snapshot",
    ),
    Field(
        description="The state to start from: a kept state's id, or a snapshot. The prompt is read "
        "after it and may be empty."
    ),
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
        description="id or true: keep the state at the answer's end and return its id. snapshot: "
        "return the state in base64; it is kept only under a session_id, or an id that is given."
    ),
]


class KeptState(BaseModel):
    """A kept state. Times are seconds since 1970."""

    id: str | None = Field(
        default=None, description="The state's id; null if it was returned and not kept."
    )
    object: Literal["state"] = "state"
    tokens: int = Field(description="Tokens of the text that the state has read.")
    turns: int = Field(description="How many requests have made that text.")
    bytes: int = Field(description="Size of the state.")
    fingerprint: str = Field(description="Fingerprint of the model that the state belongs to.")
    tier: Literal["device", "host", "disk", "store"] | None = Field(
        default=None,
        description="Where the state is: in device memory, in main memory, on disk or in the "
        "shared store.",
    )
    created: float | None = None
    expires: float | None = Field(
        default=None, description="When the state is deleted, unless it is used before."
    )
    busy: bool = Field(
        default=False, description="Whether a running request will replace the state."
    )
    stored: bool | None = Field(
        default=None,
        description="Whether the state is in the state folder or the shared store, where it "
        "survives a restart; false: it is in memory only; null: the server has neither.",
    )


class LeftState(KeptState):
    """The state at the end of a request."""

    snapshot: str | None = Field(
        default=None, description="The state in base64, with return_state: snapshot."
    )


class StateRequest(RequestModel):
    """A prompt to read into a state, and how to keep the state."""

    prompt: Prompt
    model: str | None = Field(
        default=None, description="The model's name. Default: the model that is served."
    )
    state: StateSource | None = None
    id: StateId | None = Field(
        default=None,
        description="Id to keep the state under; it replaces a state of this id. Default: a new "
        "id.",
    )
    ttl: Ttl | None = None
    return_state: ReturnState | None = None
    turn: Turn | None = None
    cache_salt: CacheSalt | None = None
    cache_points: CachePoints | None = None
    no_cache: NoCache | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None


class StateResponse(LeftState):
    """The state that was kept, and the tokens that were read for it."""

    model: str
    usage: Usage


class ForkRequest(RequestModel):
    """How to keep the copy of a state. The body may be empty or missing."""

    id: StateId | None = Field(
        default=None,
        description="Id of the copy; it replaces a state of this id. Default: a new id.",
    )
    ttl: Ttl | None = None


class StateQuery(BaseModel):
    """How to keep an imported state."""

    model_config = ConfigDict(extra="forbid")

    id: StateId | None = Field(
        default=None,
        description="Id to keep the state under; it replaces a state of this id. Default: a new "
        "id.",
    )
    ttl: Ttl | None = None


class TextQuery(StateQuery):
    """How to read a text that is the request's body, and how to keep its state."""

    state: StateId | None = Field(default=None, description="Id of a kept state to start from.")
    priority: Priority | None = None


class ListQuery(BaseModel):
    """A page of the list of states."""

    model_config = ConfigDict(extra="forbid")

    after: StateId | None = Field(default=None, description="The last id of the page before.")
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = Field(
        default=100, description="Most states on the page."
    )


class StateList(BaseModel):
    """A page of states in the order of their ids. `after: last_id` asks for the next page."""

    object: Literal["list"] = "list"
    data: list[KeptState]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedState(BaseModel):
    """A state that has been deleted."""

    id: str
    object: Literal["state"] = "state"
    deleted: Literal[True] = True


CREATE_EXAMPLES: dict[str, Any] = {
    "a text": {"value": {"prompt": "Title: Emma\nAuthor: Jane Austen\nYear: 1815\n\n"}},
    "ids, kept for an hour": {"value": {"prompt": [74, 85, 76], "id": "juliet", "ttl": 3600}},
}
