"""Helpers for child processes: the environment to run a module, and how a process ended."""

from __future__ import annotations

import os
import signal
import sys


def module_environment() -> dict[str, str]:
    """Return the environment for `python -P -m MODULE`.

    The child finds exactly the modules that this process finds. -P keeps a folder named `engine` in
    the working directory from shadowing the package.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its return code (negative: a signal)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
