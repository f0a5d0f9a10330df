"""Ends a tool with one line if a package of the extra `loadtest` is missing."""

from __future__ import annotations

import sys

from service.terminal.bench.extra import check_installed


def exit_without(package: str) -> None:
    """End the program if `package` is missing: print how to install it, exit with code 2.

    If a package is needed late, call this before the measurement.
    """
    try:
        check_installed(package)
    except RuntimeError as error:
        print(f"loadtest: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
