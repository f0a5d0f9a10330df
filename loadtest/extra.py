"""Ends a tool with one line if a package of the extra `loadtest` is missing."""

from __future__ import annotations

import sys

from service.terminal.bench.extra import check_installed


def exit_without(package: str) -> None:
    """Ends the program with the command that installs `package` and exit code 2, if it is missing.

    For a package that is used late, call it before the measurement: not after an hour of it.
    """
    try:
        check_installed(package)
    except RuntimeError as error:
        print(f"loadtest: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
