"""The playground's files (a page, its styles and scripts) with their HTTP headers.

They are read once and served as they are: there is no build, and nothing is loaded from other
hosts.
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
# The path of the files; the page itself is at /.
FOLDER_PATH = "/playground/"

# No inline code, nothing from other hosts, no frames; scripts cannot insert markup.
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
    "cache-control": "no-cache",  # browsers revalidate each time; the ETag saves the transfer
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file with its HTTP headers, including the ETag."""

    content: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        """The ETag header, a digest of the file's bytes."""
        return self.headers["etag"]


@cache
def assets() -> dict[str, Asset]:
    """Return every file of the playground by its name."""
    found: dict[str, Asset] = {}
    for entry in files(__name__).iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_file() and suffix in TYPES:
            found[entry.name] = make_asset(entry.read_bytes(), TYPES[suffix])
    return found


def paths() -> set[str]:
    """Return every path of the playground."""
    return {"/", *(FOLDER_PATH + name for name in assets() if name != PAGE)}


def make_asset(content: bytes, content_type: str) -> Asset:
    """Return a file with its headers."""
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, {**HEADERS, "content-type": content_type, "etag": etag})
