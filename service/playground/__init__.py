"""The playground's files: one page, its style and its scripts, each with what browsers are told.

They are read once and served as they lie here: nothing is built, nothing comes from elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Where the files lie, beside the page itself at /.
FOLDER_PATH = "/playground/"

# Nothing inline, nothing from elsewhere, no frame around it; scripts cannot write markup either.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # asked for again each time; the ETag saves the bytes
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: its bytes and its headers, the ETag among them."""

    content: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        """Of its bytes."""
        return self.headers["etag"]


@cache
def assets() -> dict[str, Asset]:
    """Every file of the playground by its name."""
    found: dict[str, Asset] = {}
    for entry in files(__name__).iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_file() and suffix in TYPES:
            found[entry.name] = make_asset(entry.read_bytes(), TYPES[suffix])
    return found


def paths() -> set[str]:
    """Every path that belongs to the playground."""
    return {"/", *(FOLDER_PATH + name for name in assets() if name != PAGE)}


def make_asset(content: bytes, content_type: str) -> Asset:
    """A file with its headers."""
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, {**HEADERS, "content-type": content_type, "etag": etag})
