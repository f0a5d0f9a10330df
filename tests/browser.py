"""Whether there is a browser for those tests that need one, and where."""

from __future__ import annotations

import importlib.util
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NEEDED = ("playwright", "axe_playwright_python")


def executable() -> str | None:
    """Of the system's Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str | None:
    """None when browser tests can run, else the reason why they cannot."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install -e '.[test,browser]')"
    return None if executable() else f"no {' or '.join(NAMES)} (apt-get install chromium)"
