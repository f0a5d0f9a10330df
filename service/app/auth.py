"""Access: which key a path asks for, checked before anything of a request's body is read.

Paths that are not listed as open ask for a key, those that do not exist too. Without API keys in
the settings nothing does, but for administration: below /admin only the admin key is of use, and
where there is none, nothing is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.protocol import requests
from service import playground, reference
from service.http.errors import ApiError, respond
from service.http.scope import KEY_NAME, LEAST_PRIORITY, header
from service.http.slashes import plain
from service.keys import ApiKeys, Key, KeyRing, load_keys
from service.settings import Settings

# What tells nothing that is anybody's own.
OPEN_PATHS = {"/health", "/ready", "/docs", "/openapi.json"}
METRICS_PATH = "/metrics"
BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

# Whose key opens a path.
Level = Literal["open", "key", "admin"]


class Access:
    """The keys of a server and what each of them opens."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        admin: KeyRing | None = None,
        metrics: Level = "open",
        pages: Iterable[str] = (),
    ) -> None:
        """`pages`: paths that are open beside OPEN_PATHS."""
        self.keys = keys
        self._open = OPEN_PATHS.union(pages)
        self._admin = admin
        self._metrics = metrics

    @property
    def has_admin(self) -> bool:
        """Whether there is anything below /admin."""
        return self._admin is not None

    def level(self, path: str) -> Level:
        """Whose key opens `path`."""
        if path in self._open:
            return "open"
        if path == METRICS_PATH:
            return self._metrics
        if path == "/admin" or path.startswith("/admin/"):
            return "admin"
        return "open" if self.keys is None else "key"

    def admit(self, scope: Scope) -> Key | None:
        """The key that opens a request's path, None where none is needed. Raises ApiError: 401
        without a key that is known, 403 where it is not the admin's, and 404 for administration
        where there is no admin key."""
        path = plain(scope["path"])
        level = self.level(path)
        if path != scope["path"] and level == "open" and self.keys is not None:
            level = "key"  # only a path as it stands is open
        if level == "open":
            return None
        if level == "admin" and self._admin is None:
            raise ApiError(404, f"no such path: {path}", code="not_found")
        shown = _shown_key(scope)
        if shown is None:
            raise _unauthorized(
                "no API key; send one in the header Authorization: Bearer KEY, or x-api-key: KEY"
            )
        owner = None if self.keys is None else self.keys.find(shown)
        admin = None if self._admin is None else self._admin.find(shown)
        if admin is not None and (level == "admin" or path == METRICS_PATH):
            return admin
        if owner is None:
            raise _unauthorized("the API key is not known here", 'error="invalid_token"')
        if level == "admin":
            raise ApiError(403, f"{path} asks for the admin key", code="not_admin")
        return owner


def load_access(settings: Settings) -> Access:
    """What the settings say. Raises ConfigError."""
    keys, admin = load_keys(settings)
    # The pages are loaded without a key, and ask for one.
    pages = reference.paths() | (playground.paths() if settings.playground else set())
    return Access(keys, admin, settings.metrics_access, pages)


class ApiKeyAuth:
    """Lets those requests through whose key opens their path; their scope tells its name and the
    most urgent priority that they may have."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                key = self.access.admit(scope)
            except ApiError as error:
                return await respond(scope, error)(scope, receive, send)
            scope[KEY_NAME] = None if key is None else key.name
            scope[LEAST_PRIORITY] = requests.LEAST_PRIORITY if key is None else key.least_priority
        await self.app(scope, receive, send)


def _shown_key(scope: Scope) -> bytes | None:
    bearer = BEARER.fullmatch(header(scope, b"authorization") or "")
    shown = bearer[1] if bearer else header(scope, b"x-api-key")
    return None if shown is None else shown.encode("latin-1")


def _unauthorized(message: str, *details: str) -> ApiError:
    challenge = ", ".join(('Bearer realm="minserve"', *details))
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
