"""Packages of the extra `loadtest`: the server and most of `minserve bench` do without them."""

from __future__ import annotations

from importlib.util import find_spec


def check_installed(package: str) -> None:
    """Raises RuntimeError, with the command that installs it, where a package is missing."""
    if find_spec(package) is None:
        raise RuntimeError(f"{package} is not installed; pip install 'minserve[loadtest]'")
