"""SharedPrefixes: which token prefixes have their state kept, in which row.

Requests that begin with the same tokens (samples of one prompt, continuations of one context)
read them once. The first of them to be admitted is the prefix's reader; the prefix is *pending*
until the reader has passed it and its state is copied to a row of the pool, from which every
later sequence starts. Rows are few and reused, least recently used first.

What an owner's requests have read serves that owner's requests alone: whether a text has been
read before would tell others of it. Rows are common to all.

A copy out of a row is planned in the step that looks it up, and a step copies out of rows before
it copies into them, so that a row may be reused at any time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from engine.messages import ID_BYTES
from engine.sequence import Prefix, prefixes
from engine.slots import SlotAllocator


@dataclass(frozen=True, slots=True)
class Hit:
    """A kept state: the row it lies in and how many tokens it has read."""

    row: int
    length: int


class SharedPrefixes:
    """Which prefixes are kept, and who reads those that are not yet.

    A prefix goes through `claim` (pending), `reserve` (a row is chosen, the copy planned) and
    `keep` (the copy stands); `drop_reader` withdraws all that a reader has not yet kept.
    """

    def __init__(self, rows: int, first_row: int) -> None:
        self._rows = SlotAllocator(rows, first_row)
        self._kept: OrderedDict[Prefix, int] = OrderedDict()  # least recently used first
        self._lengths: Counter[int] = Counter()  # of the kept prefixes
        self._reserved: dict[Prefix, int] = {}
        self._readers: dict[Prefix, int] = {}  # pending prefix -> its reader's key
        self._claims: dict[int, set[Prefix]] = {}  # reader's key -> its pending prefixes

    @property
    def rows_used(self) -> int:
        """Rows that hold a state or are about to."""
        return self._rows.used

    def find(self, prompt: bytes, limit: int, owner: str = "") -> Hit | None:
        """The longest prefix of `prompt` of at most `limit` tokens that is kept for `owner`."""
        limit = min(limit, len(prompt) // ID_BYTES)
        lengths = [length for length in self._lengths if length <= limit]
        for prefix in reversed(prefixes(prompt, lengths, owner).values()):
            row = self._kept.get(prefix)
            if row is not None:
                self._kept.move_to_end(prefix)
                return Hit(row, prefix.length)
        return None

    def is_known(self, prefix: Prefix) -> bool:
        """Whether it is kept or pending, and so needs no further reader."""
        return prefix in self._kept or prefix in self._readers

    def awaited(self, prefixes: dict[int, Prefix], most: int) -> Prefix | None:
        """The longest of these, shortest first, of up to `most` tokens that a sequence could start
        from, were it not still being read."""
        for length, prefix in reversed(prefixes.items()):
            if length <= most and self.is_pending(prefix):
                return prefix
        return None

    def is_pending(self, prefix: Prefix) -> bool:
        """Whether a running sequence is reading it just now."""
        return prefix in self._readers

    def claim(self, prefix: Prefix, reader: int) -> None:
        """Makes `reader` the one that reads a prefix that is not yet known."""
        if self._rows.count:
            self._readers[prefix] = reader
            self._claims.setdefault(reader, set()).add(prefix)

    def reserve(self, prefix: Prefix, reader: int) -> int | None:
        """A row for the state of a prefix that `reader` claimed, now that it passes it.

        None when the claim is another's, or every row is the target of a copy of this very step.
        """
        if self._readers.get(prefix) != reader:
            return None
        if self._rows.free == 0:
            if not self._kept:
                return None
            oldest, row = self._kept.popitem(last=False)
            self._forget_length(oldest)
            self._rows.give_back(row)
        self._reserved[prefix] = self._rows.take()
        return self._reserved[prefix]

    def keep(self, prefix: Prefix, reader: int) -> None:
        """The reader has passed the prefix: it is kept if it had a row, else no longer pending."""
        if self._readers.get(prefix) != reader:
            return
        self._withdraw(prefix, reader)
        row = self._reserved.pop(prefix, None)
        if row is not None:
            self._kept[prefix] = row
            self._lengths[prefix.length] += 1

    def drop_reader(self, reader: int) -> set[Prefix]:
        """The reader has ended. Returns what is no longer pending: another has to read it."""
        dropped = set(self._claims.get(reader, ()))
        for prefix in dropped:
            self._withdraw(prefix, reader)
            row = self._reserved.pop(prefix, None)
            if row is not None:
                self._rows.give_back(row)
        return dropped

    def _withdraw(self, prefix: Prefix, reader: int) -> None:
        del self._readers[prefix]
        claims = self._claims[reader]
        claims.remove(prefix)
        if not claims:
            del self._claims[reader]

    def _forget_length(self, prefix: Prefix) -> None:
        self._lengths[prefix.length] -= 1
        if not self._lengths[prefix.length]:
            del self._lengths[prefix.length]
