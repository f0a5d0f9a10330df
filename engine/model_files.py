"""Checks that a model's file exists and can be read, with precise error messages.

A broken link or a folder in place of a file is not reported as a missing file, nor an unreadable
file as a damaged one. This module does not import torch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from engine.errors import CheckpointError

_READ_BYTES = 2**20


def mode_of(path: Path) -> int | None:
    """Return the st_mode of what is at `path`, following links; None if nothing is there.

    Raises CheckpointError for a broken link, or if `path` cannot be examined.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise CheckpointError(
                f"{path}: is a link to {os.readlink(path)}, which does not exist"
            ) from error
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def has_file(path: Path) -> bool:
    """Return whether there is a file at `path`.

    Raises CheckpointError as `mode_of` does, and if something other than a file is there.
    """
    mode = mode_of(path)
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise CheckpointError(f"{path}: is {kind}; allowed: a file")
    return mode is not None


def has_folder(path: Path) -> bool:
    """Return whether there is a folder at `path`. Raises CheckpointError as `mode_of` does."""
    mode = mode_of(path)
    return mode is not None and stat.S_ISDIR(mode)


def read_through(path: Path) -> None:
    """Read a file completely, to find disk errors before it is memory-mapped.

    Weights are mapped into memory, where a read error of the disk kills the process. Reading them
    once raises an error instead, and puts them into the page cache. Raises CheckpointError.
    """
    buffer = bytearray(_READ_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Make the error for a file that cannot be read."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")
