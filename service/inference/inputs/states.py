"""What requests do with kept states: where each of their prompts starts, what it leaves, and how a
state is told.

A session is a state with an id of its own kind, which every request of the session goes on from and
puts a new one in the place of; that there is one such request at a time is the engine's word.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import MOST_TTL
from engine.errors import StateError, StateNotFound
from engine.protocol.events import Finished
from engine.protocol.requests import KeepState
from engine.protocol.state_calls import StateInfo
from engine.safetensors_container import parse_header
from service.http.errors import invalid
from service.inference.inference_request import InferenceRequest
from service.inference.runtime import Runtime
from service.schemas.states import MOST_SALT, SESSION, SnapshotSource

UNFINISHED = 4  # tokens, of which an unfinished character can be
BORROWED_SECONDS = 60.0  # that a client's snapshot is kept beyond the time of its request

# Fields of requests that are read here.
FIELDS = ("state", "session_id", "return_state", "state_ttl", "cache_salt", "cache_points")


@dataclass(frozen=True, slots=True)
class StateUse:
    """What one prompt has to do with kept and cached states."""

    source: str = ""  # the id of the state that it goes on from
    optional: bool = False  # or begins a text, where there is none
    keep: KeepState | None = None
    recent: tuple[int, ...] = ()  # the source's last tokens, where they matter
    begins: bool = True  # its text is the beginning of one
    cache_points: tuple[int, ...] = ()
    cache_salt: str = ""

    @property
    def goes_on(self) -> bool:
        """There is a state before the prompt, which may thus be empty."""
        return bool(self.source) and not self.begins

    @property
    def first_scored(self) -> int:
        """Index of the first token of the prompt that has a log-probability."""
        return 0 if self.source and not self.optional else 1

    @property
    def company(self) -> tuple[str, str]:
        """Prompts of one company begin alike where their texts do."""
        return self.source, self.cache_salt

    def fields(self, points: Sequence[int] = ()) -> dict[str, Any]:
        """Those of requests.Request; `points` where the client named none."""
        told: dict[str, Any] = {"cache_salt": self.cache_salt}
        if self.source:
            told |= {"state": self.source, "state_optional": self.optional}
        told["cache_points"] = self.cache_points or tuple(points)
        if self.keep is not None:
            told["keep"] = self.keep
        return told


NO_STATES = StateUse()
Name = Callable[[str], str]


async def read_use(
    values: Mapping[str, Any],
    runtime: Runtime,
    inference: InferenceRequest,
    timeout: float,
    prompt: str | list[int],
    name: Name = str,
) -> StateUse:
    """What the FIELDS in `values` ask for a prompt; `name` gives their names in errors.

    Raises ApiError 400 for fields that do not go together or have wrong values, and what the engine
    says of a state that cannot be had.
    """
    given = {field: values.get(field) for field in FIELDS}
    if not any(value is not None for value in given.values()):
        return NO_STATES
    state, session = given["state"], given["session_id"]
    if session is not None and state is not None:
        raise invalid(name("session_id"), "allowed without state only")
    keep = _keep(given, name)
    salt, points = given["cache_salt"] or "", tuple(given["cache_points"] or ())
    _check_salt(salt, name)
    if points and session is not None:
        raise invalid(name("cache_points"), "allowed without session_id only")
    use = StateUse(keep=keep, cache_salt=salt, cache_points=points)
    if isinstance(state, SnapshotSource):
        info = await _bring_in(state, inference, timeout, f"{name('state')}.snapshot")
        return replace(use, source=info.id, recent=tuple(info.recent), begins=False)
    if state is not None:
        use = replace(use, source=state, begins=False)
    elif session is not None:
        use = replace(use, source=SESSION + session, optional=True)
    if use.source:
        use = await _look(use, runtime, inference, prompt)
    return use


def check_points(use: StateUse, length: int, name: Name = str) -> None:
    """Raises ApiError 400 for cache points that lie behind a prompt of `length` tokens."""
    for i, point in enumerate(use.cache_points):
        if point > length:
            raise invalid(
                f"{name('cache_points')}[{i}]",
                f"is {point}; allowed: 1 to {length}, the prompt's end",
            )


def _keep(given: Mapping[str, Any], name: Name) -> KeepState | None:
    wanted, session = given["return_state"] or False, given["session_id"]
    if session is None and wanted is False:
        if given["state_ttl"] is not None:
            raise invalid(name("state_ttl"), "allowed with return_state or session_id only")
        return None
    export = wanted == "snapshot"
    return KeepState(
        id="" if session is None else SESSION + session,
        ttl=given["state_ttl"],
        export=export,
        store=session is not None or not export,
    )


def _check_salt(salt: str, name: Name) -> None:
    try:
        size = len(salt.encode())
    except UnicodeEncodeError:
        raise invalid(name("cache_salt"), "holds a lone surrogate") from None
    if size > MOST_SALT:
        raise invalid(name("cache_salt"), f"has {size} bytes; allowed: up to {MOST_SALT}")


async def _look(
    use: StateUse, runtime: Runtime, inference: InferenceRequest, prompt: str | list[int]
) -> StateUse:
    """Looks at the state before it is used, where its last tokens or its being there matter."""
    tokenizer = runtime.tokenizer
    # Text begins with a whole character, whatever came before it.
    unfinished = not prompt or (not isinstance(prompt, str) and len(prompt) < UNFINISHED)
    matters = tokenizer is not None and (
        tokenizer.takes_spaces_off or (tokenizer.marks_beginnings and isinstance(prompt, str))
    )
    if not (unfinished or (use.optional and matters)):
        return use
    try:
        reply = await inference.ask_state("get", id=use.source)
    except StateNotFound:
        return use  # a session begins, or the engine says it again, of this prompt alone
    return replace(use, recent=tuple(reply.states[0].recent), begins=False)


async def _bring_in(
    source: SnapshotSource, inference: InferenceRequest, timeout: float, param: str
) -> StateInfo:
    """A client's own state as one that the engine has while the request lasts."""
    known = inference.brought.get(source.snapshot)  # one for several prompts
    if known is not None:
        return known
    content = read_base64(source.snapshot, param)
    ttl = min(timeout + BORROWED_SECONDS, MOST_TTL)
    try:
        reply = await inference.ask_state("import", content=content, ttl=ttl, brief=True)
    except StateError as error:
        error.param = param
        raise
    (info,) = reply.states
    inference.borrow(info.id)
    inference.brought[source.snapshot] = info
    return info


def read_base64(text: str, param: str) -> bytes:
    """Raises ApiError 400 for what is no base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(param, f"is not base64: {error}") from error


def kept_state(finished: Finished | None) -> dict[str, Any] | None:
    """The state that a request has left, as it is told; None where it has left none."""
    if finished is None:
        return None
    if finished.state is not None:
        told = state_object(finished.state)
    elif finished.snapshot:
        nowhere = dict.fromkeys(("tier", "created", "expires"))
        told = {"id": None, "object": "state", **_described(finished.snapshot), **nowhere}
        told |= {"busy": False, "stored": None}
    else:
        return None
    snapshot = base64.b64encode(finished.snapshot).decode() if finished.snapshot else None
    return {**told, "snapshot": snapshot}


def state_object(info: StateInfo) -> dict[str, Any]:
    """A kept state as it is told."""
    return {
        "id": info.id,
        "object": "state",
        "tokens": info.tokens,
        "bytes": info.bytes,
        "fingerprint": info.fingerprint,
        "tier": info.tier,
        "created": info.created,
        "expires": info.expires,
        "busy": info.busy,
        "stored": info.stored,
    }


def _described(snapshot: bytes) -> dict[str, Any]:
    """What the engine's own file says of itself."""
    header = parse_header(snapshot)
    ends = (header.tensors[name]["data_offsets"][1] for name in header.tensors if name != "tail")
    return {
        "tokens": int(header.metadata["tokens"]),
        "bytes": max(ends),
        "fingerprint": header.metadata["fingerprint"],
    }
