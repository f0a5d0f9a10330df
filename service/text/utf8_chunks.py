"""Pieces: splits UTF-8 text that arrives as bytes into pieces to encode one by one."""

from __future__ import annotations

import codecs
from collections.abc import Callable

# A text without a place to cut is kept for this many times the least piece, then cut anyway.
MOST_PIECES = 16


class NotUtf8(ValueError):
    """The text is not UTF-8. `reason` says why; `at` is the offset of the wrong byte."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"{reason} at byte {at:,}")
        self.reason = reason
        self.at = at


class Pieces:
    """Cuts a text into pieces at places where cutting does not change its tokens.

    If no such place is found within MOST_PIECES times the least length, it cuts between any two
    characters. Memory is bounded.
    """

    def __init__(self, least: int, last_cut: Callable[[str], int]) -> None:
        """Begin a text.

        Args:
            least: Least characters of a piece, except for the last one.
            last_cut: Returns the last place where a text can be cut, or 0 (`Tokenizer.last_cut`).
        """
        self._least = least
        self._wanted = least  # characters to collect before the next attempt to cut
        self._last_cut = last_cut
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""
        self._offset = 0  # bytes taken so far

    def feed(self, data: bytes) -> str:
        """Take bytes and return the next piece, or "" while more is needed. Raises NotUtf8."""
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
        """End the text and return the last piece, which may be empty. Raises NotUtf8."""
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
