"""UnixListener: a listening Unix socket that only this server's user and group may connect to.

A socket that a killed server has left behind is replaced. Anything else at the path is an error: a
socket on which another program listens, or another kind of file.
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

MOST_BYTES = 107  # of a socket's path (sun_path, without its final zero)
MODE = 0o660
PROBE_SECONDS = 1.0  # for a listening server to accept a connection
START_SECONDS = 5.0  # to wait for another server that is starting in the same folder


class UnixListener:
    """A socket that listens on a path until `close`."""

    def __init__(self, path: Path, backlog: int) -> None:
        """Create the socket. Raises OSError, whose reason says what is wrong."""
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
                os.chmod(path, MODE)  # before it listens, when nobody can connect yet
                listener.listen(backlog)
            except BaseException:
                listener.close()
                raise
        self.socket = listener

    def close(self) -> None:
        """Close the socket and remove its path, unless another socket is there by now."""
        self.socket.close()
        with suppress(OSError), _alone(self._path.parent):
            if _identity(self._path) == self._file:
                self._path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    """Return what identifies the socket at a path; neither chmod nor chown change it.

    It includes the modification time, because many file systems use an inode number again.
    """
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _clear(path: Path) -> None:
    """Remove a socket on which nobody listens. Raises OSError if something else is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except (BlockingIOError, TimeoutError):  # a server listens there, but its backlog is full
            pass
    raise OSError(errno.EADDRINUSE, "another server listens there")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder, so that servers that start at the same time check its sockets in turn.

    Raises OSError if the folder does not exist or stays locked for START_SECONDS.
    """
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
            except OSError:  # the file system has no locks
                break
        yield
    finally:
        os.close(handle)
