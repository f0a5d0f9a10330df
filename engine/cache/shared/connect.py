"""Makes the SharedStore that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.cache.shared.folder_store import FolderStore
from engine.cache.shared.redis_store import RedisStore
from engine.cache.shared.redis_url import FORMS, redacted
from engine.cache.shared.store import SharedStore
from engine.errors import ConfigError

SCHEMES = ("redis", "rediss")
KINDS = ("", "sentinel", "cluster")


def open_shared_store(url: str, model: str, sync: bool = False) -> SharedStore:
    """Return the store, which may not be reachable yet.

    Args:
        url: a form in `redis_url`, or file:///FOLDER.
        model: fingerprint of the model; servers of other models do not see its states.
        sync: in a folder, sync each version to the disk before it counts.

    Raises ConfigError for a URL that no store has, and for a folder that cannot be used.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    scheme, _, kind = parts.scheme.partition("+")
    if scheme in SCHEMES and kind in KINDS:
        return RedisStore(url, model)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.strip("/"):
        return FolderStore(Path(unquote(parts.path)), model, sync)
    raise ConfigError(f"state_store is {redacted(url)!r}; allowed: {FORMS}", param="state_store")
