"""StateStore: what keeps named states beyond this engine's memory.

Either a folder of this server (`StateFileStore`), or a store that servers share (`SharedStates`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.cache.storage.worker_threads import Done, WorkerThreads

Parse = Callable[[bytes], bytes]


class StateStore(ABC):
    """The files of named states.

    A file has a name, which follows from the state's owner and id, and a *tag* that differs for
    each version of it. All methods are called by one thread. Those with a `done` argument do their
    work on `threads`, and `done` is called from `collect`.
    """

    shared: bool  # other servers use it at any time, so a name must be fetched before it is used
    threads: WorkerThreads

    @property
    @abstractmethod
    def pending(self) -> int:
        """Operations requested and not yet collected."""

    @property
    @abstractmethod
    def alone(self) -> bool:
        """Whether no other engine uses the store."""

    @abstractmethod
    def file_of(self, owner: str, id: str) -> str:
        """Return the name of a state's file."""

    @abstractmethod
    def owner_in_file(self, owner: str, id: str) -> str:
        """Return how the file names its owner."""

    @abstractmethod
    def write(
        self, name: str, content: Callable[[], bytes], done: Done, lasting: bool = False
    ) -> None:
        """Write a file, whose lock must be held.

        Args:
            name: the file.
            content: returns what to write; called once, by a worker thread.
            done: called with the file's new tag, or with the error.
            lasting: it must survive a power failure, if the store is set up for that.
        """

    @abstractmethod
    def read(self, name: str, most: int, parse: Parse, done: Done) -> None:
        """Read a file and parse its content.

        `done` is called with what `parse` returns, or with the error that `parse` or reading
        raises: FileNotFoundError if there is no such file of up to `most` bytes.
        """

    @abstractmethod
    def delete(self, name: str, done: Done = lambda result: None) -> None:
        """Delete a file, whose lock must be held.

        `done` is called with b"" when it is gone, or with the error if it cannot be removed.
        """

    @abstractmethod
    def changing(self, name: str) -> bool:
        """Return whether the file is about to be written or deleted, so its content is stale."""

    @abstractmethod
    def tag(self, name: str) -> bytes:
        """Return the tag of the version that the store has; b"" if there is none."""

    @abstractmethod
    def lock_file(self, name: str) -> bool:
        """Lock a file against other engines; return whether this engine has its lock now."""

    @abstractmethod
    def unlock_file(self, name: str) -> None:
        """Give the lock of a file back."""

    @abstractmethod
    def collect(self) -> None:
        """Call the callbacks of finished operations."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until an operation is finished; then collect."""

    @abstractmethod
    def flush(self) -> None:
        """Wait, for a limited time, until all requested operations are finished."""

    @abstractmethod
    def close(self) -> None:
        """Flush, then leave the store to other engines."""
