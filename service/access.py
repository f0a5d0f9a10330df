"""Access: which key a path asks for, checked before anything of a request's body is read.

Paths that are not listed as open ask for a key, those that do not exist too. Without API keys in
the settings nothing does, but for administration: below /admin only the admin key is of use, and
where there is none, nothing is there.
"""

from __future__ import annotations

import re
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import messages
from engine.errors import ConfigError
from service.errors import ApiError, respond
from service.keys import ApiKeys, Key, KeyRing, read_secret, single_key
from service.scope import KEY_NAME, LEAST_PRIORITY
from service.settings import Settings

# What tells nothing that is anybody's own.
OPEN_PATHS = {"/health", "/ready", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
METRICS_PATH = "/metrics"
ADMIN = "(admin)"  # the admin key's name in logs; no API key can have it
BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

# Whose key opens a path.
Level = Literal["open", "key", "admin"]


class Access:
    """The keys of a server and what each of them opens."""

    def __init__(
        self, keys: ApiKeys | None = None, admin: KeyRing | None = None, metrics: Level = "open"
    ) -> None:
        self.keys = keys
        self._admin = admin
        self._metrics = metrics

    def level(self, path: str) -> Level:
        """Whose key opens `path`."""
        if path in OPEN_PATHS:
            return "open"
        if path == METRICS_PATH:
            return self._metrics
        if path == "/admin" or path.startswith("/admin/"):
            return "admin"
        return "open" if self.keys is None else "key"

    def admit(self, path: str, headers: Headers) -> Key | None:
        """The key that opens `path`, None where none is needed. Raises ApiError: 401
        without a key that is known, 403 where it is not the admin's, and 404 for administration
        where there is no admin key."""
        level = self.level(path)
        if level == "open":
            return None
        if level == "admin" and self._admin is None:
            raise ApiError(404, f"no such path: {path}", code="not_found")
        shown = _shown_key(headers)
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
    listed, file = settings.api_keys, settings.api_keys_file
    keys = None
    if listed is not None or file is not None:
        keys = ApiKeys(None if listed is None else listed.get_secret_value(), file)
    admin = None
    if settings.admin_key is not None and settings.admin_key_file is not None:
        raise ConfigError("MINSERVE_ADMIN_KEY and --admin-key-file are both given; allowed: one")
    if settings.admin_key is not None:
        admin = single_key(settings.admin_key.get_secret_value(), ADMIN, "MINSERVE_ADMIN_KEY")
    elif settings.admin_key_file is not None:
        path = settings.admin_key_file
        admin = single_key(read_secret(path).strip(), ADMIN, str(path))
    missing = {"open": False, "key": keys is None, "admin": admin is None}
    if missing[settings.metrics_access]:
        raise ConfigError(
            f"--metrics-access is {settings.metrics_access}, but there is no such key; "
            "give --api-keys-file or --admin-key-file"
        )
    return Access(keys, admin, settings.metrics_access)


class KeyCheck:
    """Lets those requests through whose key opens their path; their scope tells its name and the
    most urgent priority that they may have."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                key = self.access.admit(scope["path"], Headers(scope=scope))
            except ApiError as error:
                return await respond(error)(scope, receive, send)
            scope[KEY_NAME] = None if key is None else key.name
            scope[LEAST_PRIORITY] = messages.LEAST_PRIORITY if key is None else key.least_priority
        await self.app(scope, receive, send)


def _shown_key(headers: Headers) -> bytes | None:
    bearer = BEARER.fullmatch(headers.get("authorization", ""))
    shown = bearer[1] if bearer else headers.get("x-api-key")
    return None if shown is None else shown.encode("latin-1")


def _unauthorized(message: str, *details: str) -> ApiError:
    challenge = ", ".join(('Bearer realm="minserve"', *details))
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
