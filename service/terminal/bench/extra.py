"""Optional packages of the extra `loadtest`, which only a few options of `minserve bench` need."""

from __future__ import annotations

from importlib.util import find_spec


def check_installed(package: str) -> None:
    """Raise RuntimeError with an install command if a package is not installed."""
    if find_spec(package) is None:
        raise RuntimeError(f"{package} is not installed; pip install 'minserve[loadtest]'")
