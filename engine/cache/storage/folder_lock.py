"""FolderLock: tells whether other engines use a state folder, and who changes which file.

A reload starts a new engine beside the serving one, and both use the folder until the old one has
finished its requests. Locks are bytes of one empty file. Every engine holds a shared lock on byte 0
while it lives, so each can tell whether it is alone. For each name there is one more byte, which an
engine locks exclusively before it changes that file. The kernel releases the locks when a process
ends, however it ends, so none is left behind.

The locks are "open file description locks": they belong to the open file, not to the process. So
they also work between two engines in one process, and one descriptor can hold many.
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

_LOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: type, whence, start, length, process


class FolderLock:
    """The locks of one engine in a folder.

    Without support by the file system or the operating system, an engine assumes that it is alone.
    """

    def __init__(self, path: Path) -> None:
        """Open the lock file at `path` and lock byte 0.

        Raises OSError if it cannot be opened; links are not followed.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o600)
        try:
            self._set(fcntl.F_RDLCK, 0)
        except OSError as error:
            log.warning("%s: no file locks; only one engine may use this folder: %s", path, error)
            self.close()

    @property
    def alone(self) -> bool:
        """Whether no other engine has this folder open."""
        if self._file < 0:
            return True
        try:
            return not _held_by_others(self._file)
        except OSError as error:
            log.error("the locks of the state folder cannot be read: %s", error)
            return False  # assuming others only costs time; assuming none could lose states

    def acquire(self, name: str) -> bool:
        """Lock a name; return whether this engine has its lock now."""
        if self._file < 0:
            return True
        try:
            self._set(fcntl.F_WRLCK, _byte(name))
        except (BlockingIOError, PermissionError):  # another engine has it
            return False
        except OSError as error:
            log.error("a lock in the state folder cannot be taken: %s", error)
        return True

    def release(self, name: str) -> None:
        """Release the lock of a name."""
        if self._file >= 0:
            with suppress(OSError):
                self._set(fcntl.F_UNLCK, _byte(name))

    def close(self) -> None:
        """Release all locks."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _set(self, kind: int, byte: int) -> None:
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        lock = _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)


def is_used(path: Path) -> bool:
    """Return whether an engine has the folder open whose lock file is at `path`.

    False if there is no such file, or if locks are not supported. Never raises.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _held_by_others(file)
    except (OSError, AttributeError):  # the system does not support such locks
        return False
    finally:
        os.close(file)


def _held_by_others(file: int) -> bool:
    """Return whether another engine holds byte 0. Raises OSError."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    told = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
    return bool(_LOCK.unpack(told)[0] != fcntl.F_UNLCK)


def _byte(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest) % 2**62
