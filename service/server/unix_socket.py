"""A unix socket to listen at: a path that only this server's user and group may connect to.

One that a killed server has left behind is replaced. What else lies at the path stays: a socket at
which somebody listens, and what is no socket.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_BYTES = 107  # of a path that a socket can have
MODE = 0o660
PROBE_SECONDS = 1.0  # for a server that is there to take a connection
START_SECONDS = 5.0  # that another server in the folder may take to get as far


class UnixListener:
    """A socket that listens at a path until `close`."""

    def __init__(self, path: Path, backlog: int) -> None:
        """Raises OSError, whose reason says what is in the way."""
        name = str(path)
        size = len(os.fsencode(name))
        if size > MOST_BYTES:
            reason = f"the path has {size} bytes; allowed: up to {MOST_BYTES}"
            raise OSError(errno.ENAMETOOLONG, reason)
        self._path = path
        with _alone(path.parent):
            _clear(path)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(name)
                self._file = _identity(path)
                os.chmod(path, MODE)  # nobody can connect before it listens
                listener.listen(backlog)
            except BaseException:
                listener.close()
                raise
        self.socket = listener

    def close(self) -> None:
        """Closes the socket and removes it from its path, unless another one is there by now."""
        self.socket.close()
        with suppress(OSError), _alone(self._path.parent):
            if _identity(self._path) == self._file:
                self._path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    """What tells a socket from one that is made at its path when it is gone, and which many file
    systems give the same number. Neither chmod nor chown change it."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _clear(path: Path) -> None:
    """Removes a socket at which nobody listens. Raises OSError where something else is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except (BlockingIOError, TimeoutError):  # it has many connections to take
            pass
    raise OSError(errno.EADDRINUSE, "another server listens there")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of servers that are started at the same moment each sees what the one before has left.
    Raises OSError: there is no such folder, or another server does not get on."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"{folder} is locked by another program") from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(handle)
