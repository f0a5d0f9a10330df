"""Text that comes as bytes, in pieces that can be encoded one by one at constant memory."""

from __future__ import annotations

import codecs
from collections.abc import Callable

# Pieces that a text without a place to be cut at is kept for.
MOST_PIECES = 16


class NotUtf8(ValueError):
    """What came is no UTF-8 text: `reason`, and `at` which byte of all."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"{reason} at byte {at:,}")
        self.reason = reason
        self.at = at


class Pieces:
    """Cuts text where its parts have the tokens that they have together; what has no such place
    within MOST_PIECES pieces, between characters."""

    def __init__(self, least: int, last_cut: Callable[[str], int]) -> None:
        """`least`: characters of a piece, but for the last one. `last_cut` gives the last place
        where a text may be cut, 0 for none (`Tokenizer.last_cut`)."""
        self._least = least
        self._wanted = least  # characters that are needed before a cut is looked for
        self._last_cut = last_cut
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""
        self._offset = 0  # of what comes next, in bytes

    def feed(self, data: bytes) -> str:
        """The next piece; empty while more is needed. Raises NotUtf8."""
        self._decode(data, final=False)
        rest = self._rest
        if len(rest) < self._wanted:
            return ""
        cut = self._last_cut(rest)
        if cut == 0:
            if len(rest) < MOST_PIECES * self._least:
                self._wanted = len(rest) + self._least
                return ""
            cut = len(rest)
        self._wanted = self._least
        self._rest = rest[cut:]
        return rest[:cut]

    def finish(self) -> str:
        """The last one, which may be empty. Raises NotUtf8."""
        self._decode(b"", final=True)
        last, self._rest = self._rest, ""
        return last

    def _decode(self, data: bytes, *, final: bool) -> None:
        pending = len(self._decoder.getstate()[0])
        try:
            self._rest += self._decoder.decode(data, final=final)
        except UnicodeDecodeError as error:
            raise NotUtf8(error.reason, self._offset - pending + error.start) from error
        self._offset += len(data)
