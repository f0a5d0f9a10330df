"""The API reference at /docs: Swagger UI in a page of our own.

The files of Swagger UI come from an installed package. They are served like the playground's, with
the same headers, so the page works without any other host.
"""

from __future__ import annotations

import base64
import re
from functools import cache
from importlib.resources import files
from urllib.parse import unquote_to_bytes

from service import playground
from service.playground import TYPES, Asset, make_asset

PATH = "/docs"
# The path of the files; the page itself is at PATH.
FOLDER_PATH = "/docs/"
PAGE = "index.html"
OWN = (PAGE, "prepare.js", "main.js")
ICON = "icon.svg"  # the playground's
SCRIPT, STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
BUNDLE = "fastapi_offline", "static"  # the package with these files, and their folder in it
# An image embedded in a style sheet, which the content security policy does not allow.
_EMBEDDED = re.compile(rb"""url\((["']?)data:image/([\w+.-]+)(;[\w;=-]*)?,(.*?)\1\)""")
_SUFFIXES = {"svg+xml": ".svg", "png": ".png", "jpeg": ".jpg"}
_TYPES = {**TYPES, ".png": "image/png", ".jpg": "image/jpeg"}


@cache
def assets() -> dict[str, Asset]:
    """Return every file of the reference by its name."""
    found = {name: _asset(files(__name__).joinpath(name).read_bytes(), name) for name in OWN}
    found[ICON] = playground.assets()[ICON]
    package, folder = BUNDLE
    bundle = files(package) / folder
    found[SCRIPT] = _asset((bundle / SCRIPT).read_bytes(), SCRIPT)
    style, images = _without_embedded((bundle / STYLE).read_bytes())
    found[STYLE] = _asset(style, STYLE)
    return found | {name: _asset(image, name) for name, image in images.items()}


def paths() -> set[str]:
    """Return every path of the reference."""
    return {PATH, *(FOLDER_PATH + name for name in assets() if name != PAGE)}


def _without_embedded(style: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return a style sheet with its embedded images replaced by links, and the images by name."""
    images: dict[str, bytes] = {}

    def take_out(found: re.Match[bytes]) -> bytes:
        _, kind, details, content = found.groups()
        raw = unquote_to_bytes(content)
        image = base64.b64decode(raw) if (details or b"").endswith(b";base64") else raw
        name = f"image-{len(images)}{_SUFFIXES[kind.decode()]}"
        images[name] = image
        return f'url("{name}")'.encode()

    return _EMBEDDED.sub(take_out, style), images


def _asset(content: bytes, name: str) -> Asset:
    return make_asset(content, _TYPES[name[name.rfind(".") :]])
