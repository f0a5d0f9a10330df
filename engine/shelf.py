"""Shelf: a folder with files of kept states, written and read by a thread.

A file is written under another name first and then renamed, so what lies there under its name is
whole. That outlasts this process, but not a loss of power: nothing waits for the disk. The thread
does one thing after the other, in the order in which it was asked.

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
import queue
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.errors import ConfigError
from engine.folder_lock import FolderLock
from engine.home import DIGEST_CHARACTERS, digest_of

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
TEMPORARY = ".writing"
HEXADECIMAL = frozenset("0123456789abcdef")
CLOSE_SECONDS = 10.0  # for what is still to be written at the end

Work = Callable[[], bytes | OSError]
Done = Callable[[bytes | OSError], None]


class Shelf:
    """`collect` hands out what the thread has done since it was last called. All methods are
    called by one thread, and only those with a `done` leave the work to the other one."""

    def __init__(self, folder: Path, model: str) -> None:
        """Raises ConfigError when the folder cannot be used. Engines of one `model` share locks."""
        self._folder = folder
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
        self._asked: queue.SimpleQueue[tuple[Work, Done]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Done, bytes | OSError]] = queue.SimpleQueue()
        self.pending = 0  # things asked for and not yet collected
        threading.Thread(target=self._run, name="shelf", daemon=True).start()

    @staticmethod
    def name(model: str, *parts: str) -> str:
        """The name of a model's file of what these parts tell apart: of one length."""
        return _model_part(model) + digest_of(*parts) + SUFFIX

    def write(self, name: str, content: Callable[[], bytes], done: Done) -> None:
        """`done` is called with the file's `tag` when it is written, or with the error."""
        self._change(name, lambda: self._write(name, content()), done)

    def read(self, name: str, most: int, done: Done) -> None:
        """`done` is called with the content, or with the error: FileNotFoundError where there is no
        such file, or none of up to `most` bytes."""
        self._ask(lambda: _read(self._folder / name, most), done)

    def delete(self, name: str, done: Callable[[], None] = lambda: None) -> None:
        """`done` is called when it is gone, or cannot be removed."""
        self._change(name, lambda: self._delete(name), lambda _: done())

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
        while self.pending:
            try:
                done, content = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            done(content)
            del content  # which may be large, and is nobody's any more

    def wait(self, seconds: float) -> None:
        """Waits until something is done, or the time is over; then collects."""
        with suppress(queue.Empty):
            done, content = self._done.get(timeout=seconds)
            self.pending -= 1
            done(content)
        self.collect()

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

    def names(self, model: str, folder: str = "") -> list[tuple[str, os.stat_result]]:
        """A model's files, with their status; removes what nobody will finish. `folder`: one
        within this, which is made if need be. Raises ConfigError."""
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

    def look(
        self, name: str, most: int, read: Callable[[BinaryIO], bytes] | None = None
    ) -> tuple[bytes, os.stat_result]:
        """What `read` reads of a file of up to `most` bytes (by default all), at once, and its
        status. Raises OSError."""
        return _read_with_status(self._folder / name, most, read)

    def _change(self, name: str, work: Work, done: Done) -> None:
        self._changing[name] += 1

        def changed(result: bytes | OSError) -> None:
            self._changing[name] -= 1
            if not self._changing[name]:
                del self._changing[name]
            done(result)

        self._ask(work, changed)

    def _ask(self, work: Work, done: Done) -> None:
        self.pending += 1
        self._asked.put((work, done))

    def _run(self) -> None:
        while True:
            work, done = self._asked.get()
            result: bytes | OSError
            try:
                result = work()
            except OSError as error:
                result = error
            except Exception as error:
                log.exception("unexpected error with a file of a state")
                result = OSError(str(error))
            self._done.put((done, result))
            del work, done, result  # they hold a state until the next one comes

    def _write(self, name: str, content: bytes) -> bytes:
        temporary = self._folder / (name + self._temporary)
        try:
            _write_new(temporary, content)
            tag = tag_of(temporary.lstat())
            temporary.replace(self._folder / name)
        except OSError as error:
            log.error("a state cannot be written: %s", error)
            with suppress(OSError):
                temporary.unlink()
            raise
        return tag

    def _delete(self, name: str) -> bytes:
        with suppress(OSError):
            (self._folder / name).unlink()
        return b""


def tag_of(status: os.stat_result) -> bytes:
    """Of a file with this status, as of `Shelf.tag`."""
    return b"%d %d %d" % (status.st_ino, status.st_size, status.st_mtime_ns)


def lock_of(folder: Path, model: str) -> Path:
    """The file of the locks that engines of a model share in a folder."""
    return folder / f"{_model_part(model)}lock"


def digest_in(name: str, model: str) -> str | None:
    """Of `engine.home.digest_of`, what the name of one of the model's files has; None for what is
    no such name."""
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


def _write_new(path: Path, content: bytes) -> None:
    """Writes a file that nobody else has made: what has its name goes first."""
    with suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


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
