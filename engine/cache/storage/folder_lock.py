"""FolderLock: whether other engines use a folder of states too, and who changes which file.

A reload starts an engine beside the one that serves, and both use the folder until the old one has
finished what it has. Its locks are bytes of one file that has none: byte 0, which every engine
holds, together with the others, for as long as it lives, so that each can tell whether it is
alone; and one for each name, which whoever is about to change that file holds alone. The kernel
takes them back when a process ends, however it ends, so nothing is left over to be cleared away.

They belong to the open file and not to the process ("open file description locks"): two engines in
one process are two as well, and one descriptor has as many of them as it likes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_LOCK = struct.Struct("hhqqi4x")  # Linux' struct flock: type, whence, start, length, process


class FolderLock:
    """Where a file system or the system knows no such locks, an engine takes itself for the only
    one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened; a link is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o600)
        try:
            self._set(fcntl.F_RDLCK, 0)
        except OSError as error:
            log.warning("%s: no locks here; only one engine may use this folder: %s", path, error)
            self.close()

    @property
    def alone(self) -> bool:
        """No other engine has this folder open just now."""
        if self._file < 0:
            return True
        try:
            return not _held_by_others(self._file)
        except OSError as error:
            log.error("the locks of the state folder cannot be looked at: %s", error)
            return False  # to be so costs time, to think so wrongly could cost states

    def acquire(self, name: str) -> bool:
        """Whether this engine has the lock of a name now, or had it already."""
        if self._file < 0:
            return True
        try:
            self._set(fcntl.F_WRLCK, _byte(name))
        except (BlockingIOError, PermissionError):  # another one has it
            return False
        except OSError as error:
            log.error("a file of the state folder cannot be locked: %s", error)
        return True

    def release(self, name: str) -> None:
        if self._file >= 0:
            with suppress(OSError):
                self._set(fcntl.F_UNLCK, _byte(name))

    def close(self) -> None:
        """Gives all of them back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _set(self, kind: int, byte: int) -> None:
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        lock = _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)


def is_used(path: Path) -> bool:
    """Whether an engine has the folder open whose locks are this file; not, where there are none
    or no locks. Raises no error."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _held_by_others(file)
    except (OSError, AttributeError):  # a system without such locks
        return False
    finally:
        os.close(file)


def _held_by_others(file: int) -> bool:
    """Whether anybody else holds byte 0. Raises OSError."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    told = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
    return bool(_LOCK.unpack(told)[0] != fcntl.F_UNLCK)


def _byte(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest) % 2**62
