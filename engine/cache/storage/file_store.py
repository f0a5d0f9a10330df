"""StateFileStore: a folder with files of states, written and read by a thread.

A file is written under another name first and then renamed, so what lies there under its name is
whole, and a write that fails leaves what was there. That outlasts this process; with `sync`, what
is `lasting` outlasts a loss of power too: file and folder are written to the disk itself before it
is said to be there. The thread does one thing after the other, in the order in which it was asked.

Names begin with what tells models apart, so several may share a folder. Two engines of one model do
while one takes the other's place; a `FolderLock` tells them of each other. The names that files are
written under are then each engine's own, and left-over ones are removed by an engine that is alone.
Whatever else lies there is never followed, waited for or overwritten through: links, pipes,
devices, folders.
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
from engine.cache.storage.worker_threads import Done, Result, Work, WorkerThreads
from engine.errors import ConfigError
from engine.protocol.placement import DIGEST_CHARACTERS, digest_of

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
TEMPORARY = ".writing"
HEXADECIMAL = frozenset("0123456789abcdef")
CLOSE_SECONDS = 10.0  # for what is still to be written at the end
LANE = "files"  # of `WorkerThreads`

Parse = Callable[[bytes], bytes]


class Unsynced(OSError):
    """A file has taken its name, with `tag`, but the folder may forget that with a loss of
    power."""

    def __init__(self, error: OSError, tag: bytes) -> None:
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.tag = tag


class StateFileStore:
    """`threads` hands out what the thread has done. All methods are called by one thread, and only
    those with a `done` leave the work to the other one."""

    def __init__(self, folder: Path, model: str, sync: bool = False) -> None:
        """Raises ConfigError when the folder cannot be used. Engines of one `model` share locks."""
        self._folder = folder
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
        """Things asked for and not yet collected."""
        return self.threads.pending

    @staticmethod
    def name(model: str, *parts: str) -> str:
        """The name of a model's file of what these parts tell apart: of one length."""
        return _model_part(model) + digest_of(*parts) + SUFFIX

    def write(
        self, name: str, content: Callable[[], bytes], done: Done, lasting: bool = False
    ) -> None:
        """`done` is called with the file's `tag` when it is written, or with the error, which is
        `Unsynced` where the file is there nevertheless."""
        self._change(name, lambda: self._write(name, content(), lasting and self._sync), done)

    def read(self, name: str, most: int, parse: Parse, done: Done) -> None:
        """`done` is called with what `parse` makes of the content, or with the error that it
        raises, or with that of reading: FileNotFoundError where there is no such file, or none of
        up to `most` bytes."""
        self._ask(lambda: parse(_read(self._folder / name, most)), done)

    def delete(self, name: str, done: Done = lambda result: None) -> None:
        """`done` is called with nothing when it is gone, or with the error where it cannot be
        removed."""
        self._change(name, lambda: self._delete(name), done)

    def touch(self, name: str, tag: bytes, now: float, done: Done) -> None:
        """The file of this tag was used: its time becomes `now`, in seconds since the epoch. `done`
        is called with the tag that it has then, or with the error: FileNotFoundError where there is
        no such file, or another one."""
        self._ask(lambda: _touch(self._folder / name, tag, now), done)

    def changing(self, name: str) -> bool:
        """It is about to be written or deleted here, so what lies there says nothing."""
        return name in self._changing

    def tag(self, name: str) -> bytes:
        """What tells this file from any other that has had or will have its name; b"" where there
        is none."""
        try:
            return tag_of((self._folder / name).lstat())
        except OSError:
            return b""

    def collect(self) -> None:
        """Calls what waits to be called."""
        self.threads.collect()

    def wait(self, seconds: float) -> None:
        """Waits until something is done, or the time is over; then collects."""
        self.threads.wait(seconds)

    def flush(self) -> None:
        """Returns when all that was asked for is done, or after CLOSE_SECONDS."""
        until = time.monotonic() + CLOSE_SECONDS
        while self.pending and time.monotonic() < until:
            self.wait(0.1)

    def close(self) -> None:
        """As `flush`; then the folder is other engines' alone. What is still being written keeps
        its locks until this process ends."""
        self.flush()
        if not self.pending:
            self.lock.close()

    def list_files(self, model: str, folder: str = "") -> list[tuple[str, os.stat_result]]:
        """Lists a model's files, with their status, and removes what nobody will finish.

        Args:
            folder: one within this, which is made if need be.

        Raises: ConfigError.
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
        # Asked after they were listed: so none of them is an engine's that has started since.
        if left and self.lock.alone:
            for path in left:
                with suppress(OSError):
                    path.unlink()
        return found

    def read_now(
        self, name: str, most: int, read: Callable[[BinaryIO], bytes] | None = None
    ) -> tuple[bytes, os.stat_result]:
        """Reads a file at once, on the calling thread.

        Args:
            most: bytes that the file may have.
            read: reads of it what is wanted; by default all.

        Returns: what was read, and the file's status. Raises OSError.
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
            log.error("a state cannot be written: %s", error)
            with suppress(OSError):
                temporary.unlink()
            raise
        if sync:
            try:
                _sync_folder((self._folder / name).parent)
            except OSError as error:
                log.error("a state's folder cannot be written to the disk: %s", error)
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
    """Of a file with this status, as of `StateFileStore.tag`."""
    return b"%d %d %d" % (status.st_ino, status.st_size, status.st_mtime_ns)


def lock_of(folder: Path, model: str) -> Path:
    """The file of the locks that engines of a model share in a folder."""
    return folder / f"{_model_part(model)}lock"


def digest_in(name: str, model: str) -> str | None:
    """Of `engine.protocol.placement.digest_of`, what the name of one of the model's files has; None
    for what is no such name."""
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
    """Writes a file that nobody else has made: what has its name goes first. With `sync` it is on
    the disk itself afterwards."""
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
    """What `read` reads (all), and the file's status. Raises OSError; FileNotFoundError for what is
    no file of up to `most` bytes."""
    with open(_open(path), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.EINVAL, "is no regular file", str(path))
        content = b""
        if found.st_size <= most:
            content = file.read(most + 1) if read is None else read(file)
        if found.st_size > most or len(content) > most:
            raise FileNotFoundError(errno.EFBIG, f"has more than {most} bytes", str(path))
        return content, found


def _touch(path: Path, tag: bytes, now: float) -> bytes:
    descriptor = _open(path)  # so that it is this very file's time, whatever takes its name
    try:
        if tag_of(os.fstat(descriptor)) != tag:
            raise FileNotFoundError(errno.ENOENT, "is another file", str(path))
        os.utime(descriptor, (now, now))
        return tag_of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    # Without O_NONBLOCK a pipe would be waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise FileNotFoundError(error.errno, "is no regular file", str(path)) from error
        raise
