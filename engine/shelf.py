"""Shelf: a folder with files of kept states, written and read by a thread.

A file is written under another name first and then renamed, so what lies there under its name is
whole. That outlasts this process, but not a loss of power: nothing waits for the disk. The thread
does one thing after the other, in the order in which it was asked.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
TEMPORARY = ".writing"
CLOSE_SECONDS = 10.0  # for what is still to be written at the end

Work = Callable[[], bytes | None]
Done = Callable[[bytes | None], None]


class Shelf:
    """`collect` hands out what the thread has done since it was last called."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder cannot be used."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f"probe{TEMPORARY}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"state_folder {str(folder)!r} cannot be written to: {reason}", param="state_folder"
            ) from error
        self._asked: queue.SimpleQueue[tuple[Work, Done]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Done, bytes | None]] = queue.SimpleQueue()
        self.pending = 0  # things asked for and not yet collected
        threading.Thread(target=self._run, name="shelf", daemon=True).start()

    @staticmethod
    def name(owner: str, id: str) -> str:
        """The file's name of a state: of one length, whatever its owner is called."""
        digest = hashlib.blake2b(id.encode(), key=owner.encode(), digest_size=24).hexdigest()
        return digest + SUFFIX

    def write(self, name: str, content: Callable[[], bytes], done: Done) -> None:
        """`done` is called with the content; with None if it could not be written."""
        self._ask(lambda: self._write(name, content()), done)

    def read(self, name: str, most: int, done: Done) -> None:
        """`done` is called with the content, or None if it cannot be read or has over `most`
        bytes."""
        self._ask(lambda: _read(self._folder / name, most), done)

    def delete(self, name: str) -> None:
        """Nothing says when it is done."""
        self._ask(lambda: self._delete(name), lambda _: None)

    def collect(self) -> None:
        """Calls what waits to be called."""
        while self.pending:
            try:
                done, content = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            done(content)

    def wait(self, seconds: float) -> None:
        """Waits until something is done, or the time is over; then collects."""
        with suppress(queue.Empty):
            done, content = self._done.get(timeout=seconds)
            self.pending -= 1
            done(content)
        self.collect()

    def close(self) -> None:
        """Returns when all that was asked for is done, or after CLOSE_SECONDS."""
        until = time.monotonic() + CLOSE_SECONDS
        while self.pending and time.monotonic() < until:
            self.wait(0.1)

    def scan(self, most: int) -> Iterator[tuple[str, bytes, float]]:
        """Every file of up to `most` bytes with its name, content and the time of its last change;
        removes what a former process left unfinished."""
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(TEMPORARY):
                with suppress(OSError):
                    path.unlink()
            elif path.name.endswith(SUFFIX):
                content = _read(path, most)
                if content is None:
                    log.warning("%s: no state that can be read; left alone", path)
                else:
                    with suppress(OSError):
                        yield path.name, content, path.stat().st_mtime

    def _ask(self, work: Work, done: Done) -> None:
        self.pending += 1
        self._asked.put((work, done))

    def _run(self) -> None:
        while True:
            work, done = self._asked.get()
            try:
                result = work()
            except Exception:
                log.exception("unexpected error with a file of a state")
                result = None
            self._done.put((done, result))

    def _write(self, name: str, content: bytes) -> bytes | None:
        temporary = self._folder / (name + TEMPORARY)
        try:
            with temporary.open("wb") as file:
                file.write(content)
            temporary.replace(self._folder / name)
        except OSError as error:
            log.error("a state cannot be written: %s", error)
            with suppress(OSError):
                temporary.unlink()
            return None
        return content

    def _delete(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink()


def _read(path: Path, most: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError:
        return None
    return content if len(content) <= most else None
