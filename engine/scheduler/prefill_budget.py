"""What a round may spend on prompts: tokens (PrefillBudget) and admissions (AdmissionLimit).

Tokens are shared so that neither owners nor prompts, long or short, starve. Owners have equal
parts, which go round where there are fewer chunks than owners; what one of them leaves goes to the
others. Of an owner's sequences the one that was admitted first gets half of its part, the others
the rest, least remaining first; what they leave goes to the first again. A part of less than two
chunks cannot be halved: then the first and the others take turns.

Chunks end at multiples of SCAN_CHUNK, counted from where the sequence began to read, and at its
marks, from which the count begins anew. Where all marks are such multiples too, they change nothing
of where the scans combine carries.

While the device works beside the host, to admit more than a few requests at once would keep it
waiting for the host: now and, as they tend to end together, when they end. But all slots are to be
taken within a few rounds, and to stay so: that is as many as have come free since others were
admitted, and a part of those that were free before, or these would be for ever; but no more than
the host and the graphs of prompts are good for.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from engine.config import SCAN_CHUNK
from engine.sequence import Sequence

Portions = list[tuple[Sequence, int]]


class PrefillBudget:
    """Shares the prompt tokens of a round; `tokens` of them may be read."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._step = 0
        self._read_at: dict[str, int] = {}  # owners that read in the latest step or still wait to
        self._led: set[int] = set()  # keys of first ones that read while others of theirs did not

    def share(self, reading: Collection[Sequence]) -> Portions:
        """Shares one round's tokens; call it once a round.

        Args:
            reading: the sequences with prompt tokens left, in order of admission.

        Returns the sequences that read in this round, each with its number of tokens, at least 1.
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
        """How several owners share the step's tokens."""
        self._step += 1
        turns = {owner: self._read_at.get(owner, 0) for owner in by_owner}
        order = sorted(by_owner, key=turns.__getitem__)  # who has waited longest comes first
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
        """How one owner's sequences share its tokens."""
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
        """Whether the others of `reading` come before its first next time."""
        first = reading[0]
        if not shares:
            return first.key in self._led
        return len(shares) < len(reading) and any(sequence is first for sequence, _ in shares)

    def _chunk_length(self, sequence: Sequence, available: int) -> int:
        """How many tokens its next chunk may have, when `available` are left of the budget.

        0 where the chunk could not end at a multiple of SCAN_CHUNK; but a budget that is always
        smaller than that is used as it is.
        """
        needed = sequence.next_mark() - sequence.position
        if needed <= available or self._tokens < SCAN_CHUNK:
            return min(needed, available)
        done = sequence.position - sequence.anchor
        return max((done + available) // SCAN_CHUNK * SCAN_CHUNK - done, 0)


ADMIT_AT_ONCE = 64
ADMIT_PART = 1 / 16  # of the slots
ADMIT_LEFT_PART = 1 / 8  # of those that were left
MOST_ADMIT_PART = 3 / 32  # of the slots, however many are free


class AdmissionLimit:
    """How many requests a plan admits at most.

    `slots` is the number of the scheduler's slots; `overlaps` says whether the device works on a
    round while the host prepares the next one.
    """

    def __init__(self, slots: int, overlaps: bool) -> None:
        self._slots = slots
        self._overlaps = overlaps
        self._left_free = 0  # when somebody was admitted last

    def limit(self, free: int) -> int:
        """How many requests a plan may admit, while `free` slots are free."""
        if not self._overlaps:
            return sys.maxsize
        due = free - self._left_free + int(ADMIT_LEFT_PART * self._left_free)
        return max(
            ADMIT_AT_ONCE,
            int(ADMIT_PART * self._slots),
            min(due, int(MOST_ADMIT_PART * self._slots)),
        )

    def note(self, free: int) -> None:
        """Requests have just been admitted, and `free` slots are left."""
        self._left_free = free
