"""StateFileStore: a folder of state files, written and read by a worker thread.

A file is written under a temporary name and then renamed. A file under its own name is therefore
complete, and a failed write leaves the previous file. Files outlast this process. With `sync`,
files written as `lasting` also survive a power failure: file and folder are synced before the write
is reported. The thread does one thing after the other, in the order of the calls.

Names begin with a hash of the model, so models may share a folder. Two engines of one model use it
while one replaces the other; a `FolderLock` tells them of each other. Temporary names are different
for each engine, and an engine that is alone removes left-over ones. Anything else in the folder
(links, pipes, devices, folders) is never followed, waited for or written through.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.cache.storage.folder_lock import FolderLock
from engine.cache.storage.state_store import Parse, StateStore
from engine.cache.storage.worker_threads import Done, Result, Work, WorkerThreads
from engine.errors import ConfigError
from engine.protocol.placement import DIGEST_CHARACTERS, digest_of

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
TEMPORARY = ".writing"
HEXADECIMAL = frozenset("0123456789abcdef")
CLOSE_SECONDS = 10.0  # wait for pending writes at the end
LANE = "files"  # lane of `WorkerThreads`


class Unsynced(OSError):
    """A file was written and renamed, with `tag`, but may be lost in a power failure."""

    def __init__(self, error: OSError, tag: bytes) -> None:
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.tag = tag


class StateFileStore(StateStore):
    """State files of one model in a folder.

    All methods are called by one thread. Only those with a `done` argument do their work on another
    thread; `threads` reports the results.
    """

    shared = False

    def __init__(self, folder: Path, model: str, sync: bool = False) -> None:
        """Create the folder. Raises ConfigError if it cannot be used.

        Engines of the same `model` share locks. `sync`: sync files that are written as `lasting`.
        """
        self._folder = folder
        self._model = model
        self._sync = sync
        self._temporary = f".{secrets.token_hex(4)}{TEMPORARY}"
        self._changing: Counter[str] = Counter()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f"{_model_part(model)}probe{self._temporary}"
            _write_new(probe, b"")
            probe.unlink()
            self.lock = FolderLock(lock_of(folder, model))
        except OSError as error:
            raise _unusable(folder, error) from error
        self.threads = WorkerThreads()

    @property
    def pending(self) -> int:
        return self.threads.pending

    @property
    def alone(self) -> bool:
        return self.lock.alone

    def file_of(self, owner: str, id: str) -> str:
        return self.name(self._model, owner, id)

    def owner_in_file(self, owner: str, id: str) -> str:
        return owner

    def lock_file(self, name: str) -> bool:
        return self.lock.acquire(name)

    def unlock_file(self, name: str) -> None:
        self.lock.release(name)

    @staticmethod
    def name(model: str, *parts: str) -> str:
        """Return the file name, of fixed length, for `parts` of this model."""
        return _model_part(model) + digest_of(*parts) + SUFFIX

    def write(
        self, name: str, content: Callable[[], bytes], done: Done, lasting: bool = False
    ) -> None:
        """Write a file.

        `done` is called with the file's `tag` when it is written, or with the error. The error is
        `Unsynced` if the file was written nevertheless.
        """
        self._change(name, lambda: self._write(name, content(), lasting and self._sync), done)

    def read(self, name: str, most: int, parse: Parse, done: Done) -> None:
        """Read a file and parse its content.

        `done` is called with what `parse` returns, or with the error that `parse` or reading
        raises: FileNotFoundError if there is no such file of up to `most` bytes.
        """
        self._ask(lambda: parse(_read(self._folder / name, most)), done)

    def delete(self, name: str, done: Done = lambda result: None) -> None:
        """Delete a file.

        `done` is called with b"" when it is gone, or with the error if it cannot be removed.
        """
        self._change(name, lambda: self._delete(name), done)

    def touch(self, name: str, tag: bytes, now: float, done: Done) -> None:
        """Set the time of the file with this tag to `now`, in seconds since the epoch.

        `done` is called with its new tag, or with the error: FileNotFoundError if there is no such
        file, or another one.
        """
        self._ask(lambda: _touch(self._folder / name, tag, now), done)

    def changing(self, name: str) -> bool:
        """Return whether the file is about to be written or deleted, so its content is stale."""
        return name in self._changing

    def tag(self, name: str) -> bytes:
        """Return what identifies this version of the file; b"" if there is none."""
        try:
            return tag_of((self._folder / name).lstat())
        except OSError:
            return b""

    def collect(self) -> None:
        """Call the callbacks of finished operations."""
        self.threads.collect()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until an operation is finished; then collect."""
        self.threads.wait(seconds)

    def flush(self) -> None:
        """Wait until all requested operations are finished, or for CLOSE_SECONDS."""
        until = time.monotonic() + CLOSE_SECONDS
        while self.pending and time.monotonic() < until:
            self.wait(0.1)

    def close(self) -> None:
        """Flush, then leave the folder to other engines.

        Files still being written keep their locks until this process ends.
        """
        self.flush()
        if not self.pending:
            self.lock.close()

    def list_files(self, model: str, folder: str = "") -> list[tuple[str, os.stat_result]]:
        """List a model's files with their status, and remove abandoned temporary files.

        Args:
            model: the model whose files are listed.
            folder: a folder within this one; created if necessary.

        Raises:
            ConfigError.
        """
        mine, within = _model_part(model), self._folder / folder
        found: list[tuple[str, os.stat_result]] = []
        left: list[Path] = []
        try:
            within.mkdir(mode=0o700, exist_ok=True)
            for name in sorted(os.listdir(within)):
                path = within / name
                if not name.startswith(mine):
                    continue
                if name.endswith(TEMPORARY) and not name.endswith(self._temporary):
                    left.append(path)
                elif name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):
                        found.append((str(path.relative_to(self._folder)), path.lstat()))
        except OSError as error:
            raise _unusable(within, error) from error
        # Checked after listing, so that no file belongs to an engine that has started since.
        if left and self.lock.alone:
            for path in left:
                with suppress(OSError):
                    path.unlink()
        return found

    def read_now(
        self, name: str, most: int, read: Callable[[BinaryIO], bytes] | None = None
    ) -> tuple[bytes, os.stat_result]:
        """Read a file at once, on the calling thread.

        Args:
            name: the file's name.
            most: the most bytes that the file may have.
            read: reads the part that is wanted; None: all.

        Returns:
            What was read, and the file's status.

        Raises:
            OSError.
        """
        return _read_with_status(self._folder / name, most, read)

    def _change(self, name: str, work: Work, done: Done) -> None:
        self._changing[name] += 1

        def changed(result: Result) -> None:
            self._changing[name] -= 1
            if not self._changing[name]:
                del self._changing[name]
            done(result)

        self._ask(work, changed)

    def _ask(self, work: Work, done: Done) -> None:
        self.threads.submit(LANE, work, done)

    def _write(self, name: str, content: bytes, sync: bool) -> bytes:
        temporary = self._folder / (name + self._temporary)
        try:
            _write_new(temporary, content, sync)
            tag = tag_of(temporary.lstat())
            temporary.replace(self._folder / name)
        except OSError as error:
            log.error("a state's file cannot be written: %s", error)
            with suppress(OSError):
                temporary.unlink()
            raise
        if sync:
            try:
                _sync_folder((self._folder / name).parent)
            except OSError as error:
                log.error("the folder of a state's file cannot be synced: %s", error)
                raise Unsynced(error, tag) from error
        return tag

    def _delete(self, name: str) -> bytes:
        try:
            with suppress(FileNotFoundError):
                (self._folder / name).unlink()
        except OSError as error:
            log.error("a state's file cannot be removed: %s", error)
            raise
        return b""


def tag_of(status: os.stat_result) -> bytes:
    """Return the tag of a file with this status; see `StateFileStore.tag`."""
    return b"%d %d %d" % (status.st_ino, status.st_size, status.st_mtime_ns)


def lock_of(folder: Path, model: str) -> Path:
    """Return the lock file that engines of a model share in a folder."""
    return folder / f"{_model_part(model)}lock"


def digest_in(name: str, model: str) -> str | None:
    """Return the `placement.digest_of` part of a file name of this model.

    None if it is not the name of a state file.
    """
    mine = _model_part(model)
    digest = name[len(mine) : -len(SUFFIX)]
    if not (name.startswith(mine) and name.endswith(SUFFIX)) or len(digest) != DIGEST_CHARACTERS:
        return None
    return digest if HEXADECIMAL.issuperset(digest) else None


def _unusable(folder: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(
        f"state_folder {str(folder)!r} cannot be written to: {reason}", param="state_folder"
    )


def _model_part(model: str) -> str:
    return hashlib.blake2b(model.encode(), digest_size=8).hexdigest() + "-"


def _write_new(path: Path, content: bytes, sync: bool = False) -> None:
    """Write a new file, removing what has its name; with `sync`, sync it to the disk."""
    with suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, most: int) -> bytes:
    return _read_with_status(path, most)[0]


def _read_with_status(
    path: Path, most: int, read: Callable[[BinaryIO], bytes] | None = None
) -> tuple[bytes, os.stat_result]:
    """Return what `read` reads (None: everything), and the file's status.

    Raises OSError; FileNotFoundError if it is not a regular file of up to `most` bytes.
    """
    with open(_open(path), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.EINVAL, "is not a regular file", str(path))
        content = b""
        if found.st_size <= most:
            content = file.read(most + 1) if read is None else read(file)
        if found.st_size > most or len(content) > most:
            raise FileNotFoundError(errno.EFBIG, f"has more than {most} bytes", str(path))
        return content, found


def _touch(path: Path, tag: bytes, now: float) -> bytes:
    descriptor = _open(path)  # so that it is this file's time, whatever is renamed over it
    try:
        if tag_of(os.fstat(descriptor)) != tag:
            raise FileNotFoundError(errno.ENOENT, "was replaced by another file", str(path))
        os.utime(descriptor, (now, now))
        return tag_of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    # Without O_NONBLOCK, opening a pipe would block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise FileNotFoundError(error.errno, "is not a regular file", str(path)) from error
        raise
