"""Text that comes as bytes, in pieces that can be encoded one by one at constant memory."""

from __future__ import annotations

import codecs


class NotUtf8(ValueError):
    """What came is no UTF-8 text: `reason`, and `at` which byte of all."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"{reason} at byte {at:,}")
        self.reason = reason
        self.at = at


class Pieces:
    """Cuts text between a line's end and a character that is no space, where byte-level tokenizers
    never join tokens; what has no such place within twice a piece, between characters."""

    def __init__(self, least: int) -> None:
        """`least`: characters of a piece, but for the last one."""
        self._least = least
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""
        self._offset = 0  # of what comes next, in bytes

    def feed(self, data: bytes) -> str:
        """The next piece; empty while more is needed. Raises NotUtf8."""
        self._decode(data, final=False)
        rest, least = self._rest, self._least
        if len(rest) < least:
            return ""
        cut = last_cut(rest)
        if cut == 0 and len(rest) >= 2 * least:
            cut = len(rest)
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


def last_cut(text: str) -> int:
    """The last index between a newline and a character that is no white space; 0 = none."""
    at = text.rfind("\n", 0, len(text) - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    return at + 1
