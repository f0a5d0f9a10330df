"""Limits on the prompt work of a round: tokens (PrefillBudget) and admissions (AdmissionLimit).

Prompt tokens are shared so that no owner and no prompt, long or short, starves:

- Owners get equal shares, which rotate if there are fewer chunks than owners. What one owner leaves
  goes to the others.
- Of an owner's sequences, the one admitted first gets half of the share. The others get the rest,
  shortest remaining prompt first. What they leave goes to the first again. A share of less than two
  chunks cannot be halved: then the first and the others take turns.

Chunks end at multiples of SCAN_CHUNK, counted from where the sequence began to read, and at its
marks, from which the count starts again. If all marks are such multiples too, cutting the prompt
does not change where the scans combine carries.

On an asynchronous device, admitting many requests at once would make the device wait for the host:
now, and again when they end, which they tend to do together. Yet all slots should be filled within
a few rounds and stay filled. So a round may admit as many requests as slots came free since the
last admission, plus a part of those that were free before, up to what the host and the prompt
graphs can handle.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from engine.config import SCAN_CHUNK
from engine.sequence import Sequence

Portions = list[tuple[Sequence, int]]


class PrefillBudget:
    """Shares the prompt tokens of a round; at most `tokens` are read."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._step = 0
        # latest step in which an owner read or first had to wait
        self._read_at: dict[str, int] = {}
        # keys of first sequences that read while others of their owner did not
        self._led: set[int] = set()

    def share(self, reading: Collection[Sequence]) -> Portions:
        """Share one round's tokens; call it once per round.

        Args:
            reading: the sequences with prompt tokens left, in order of admission.

        Returns:
            The sequences that read in this round, each with its number of tokens, at least 1.
        """
        by_owner: dict[str, list[Sequence]] = {}
        for sequence in reading:
            by_owner.setdefault(sequence.owner, []).append(sequence)
        if len(by_owner) <= 1:
            self._read_at = {}
            shares = {owner: self._within(mine, self._tokens) for owner, mine in by_owner.items()}
        else:
            shares = self._between(by_owner)
        self._led = {
            mine[0].key for owner, mine in by_owner.items() if self._leads(mine, shares[owner])
        }
        return [share for some in shares.values() for share in some]

    def _between(self, by_owner: dict[str, list[Sequence]]) -> dict[str, Portions]:
        """Share the step's tokens among several owners."""
        self._step += 1
        turns = {owner: self._read_at.get(owner, 0) for owner in by_owner}
        order = sorted(by_owner, key=turns.__getitem__)  # the longest waiting owner first
        shares = {owner: Portions() for owner in order}
        taken = dict.fromkeys(order, 0)
        left, hungry = self._tokens, order
        while hungry:
            asking, hungry = hungry, []
            for index, owner in enumerate(asking):
                part = max(left // (len(asking) - index), min(SCAN_CHUNK, left))
                wider = self._within(by_owner[owner], taken[owner] + part)
                total = sum(length for _, length in wider)
                if total > taken[owner]:
                    left -= total - taken[owner]
                    shares[owner], taken[owner] = wider, total
                    hungry.append(owner)
        self._read_at = {
            owner: self._step if taken[owner] else turn for owner, turn in turns.items()
        }
        return shares

    def _within(self, reading: list[Sequence], tokens: int) -> Portions:
        """Share `tokens` among one owner's sequences."""
        if not reading or tokens == 0:
            return []
        first, *others = reading
        half = tokens // 2 // SCAN_CHUNK * SCAN_CHUNK
        if not half and first.key not in self._led:
            half = min(SCAN_CHUNK, tokens)
        left = tokens - self._chunk_length(first, half)
        shares = []
        for sequence in sorted(others, key=lambda other: other.remaining):
            length = self._chunk_length(sequence, left)
            if length:
                shares.append((sequence, length))
                left -= length
            if left == 0:
                break
        length = self._chunk_length(first, tokens - sum(taken for _, taken in shares))
        return [(first, length), *shares] if length else shares

    def _leads(self, reading: list[Sequence], shares: Portions) -> bool:
        """Return whether the others of `reading` come before its first next time."""
        first = reading[0]
        if not shares:
            return first.key in self._led
        return len(shares) < len(reading) and any(sequence is first for sequence, _ in shares)

    def _chunk_length(self, sequence: Sequence, available: int) -> int:
        """Return how many tokens the sequence's next chunk may have.

        `available` tokens are left of the budget. Returns 0 if the chunk could not end at a
        multiple of SCAN_CHUNK; but a whole budget smaller than SCAN_CHUNK is used as it is.
        """
        needed = sequence.next_mark() - sequence.position
        if needed <= available or self._tokens < SCAN_CHUNK:
            return min(needed, available)
        done = sequence.position - sequence.anchor
        return max((done + available) // SCAN_CHUNK * SCAN_CHUNK - done, 0)


ADMIT_AT_ONCE = 64  # always allowed
ADMIT_PART = 1 / 16  # part of the slots that is always allowed
ADMIT_LEFT_PART = 1 / 8  # part of the slots that were left free before
MOST_ADMIT_PART = 3 / 32  # part of the slots, however many are free


class AdmissionLimit:
    """Bounds how many requests a plan admits.

    `slots` is the number of the scheduler's slots; `overlaps` says whether the device works on a
    round while the host prepares the next one.
    """

    def __init__(self, slots: int, overlaps: bool) -> None:
        self._slots = slots
        self._overlaps = overlaps
        self._left_free = 0  # free slots after the last admission

    def limit(self, free: int) -> int:
        """Return how many requests a plan may admit while `free` slots are free."""
        if not self._overlaps:
            return sys.maxsize
        due = free - self._left_free + int(ADMIT_LEFT_PART * self._left_free)
        return max(
            ADMIT_AT_ONCE,
            int(ADMIT_PART * self._slots),
            min(due, int(MOST_ADMIT_PART * self._slots)),
        )

    def note(self, free: int) -> None:
        """Record that requests were just admitted and `free` slots are left."""
        self._left_free = free
