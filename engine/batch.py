"""DecodeBatch: sequences that decode together, round after round, while the device keeps them.

The device draws for them without the host, so a round may take several steps, and one may follow
the other before the results of the first are here. A sequence that leaves in between stays in its
row until the batch is made anew; the device passes over the rows that it has ended itself, and
goes on writing to the slots of those that the host has ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable

from engine.messages import ID_BYTES, Run
from engine.outbox import Outbox
from engine.plan import DecodeRow, Drawn
from engine.sequence import Sequence


class DecodeBatch:
    """`sequences` are in the order of their rows; all of them are plain."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self.sequences = list(sequences)
        self.rows = [
            DecodeRow(one.key, one.slot, one.last_token, one.drawn) for one in self.sequences
        ]
        self.started = False  # its rows are on the device
        self.spoiled = False  # the device has ended a row whose sequence goes on
        self._ahead = 0  # steps that have been planned and not yet taken in
        # Those which the device may still move on: neither side has ended them.
        self._on_device = {one.key for one in self.sequences}
        self._longest: Sequence | None = None
        self._alive = list(enumerate(self.sequences))  # rows that none has ended, as far as known
        self._streams: dict[Hashable, tuple[list[int], list[int]]] = {}  # ids and rows, by client
        self._sorted = False

    def writes(self, key: int) -> bool:
        """Whether the device may write to this sequence's slot."""
        return key in self._on_device

    def left(self) -> int:
        """How many tokens may still be drawn at most, beyond what is planned."""
        if self._longest is None or self._longest.over:
            alive = (one for one in self.sequences if not one.over)
            self._longest = max(alive, key=lambda one: one.max_tokens - one.drawn, default=None)
        if self._longest is None:
            return 0
        return self._longest.max_tokens - self._longest.drawn - self._ahead

    def planned(self, steps: int) -> None:
        """The device has been asked for `steps` more."""
        self.started = True
        self._ahead += steps

    def note_ended(self, drawn: Drawn) -> None:
        """The device will not write to these rows' slots any more."""
        self._on_device.difference_update(self.rows[row].key for row in drawn.ended)

    def take_in(
        self,
        drawn: Drawn,
        steps: int,
        outbox: Outbox,
        end: Callable[[Sequence, array[int]], int],
        now: float,
    ) -> int:
        """Delivers what `steps` steps brought; returns how many tokens that was.

        `end` takes the tokens of a sequence which the device has ended, the stop id included, and
        returns how many it delivered. If the sequence does not end by them, the batch is spoiled.
        """
        self._ahead -= steps
        ids = array("i")
        ids.frombytes(drawn.tokens)
        self._drop(drawn)
        latest = ids[steps - 1 :: steps]
        for row, sequence in self._alive:
            sequence.drawn += steps
            sequence.last_token = latest[row]
            sequence.last_token_at = now
            sequence.tokens.extend(ids[row * steps : (row + 1) * steps])
        for client, (requests, rows) in self._streams.items():
            tokens = _of_rows(drawn.tokens, rows, steps * ID_BYTES)
            outbox.run(client, Run(requests, steps, tokens))
        delivered = steps * len(self._alive)
        for row, length in drawn.ended.items():
            sequence = self.sequences[row]
            if not sequence.over:
                delivered += end(sequence, ids[row * steps : row * steps + length])
                self.spoiled = self.spoiled or not sequence.over
        return delivered

    def _drop(self, drawn: Drawn) -> None:
        """Leaves out those that have ended, and sorts the others by where their tokens go."""
        ended, count = drawn.ended, len(self._alive)
        self._alive = [one for one in self._alive if not (one[1].over or one[0] in ended)]
        if self._sorted and len(self._alive) == count:
            return
        self._sorted = True
        streams = [one for one in self._alive if one[1].request.stream]
        self._streams = {}
        for client in {sequence.client for _, sequence in streams}:
            mine = [one for one in streams if one[1].client == client]
            self._streams[client] = (
                [sequence.request.id for _, sequence in mine],
                [row for row, _ in mine],
            )


def _of_rows(tokens: bytes, rows: list[int], width: int) -> bytes:
    """The tokens of `rows`, of all that there are, each `width` bytes."""
    if len(rows) * width == len(tokens):
        return tokens
    return b"".join([tokens[row * width : row * width + width] for row in rows])
