"""Texts of single tokens, as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PlainTexts(dict[int, str | None]):
    """The text of each token of a byte-level vocabulary, where it is one whatever comes before and
    after: None for tokens that hold a part of a character."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self.known: set[int] = set()  # tokens that are known to have one

    def has_all(self, tokens: Sequence[int]) -> bool:
        """Each of these tokens has a text."""
        known = self.known
        if known.issuperset(tokens):
            return True
        known.update(token for token in tokens if self[token] is not None)
        return known.issuperset(tokens)

    def joined(self, tokens: Sequence[int]) -> str | None:
        """Their text; None where one of them has none."""
        try:
            return "".join(map(self.__getitem__, tokens))  # type: ignore[arg-type]
        except TypeError:
            return None

    def __missing__(self, token: int) -> str | None:
        text: str | None
        try:
            text = self._table[token].decode() if token < len(self._table) else ""
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class Names(dict[int, str]):
    """Each token as a string: its text, or `bytes:\\xNN` where that is not whole UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, token: int) -> str:
        data = self._bytes_of(token)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        self[token] = name
        return name
