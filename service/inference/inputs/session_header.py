"""SessionHeader: the request header that says which requests belong together.

Routers in front of several servers send a session's requests to one server by such a header. What
it means here depends on the settings:

- With --session-header NAME, the header NAME is the request's `session_id`, as if its body named
  it.
- Without it, the header x-session-id places requests: those with the same value go to the same
  engine, where that costs little (`Request.placement`). Any text will do, and no answer depends on
  it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.types import Scope

from engine.protocol.placement import digest_of
from service.http.errors import invalid
from service.http.scope import header
from service.inference.inference_request import InferenceRequest
from service.schemas.states import CHARACTERS, MOST_ID, SESSION, SessionId
from service.settings import Settings

PLACEMENT_HEADER = "x-session-id"
MOST_SESSION = MOST_ID - len(SESSION)  # characters of a session's name

_SESSION_ID: TypeAdapter[str] = TypeAdapter(SessionId)


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """The header of one server's settings."""

    name: str  # in lower case
    key: bytes  # the name as it stands in an ASGI scope
    names_session: bool  # whether it is the session_id, and not the placement alone

    @classmethod
    def of(cls, settings: Settings) -> SessionHeader:
        """Return the header of a server with these settings."""
        given = settings.session_header
        name = (given or PLACEMENT_HEADER).lower()
        return cls(name, name.encode(), given is not None)

    def placement(self, scope: Scope) -> str:
        """Return the text by which a request is placed; "" if the header is not there.

        It is the header's value, or the digest of one that is longer than any state's id: the text
        travels with every prompt of the request.
        """
        value = header(scope, self.key) or ""
        return value if len(value) <= MOST_ID else digest_of(value)

    def session(self, scope: Scope) -> str | None:
        """Return the session that the header names; None if it names none.

        Raises ApiError 400 for a value that is no session_id, and for several values that differ:
        a proxy and a client may each have added one.
        """
        if not self.names_session:
            return None
        found = {value for name, value in scope["headers"] if name == self.key}
        if not found:
            return None
        if len(found) > 1:
            raise invalid(self.name, "the header is there several times, with different values")
        (value,) = found
        try:
            return _SESSION_ID.validate_python(value.decode("latin-1"))
        except ValidationError:
            raise invalid(
                self.name,
                f"the header names a session; allowed: 1 to {MOST_SESSION} characters of "
                f"{CHARACTERS}",
            ) from None

    def completed(self, scope: Scope, given: Any, inference: InferenceRequest) -> Any:
        """Return a body's `session_id`, with the header's session where the body names none.

        Args:
            scope: The request.
            given: The body's value: a session, a list with one per prompt, or None.
            inference: The request, which is told where the session comes from, for later errors.

        Raises ApiError 400 as `session` does, and if the body names another session.
        """
        session = self.session(scope)
        if session is None:
            return given
        values = given if isinstance(given, list) else [given]
        for other in values:
            if other not in (None, session):
                raise invalid(
                    "session_id",
                    f"is {other!r}, but the header {self.name} says {session!r}; allowed: the same "
                    "session, or only one of the two",
                )
        if session not in values:
            inference.session_field = self.name
        return [session] * len(values) if isinstance(given, list) else session

    def check_none(self, scope: Scope, where: str, why: str) -> None:
        """Raise ApiError 400 if the header names a session where there can be none.

        Args:
            scope: The request.
            where: The endpoint, for the error's message.
            why: The reason, as a sentence's end.
        """
        if self.session(scope) is not None:
            raise invalid(
                self.name,
                f"the header names a session (--session-header), and {where} has none: {why}; "
                "allowed: this header with /v1/completions and /v1/generate",
            )
