"""Whether a file of a model is there and can be read; what is wrong with it is told in words.

Of a broken link or a folder in a file's place nobody shall be told that the file is missing, nor
of a file that may not be read that it is damaged. Nothing here imports torch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from engine.errors import CheckpointError

_READ_BYTES = 2**20


def mode_of(path: Path) -> int | None:
    """What lies at `path` (st_mode), links followed; None where there is nothing. Raises
    CheckpointError for what cannot be looked at, and for a link to nothing."""
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
    """Whether there is a file at `path`. Raises CheckpointError as `mode_of`, and where something
    is there that is no file."""
    mode = mode_of(path)
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise CheckpointError(f"{path}: is {kind}; allowed: a file")
    return mode is not None


def has_folder(path: Path) -> bool:
    """Whether there is a folder at `path`. Raises CheckpointError as `mode_of`."""
    mode = mode_of(path)
    return mode is not None and stat.S_ISDIR(mode)


def read_through(path: Path) -> None:
    """Reads a file from its beginning to its end. Weights are mapped into memory, where a part that
    the disk does not give kills the process; so whoever has not read them yet does it once, and
    they are in the system's cache then. Raises CheckpointError."""
    buffer = bytearray(_READ_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error that says so."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")
