"""FolderStore: states in a folder that several servers share.

    ROOT/MODEL/OWNER/s-ID/         one state; MODEL and OWNER are hashes
        000000000012.safetensors   its version 12; of several versions the last one counts
        used                       its time: the last use; its content: the lifetime in seconds
        lock                       exists while a server has the lock; its content: the lock's token

- A version's file is linked to its name when it is complete, and only if there is no such name. Of
  two servers that go on from version 11, one therefore makes version 12, whatever the locks say.
- A removed state has an empty file as its last version. The folder itself is removed much later, so
  that a server that was paused cannot add to a new one.
- A lock's time is renewed while its holder lives. Ages of locks are differences of times that the
  file system has set, so the servers' clocks do not matter.
"""

from __future__ import annotations

import errno
import filecmp
import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from engine.cache.shared.store import (
    ABSENT,
    LEASE_SECONDS,
    Entry,
    Listed,
    Lock,
    Opened,
    SharedStore,
    StateName,
    busy,
    conflict,
)
from engine.errors import (
    ConfigError,
    EngineError,
    StateMalformed,
    StateNotStored,
    StateQuota,
    StoreUnavailable,
)
from engine.safetensors_container import LENGTH_BYTES, MAX_HEADER_BYTES

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMOVED_SECONDS = 3600.0  # how long the folder of a removed state is kept
TRIES = 3  # of reading a version that is being replaced

_VERSION = re.compile(r"([0-9]{12})\.safetensors")

Method = TypeVar("Method", bound=Callable[..., Any])


def _uses_folder(method: Method) -> Method:
    """Make a method raise StateNotStored if the disk is full, StoreUnavailable for other errors."""

    @functools.wraps(method)
    def using(self: FolderStore, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except EngineError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in FULL:
                raise StateNotStored(f"the state store is full: {reason}") from None
            raise StoreUnavailable(f"the state store cannot be used: {reason}") from error

    return using  # type: ignore[return-value]


class FolderStore(SharedStore):
    """The states of one model in a folder; its file system must have hard links, as NFS has."""

    def __init__(self, root: Path, model: str, sync: bool = False) -> None:
        """Create the folder.

        Args:
            root: the folder.
            model: fingerprint of the model; states of others are not seen.
            sync: sync each version to the disk before it counts.

        Raises ConfigError if the folder cannot be used.
        """
        self._folder = root / hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        self._sync = sync
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._folder / f".probe-{os.getpid()}-{time.monotonic_ns()}"
            probe.touch(mode=0o600)
            os.link(probe, f"{probe}-link")
            os.unlink(f"{probe}-link")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"state_store {str(root)!r} cannot be written to, or has no hard links: "
                f"{error.strerror or error}",
                param="state_store",
            ) from error

    @_uses_folder
    def open(
        self, name: StateName, known: str, lock: Lock | None = None, most: int | None = None
    ) -> Opened:
        place = self._place(name)
        if lock is not None:
            self._take_lock(place, lock)
        for _ in range(TRIES):
            version = self._last(place)
            if version is not None and self._is_over(place, version):
                version = None
            if version is None:
                if lock is not None:
                    self._check_quota(lock, most)
                return Opened(ABSENT)
            with suppress(FileNotFoundError):  # another version has replaced it: look again
                generation = _generation(version)
                content = None if generation == known else version.read_bytes()
                with suppress(FileNotFoundError):
                    os.utime(place / "used")
                return Opened(generation, content)
        raise StoreUnavailable("the state is replaced faster than it can be read")

    def _check_quota(self, lock: Lock, most: int | None) -> None:
        """Raise StateQuota if the owner has `most` states without the new one, which is locked."""
        if most is None:
            return
        others = self._places(lock.name.owner) - {lock.name.id}
        if len(others) < most:
            return
        there = sum(self._exists(self._place(StateName(lock.name.owner, id))) for id in others)
        if there >= most:
            self.unlock(lock)
            raise StateQuota(f"{there} states are kept already; allowed: up to {most}")

    @_uses_folder
    def describe(self, name: StateName) -> tuple[str, Listed] | None:
        found = self._describe(name)
        if found is not None:
            with suppress(FileNotFoundError):
                os.utime(self._place(name) / "used")
        return found

    @_uses_folder
    def write(self, lock: Lock, base: str, content: bytes) -> str:
        place = self._place(lock.name)
        made = place / f".{lock.token}.writing"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._write_new(made, content)
            return self._add_version(place, lock, base, made, Entry.of(content).ttl)
        except FileNotFoundError:  # another server has replaced or removed the version meanwhile
            raise conflict(lock.name) from None
        finally:
            with suppress(OSError):
                made.unlink()

    def _add_version(self, place: Path, lock: Lock, base: str, made: Path, ttl: float) -> str:
        """Make the file `made` the next version, if the lock and the base are what they were."""
        held, last = _read_text(place / "lock"), self._last_file(place)
        present = self._last(place)
        bases = {_generation(present) if present else ABSENT}
        if present and self._is_over(place, present):  # before `open`, or since
            bases.add(ABSENT)
        if held not in ("", lock.token) or base not in bases:
            if last is None or not filecmp.cmp(last, made, shallow=False):
                raise conflict(lock.name)
            self._give_back(place, lock)  # the repeat of a write that was carried out
            return _generation(last)
        number = 1 + (0 if last is None else _number(last))
        version = place / f"{number:012d}{SUFFIX}"
        try:
            os.link(made, version)
        except FileExistsError:
            raise conflict(lock.name) from None
        self._sync_folder(place)
        if self._last_file(place) != version:
            with suppress(OSError):
                version.unlink()
            raise conflict(lock.name)
        self._note_lifetime(place, ttl)
        generation = _generation(version)
        self._remove_before(place, version)
        self._give_back(place, lock)
        return generation

    @_uses_folder
    def remove(self, lock: Lock, base: str) -> None:
        place = self._place(lock.name)
        try:
            self._add_removal(place, lock, base)
        except FileNotFoundError:  # another server has replaced or removed the version meanwhile
            raise conflict(lock.name) from None
        self._give_back(place, lock)

    def _add_removal(self, place: Path, lock: Lock, base: str) -> None:
        """Make an empty file the next version, if the lock and the base are what they were."""
        held, last = _read_text(place / "lock"), self._last_file(place)
        if held not in ("", lock.token):
            raise conflict(lock.name)
        if last is not None and last.stat().st_size:
            if _generation(last) != base and not self._is_over(place, last):
                raise conflict(lock.name)
            made = place / f".{lock.token}.writing"
            self._write_new(made, b"")
            version = place / f"{_number(last) + 1:012d}{SUFFIX}"
            try:
                os.link(made, version)
            except FileExistsError:
                raise conflict(lock.name) from None
            finally:
                made.unlink()
            self._sync_folder(place)
            self._remove_before(place, version)

    @_uses_folder
    def unlock(self, lock: Lock) -> None:
        place = self._place(lock.name)
        self._give_back(place, lock)
        with suppress(OSError):  # unless it holds anything
            place.rmdir()

    @_uses_folder
    def renew(self, locks: Iterable[Lock]) -> None:
        for lock in locks:
            path = self._place(lock.name) / "lock"
            if _read_text(path) == lock.token:
                with suppress(FileNotFoundError):
                    os.utime(path)

    @_uses_folder
    def list_states(self, owner: str, after: str, limit: int) -> tuple[list[Listed], bool]:
        found: list[Listed] = []
        for id in sorted(id for id in self._places(owner) if id > after):
            described = self._describe(StateName(owner, id))
            if described is not None:
                found.append(described[1])
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def warnings(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    # Locks.

    def _take_lock(self, place: Path, lock: Lock) -> None:
        """Take a lock, also from a holder that no longer renews it. Raises StateBusy."""
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine, path = place / f".{lock.token}.lock", place / "lock"
        try:
            try:
                self._write_new(mine, lock.token.encode())
            except FileNotFoundError:  # a lock was given back, and the empty folder removed
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write_new(mine, lock.token.encode())
            try:
                os.link(mine, path)
                return
            except FileExistsError:
                held, age = _read_lock(path, mine)
            if held == lock.token:
                return
            if age <= LEASE_SECONDS:
                raise busy(lock.name.id, LEASE_SECONDS - age)
            mine.rename(path)
            if _read_text(path) != lock.token:  # another server has done the same
                raise busy(lock.name.id, LEASE_SECONDS)
        finally:
            with suppress(OSError):
                mine.unlink()

    @staticmethod
    def _give_back(place: Path, lock: Lock) -> None:
        path = place / "lock"
        if _read_text(path) == lock.token:
            with suppress(FileNotFoundError):
                path.unlink()

    # Versions.

    def _place(self, name: StateName) -> Path:
        return self._folder / name.owner / f"s-{name.id}"

    def _places(self, owner: str) -> set[str]:
        """Return the ids of an owner's states; some may be removed or only be locked."""
        with suppress(FileNotFoundError):
            return {
                one.removeprefix("s-")
                for one in os.listdir(self._folder / owner)
                if one.startswith("s-")
            }
        return set()

    @staticmethod
    def _last_file(place: Path) -> Path | None:
        """Return the file of the last version, which is empty if the state was removed."""
        with suppress(FileNotFoundError):
            versions = [one for one in os.listdir(place) if _VERSION.fullmatch(one)]
            return place / max(versions) if versions else None
        return None

    def _last(self, place: Path) -> Path | None:
        """Return the file of the last version of a state that exists."""
        last = self._last_file(place)
        with suppress(FileNotFoundError):
            return last if last is not None and last.stat().st_size else None
        return None

    def _exists(self, place: Path) -> bool:
        version = self._last(place)
        return version is not None and not self._is_over(place, version)

    @staticmethod
    def _is_over(place: Path, version: Path) -> bool:
        """Return whether the lifetime of a state is over."""
        rest = _rest(place, version)
        return rest is not None and rest <= 0

    def _describe(self, name: StateName) -> tuple[str, Listed] | None:
        place = self._place(name)
        for _ in range(TRIES):
            version = self._last(place)
            if version is None:
                return None
            try:
                with open(version, "rb") as file:
                    head = file.read(LENGTH_BYTES + MAX_HEADER_BYTES)
                generation, size = _generation(version), version.stat().st_size
            except FileNotFoundError:
                continue
            try:
                entry = Entry.of(head)
            except StateMalformed as error:
                raise StoreUnavailable(f"the state's file is damaged: {error.message}") from None
            rest = _rest(place, version)
            if rest is not None and rest <= 0:
                return None
            expires = time.time() + (entry.ttl if rest is None else rest)
            entry = Entry(entry.tokens, entry.turns, size, entry.created, entry.ttl, entry.recent)
            return generation, Listed(name.id, entry, expires)
        raise StoreUnavailable("the state is replaced faster than it can be read")

    def _note_lifetime(self, place: Path, ttl: float) -> None:
        path = place / "used"
        told = f"{ttl!r}"
        if _read_text(path) == told:
            os.utime(path)
        else:
            made = place / f".used-{time.monotonic_ns()}"
            self._write_new(made, told.encode())
            made.replace(path)

    @staticmethod
    def _remove_before(place: Path, version: Path) -> None:
        for one in os.listdir(place):
            if _VERSION.fullmatch(one) and one < version.name:
                with suppress(FileNotFoundError):
                    (place / one).unlink()

    def _write_new(self, path: Path, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb") as file:
            file.write(content)
            if self._sync:
                file.flush()
                os.fsync(file.fileno())

    def _sync_folder(self, place: Path) -> None:
        if self._sync:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # Lifetimes.

    @_uses_folder
    def tidy(self) -> None:
        for owner in self._folder.iterdir():
            if owner.name.startswith("."):
                continue
            for place in owner.iterdir():
                with suppress(OSError):
                    self._clear(place)
            with suppress(OSError):
                owner.rmdir()

    def _clear(self, place: Path) -> None:
        """Remove the folder of a state that was removed or is over, unless it is locked."""
        last = self._last_file(place)
        if last is None or (place / "lock").exists():
            return
        rest = _rest(place, last)
        if last.stat().st_size == 0 and rest is not None:
            rest = REMOVED_SECONDS - _age(last)
        if rest is None or rest > -REMOVED_SECONDS * (last.stat().st_size > 0):
            return
        for one in sorted(os.listdir(place)):  # the last version comes before `used`
            with suppress(FileNotFoundError):
                (place / one).unlink()
        place.rmdir()


def _generation(version: Path) -> str:
    """Return the name of a version: its number, and what tells it from others of that number.

    A state that is removed and made again may have that number again. Raises FileNotFoundError.
    """
    status = version.stat()
    told = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}".encode()
    return f"{_number(version)}-{hashlib.blake2b(told, digest_size=4).hexdigest()}"


def _number(version: Path) -> int:
    return int(version.name.removesuffix(SUFFIX))


def _rest(place: Path, version: Path) -> float | None:
    """Return the rest of a state's lifetime in seconds; None if it is unknown."""
    try:
        ttl = float(_read_text(place / "used"))
    except ValueError:
        return None
    return ttl - _age(place / "used")


def _age(path: Path) -> float:
    """Return the seconds since a file's time."""
    return max(time.time() - path.stat().st_mtime, 0.0)


def _read_text(path: Path) -> str:
    """Return the content of a small file; "" if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(128).decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def _read_lock(path: Path, mine: Path) -> tuple[str, float]:
    """Return a lock's token and its age: the seconds between its renewal and the file `mine`."""
    try:
        with open(path, "rb") as file:
            held, status = file.read(128).decode("ascii", "replace"), os.fstat(file.fileno())
    except FileNotFoundError:  # given back just now; the next try will find it free
        return "", 0.0
    return held, mine.stat().st_mtime - status.st_mtime
