"""Access control: which key each path requires, checked before a request's body is read.

- Every path that is not listed as open requires an API key, even if the path does not exist.
- Without API keys in the settings, every path is open except /admin.
- Paths below /admin require the admin key; without an admin key they do not exist (404).
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

# Paths that reveal nothing about any client.
OPEN_PATHS = {"/health", "/ready", "/version", "/docs", "/openapi.json"}
# Paths that tell sums over all clients; the settings say who may read them.
METRICS_PATHS = {"/metrics", "/load"}
BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

# The kind of key that a path requires.
Level = Literal["open", "key", "admin"]


class Access:
    """The keys of a server and the paths that each kind of key opens."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        admin: KeyRing | None = None,
        metrics: Level = "open",
        pages: Iterable[str] = (),
    ) -> None:
        """Combine keys and rules.

        Args:
            keys: API keys; None: anybody may ask.
            admin: The admin key, if there is one.
            metrics: The key that METRICS_PATHS require.
            pages: Open paths in addition to OPEN_PATHS.
        """
        self.keys = keys
        self._open = OPEN_PATHS.union(pages)
        self._admin = admin
        self._metrics = metrics

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key, and so the /admin endpoints."""
        return self._admin is not None

    def level(self, path: str) -> Level:
        """Return the kind of key that `path` requires."""
        if path in self._open:
            return "open"
        if path in METRICS_PATHS:
            return self._metrics
        if path == "/admin" or path.startswith("/admin/"):
            return "admin"
        return "open" if self.keys is None else "key"

    def admit(self, scope: Scope) -> Key | None:
        """Return the key with which a request is allowed, or None if its path is open.

        Raises ApiError: 401 without a valid key, 403 for an API key where the admin key is
        required, 404 below /admin without an admin key.
        """
        path = plain(scope["path"])
        level = self.level(path)
        if path != scope["path"] and level == "open" and self.keys is not None:
            level = "key"  # only the exact spelling of an open path is open
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
        if admin is not None and (level == "admin" or path in METRICS_PATHS):
            return admin
        if owner is None:
            raise _unauthorized("the API key is not valid", 'error="invalid_token"')
        if level == "admin":
            raise ApiError(403, f"{path} requires the admin key", code="not_admin")
        return owner


def load_access(settings: Settings) -> Access:
    """Return the access rules of the settings. Raises ConfigError for keys that cannot be used."""
    keys, admin = load_keys(settings)
    # Browsers load the pages without a key; the pages ask the user for one.
    pages = reference.paths() | (playground.paths() if settings.playground else set())
    return Access(keys, admin, settings.metrics_access, pages)


class ApiKeyAuth:
    """ASGI middleware that rejects requests without the key that their path requires.

    It stores the key's name and the most urgent priority that the key allows in the scope.
    """

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
