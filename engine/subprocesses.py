"""Processes of this program: the environment of a module, and how one ended."""

from __future__ import annotations

import os
import signal
import sys


def module_environment() -> dict[str, str]:
    """For `python -P -m MODULE`, which then finds the modules that this process finds, and no
    others: -P keeps a folder named `engine` in the working directory from taking the package's
    place."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def describe_exit(code: int) -> str:
    """How a process ended, by its return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
