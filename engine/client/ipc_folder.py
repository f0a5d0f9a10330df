"""SocketFolder: a private folder for one engine's socket, removed with the process that made it.

A killed process leaves its folder behind. Each process therefore holds a lock on its folder while
it lives, and a starting process removes the folders of its own user that nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

PREFIX = "minserve-engine-"
SOCKET = "engine"
LONGEST_SOCKET_PATH = 100  # bytes; sockaddr_un holds 108


class SocketFolder:
    """A new folder that only this user may enter. The constructor raises OSError."""

    def __init__(self) -> None:
        for parent in {tempfile.gettempdir(), "/tmp"}:
            _remove_stale(Path(parent))
        self.path, self._lock = _make()

    @property
    def socket(self) -> Path:
        """The path of the engine's socket."""
        return self.path / SOCKET

    def remove(self) -> None:
        """Remove the folder and release its lock. Idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _make() -> tuple[Path, int]:
    """Create a folder; return it and the file descriptor that holds its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX)
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH - len(f"/{SOCKET}"):
            os.rmdir(path)
            path = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        # Before it is locked, another starting process may take it for a stale one and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = _lock(Path(path))
            if lock is not None:
                return Path(path), lock


def _lock(folder: Path) -> int | None:
    """Return a descriptor that locks the folder until it is closed; None if another holds the lock.

    Raises OSError.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == os.fstat(handle).st_ino:  # it was not removed in the meantime
            return handle
    except BlockingIOError:
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = _lock(folder)
            if lock is not None:
                _remove(folder)
                os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder that contains nothing but a socket."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK((folder / SOCKET).lstat().st_mode):
            (folder / SOCKET).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
