"""API keys: reads keys from settings and files, and finds the key that a client shows.

Each line of a key file is `name:key` or `name key`, optionally followed by ` priority=N`, the most
urgent priority that requests with this key may have (default 0). Empty lines and lines that begin
with # are ignored. Several keys may have the same name, so that a key can be replaced while the old
one is still in use; states, the prefix cache and shares of the queue belong to the name.

Keys are kept as SHA-256 digests. The digest of a client's key is compared with all of them, each in
constant time, so that the time taken reveals nothing about any key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError
from engine.protocol.requests import LEAST_PRIORITY, MOST_PRIORITY
from service.secret_files import read_secret
from service.settings import Settings

logger = logging.getLogger(__name__)

ADMIN = "(admin)"  # the admin key's name in logs; no API key can have it
LEAST_LENGTH = 16  # of a key: 96 bits of base64
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
KEY = re.compile(rf"[!-+\--~]{{{LEAST_LENGTH},512}}")  # visible ASCII except the comma
ALLOWED_KEY = f"{LEAST_LENGTH} to 512 visible ASCII characters without commas"
LINE = re.compile(r"([^\s:]+)\s*[\s:]\s*(\S+)(?:\s+priority=(-?\d{1,3}))?", re.ASCII)
LOOK_SECONDS = 1.0  # between checks whether the file has changed


class Key(NamedTuple):
    """The properties of an API key."""

    name: str
    least_priority: int = 0  # the most urgent priority that its requests may have


class KeyRing:
    """A set of keys, as digests with their properties."""

    def __init__(self, keys: Mapping[bytes, Key]) -> None:
        self._keys = tuple(keys.items())

    def find(self, key: bytes) -> Key | None:
        """Return the properties of a key, or None if it is not in the set."""
        shown, found = sha256(key).digest(), None
        for digest, known in self._keys:
            if hmac.compare_digest(digest, shown):
                found = known
        return found


def single_key(key: str, name: str, source: str) -> KeyRing:
    """Return a ring of one key. Raises ConfigError, which never shows the key."""
    if not KEY.fullmatch(key):
        raise ConfigError(f"{source} is not a valid key; allowed: {ALLOWED_KEY}")
    return KeyRing({sha256(key.encode()).digest(): Key(name)})


def parse_keys(text: str, source: str, *, separator: str = "\n") -> dict[bytes, Key]:
    """Return the properties of the listed keys by their digests.

    Raises ConfigError if there are none or an entry is wrong. It names the entry of `source`, but
    never shows a key.
    """
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(text.split(separator), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{source}, entry {number}"
        match = LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{where}: allowed: name:key, optionally followed by priority=N")
        name, key, priority = match.groups()
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: the name is not valid; allowed: 1 to 64 letters, digits, and . _ -"
            )
        if not KEY.fullmatch(key):
            raise ConfigError(f"{where}: the key of {name} is not valid; allowed: {ALLOWED_KEY}")
        known = Key(name, int(priority or 0))
        if not LEAST_PRIORITY <= known.least_priority <= MOST_PRIORITY:
            allowed = f"{LEAST_PRIORITY} to {MOST_PRIORITY}"
            raise ConfigError(f"{where}: priority={priority}; allowed: {allowed}")
        if keys.setdefault(sha256(key.encode()).digest(), known) != known:
            raise ConfigError(
                f"{where}: the key of {name} is listed before, with another name or priority"
            )
    if not keys:
        raise ConfigError(f"{source} holds no keys")
    return keys


class ApiKeys:
    """The API keys of the environment and of a file, which is read again when it changes."""

    def __init__(self, listed: str | None, path: Path | None) -> None:
        """Read the keys.

        `listed`: entries separated by commas. `path`: the key file. Raises ConfigError.
        """
        self._fixed = (
            {} if listed is None else parse_keys(listed, "MINSERVE_API_KEYS", separator=",")
        )
        self._path = path
        self._stamp = self._look()
        self._ring = self._read()

    def find(self, key: bytes) -> Key | None:
        """Return the properties of a key, or None if it is not valid."""
        return self._ring.find(key)

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled.

        The keys stay as they are while the file cannot be read or has a mistake.
        """
        while self._path is not None:
            await asyncio.sleep(LOOK_SECONDS)
            stamp = await asyncio.to_thread(self._look)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                self._ring = await asyncio.to_thread(self._read)
                logger.info("%s has changed: its keys are valid from now on", self._path)
            except ConfigError as error:
                logger.error("error: %s; the keys stay as they were", error.message)

    def _look(self) -> tuple[int, ...] | None:
        """Return a value that changes when the file changes; None if there is no file."""
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> KeyRing:
        keys = dict(self._fixed)
        if self._path is not None:
            source = str(self._path)
            for digest, key in parse_keys(read_secret(self._path), source).items():
                if keys.setdefault(digest, key) != key:
                    raise ConfigError(
                        f"{source}: the key of {key.name} is in MINSERVE_API_KEYS, too, with "
                        "another name or priority"
                    )
        return KeyRing(keys)


def load_keys(settings: Settings) -> tuple[ApiKeys | None, KeyRing | None]:
    """Load the API keys and the admin key of the settings; None where there are none.

    Raises ConfigError, also if /metrics requires a key that does not exist.
    """
    listed, file = settings.api_keys, settings.api_keys_file
    keys = None
    if listed is not None or file is not None:
        keys = ApiKeys(None if listed is None else listed.get_secret_value(), file)
    admin = None
    if settings.admin_key is not None and settings.admin_key_file is not None:
        raise ConfigError(
            "MINSERVE_ADMIN_KEY and --admin-key-file are both given; allowed: one of them"
        )
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
    return keys, admin
