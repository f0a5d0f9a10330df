"""Reads the fields about kept and cached states, and renders states in answers.

A session is a kept state whose id begins with "session:". Each request of the session continues the
state and replaces it. The engine makes sure that a session has one such request at a time.
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

UNFINISHED = 4  # tokens that an incomplete character can consist of
BORROWED_SECONDS = 60.0  # lifetime of an imported snapshot beyond its request's timeout

# The fields of requests that are read here.
FIELDS = (
    "state", "session_id", "turn", "return_state", "state_ttl", "cache_salt", "cache_points",
    "no_cache",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateUse:
    """How one prompt uses kept and cached states."""

    source: str = ""  # id of the state that the prompt continues
    optional: bool = False  # begin a new text if there is no such state
    turn: int = 0  # number of the turn in the text of that state; 0: not checked
    keep: KeepState | None = None  # how to keep the state at the end
    recent: tuple[int, ...] = ()  # the source's last tokens, if they matter
    begins: bool = True  # the prompt's text is the beginning of a text
    cache_points: tuple[int, ...] = ()
    cache_salt: str = ""
    no_cache: bool = False  # neither read from the prefix cache nor leave anything in it

    @property
    def goes_on(self) -> bool:
        """Whether the prompt is known to continue a state, so that it may be empty."""
        return bool(self.source) and not self.begins

    @property
    def first_scored(self) -> int:
        """Index of the first token of the prompt that has a log-probability."""
        return 0 if self.source and not self.optional else 1

    @property
    def company(self) -> tuple[str, str]:
        """The source state and cache salt; prompts with the same ones can share prefixes."""
        return self.source, self.cache_salt

    def fields(self, points: Sequence[int] = ()) -> dict[str, Any]:
        """Return the fields of requests.Request.

        `points`: cache points to use if the client named none. With `no_cache` there are none.
        """
        told: dict[str, Any] = {"cache_salt": self.cache_salt}
        if self.source:
            told |= {"state": self.source, "state_optional": self.optional}
        if self.turn:
            told["turn"] = self.turn
        if self.no_cache:
            told["no_cache"] = True
        else:
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
    """Read how a prompt uses states from its FIELDS.

    Args:
        values: The fields' values; None or missing if not given.
        runtime: The model.
        inference: The HTTP request; a client's snapshot is imported for its duration.
        timeout: The request's timeout, in seconds from its arrival.
        prompt: The prompt.
        name: Returns a field's name for error messages.

    Raises ApiError 400 for fields that contradict each other or have wrong values, and StateError
    for a state that cannot be used.
    """
    given = {field: values.get(field) for field in FIELDS}
    if not any(value is not None for value in given.values()):
        return NO_STATES
    state, session = given["state"], given["session_id"]
    field = inference.session_field
    if session is not None and state is not None:
        named = name(field) if field in FIELDS else field
        raise invalid(named, "not allowed together with state")
    turn, no_cache = given["turn"] or 0, bool(given["no_cache"])
    if turn and session is None and state is None:
        raise invalid(name("turn"), "allowed with session_id or state only")
    keep = _keep(given, name)
    salt, points = given["cache_salt"] or "", tuple(given["cache_points"] or ())
    _check_salt(salt, name)
    if points and session is not None:
        raise invalid(name("cache_points"), f"not allowed together with {field}")
    if no_cache and (salt or points):
        other = "cache_salt" if salt else "cache_points"
        raise invalid(name("no_cache"), f"not allowed together with {other}")
    use = StateUse(keep=keep, turn=turn, cache_salt=salt, cache_points=points, no_cache=no_cache)
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
    """Raise ApiError 400 for cache points beyond the end of a prompt of `length` tokens."""
    for i, point in enumerate(use.cache_points):
        if point > length:
            raise invalid(
                f"{name('cache_points')}[{i}]",
                f"is {point}; allowed: 1 to {length}, the prompt's length in tokens",
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
        raise invalid(name("cache_salt"), "holds a lone surrogate; allowed: valid UTF-8") from None
    if size > MOST_SALT:
        raise invalid(name("cache_salt"), f"has {size} bytes; allowed: up to {MOST_SALT}")


async def _look(
    use: StateUse, runtime: Runtime, inference: InferenceRequest, prompt: str | list[int]
) -> StateUse:
    """Look up the source state if its last tokens, or whether it exists, affect the prompt."""
    tokenizer = runtime.tokenizer
    # A prompt that is a text begins with a whole character, whatever is before it.
    unfinished = not prompt or (not isinstance(prompt, str) and len(prompt) < UNFINISHED)
    matters = tokenizer is not None and (
        tokenizer.takes_spaces_off or (tokenizer.marks_beginnings and isinstance(prompt, str))
    )
    if not (unfinished or (use.optional and matters)):
        return use
    try:
        reply = await inference.ask_state("get", id=use.source)
    except StateNotFound:
        return use  # a new session begins; or the engine will report it for this prompt alone
    return replace(use, recent=tuple(reply.states[0].recent), begins=False)


async def _bring_in(
    source: SnapshotSource, inference: InferenceRequest, timeout: float, param: str
) -> StateInfo:
    """Import a client's snapshot into the engine for the duration of the request."""
    known = inference.brought.get(source.snapshot)  # several prompts share one import
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
    """Return the bytes of a base64 text. Raises ApiError 400 if it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(param, f"is not base64: {error}") from error


def kept_state(finished: Finished | None) -> dict[str, Any] | None:
    """Return the `state` object of an answer, or None if no state was kept or returned."""
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
    """Return the object that describes a kept state in answers."""
    return {
        "id": info.id,
        "object": "state",
        "tokens": info.tokens,
        "turns": info.turns,
        "bytes": info.bytes,
        "fingerprint": info.fingerprint,
        "tier": info.tier,
        "created": info.created,
        "expires": info.expires,
        "busy": info.busy,
        "stored": info.stored,
    }


def _described(snapshot: bytes) -> dict[str, Any]:
    """Return what a snapshot's header says about the state."""
    header = parse_header(snapshot)
    ends = (header.tensors[name]["data_offsets"][1] for name in header.tensors if name != "tail")
    return {
        "tokens": int(header.metadata["tokens"]),
        "turns": int(header.metadata.get("turns", 0)),
        "bytes": max(ends),
        "fingerprint": header.metadata["fingerprint"],
    }
