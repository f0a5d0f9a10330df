"""PlainTexts and Names: texts of single tokens, computed when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PlainTexts(dict[int, str | None]):
    """The text of each token of a byte-level vocabulary; None if it holds a part of a character.

    A token with a text here is plain: its text does not depend on its neighbours.
    """

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self.known: set[int] = set()  # tokens that are known to be plain

    def has_all(self, tokens: Sequence[int]) -> bool:
        """Whether all of these tokens are plain."""
        known = self.known
        if known.issuperset(tokens):
            return True
        known.update(token for token in tokens if self[token] is not None)
        return known.issuperset(tokens)

    def joined(self, tokens: Sequence[int]) -> str | None:
        """Return the text of tokens, or None if one of them is not plain."""
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
    """The name of each token in answers: its text, or `bytes:\\xNN` if that is not valid UTF-8."""

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
