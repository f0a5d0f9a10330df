"""ClientText: keeps special tokens that clients spell out in messages from becoming tokens.

Each spelled-out special token is split by a mark, a character without a meaning. A template that
searches the text for such a token still finds it, because the searched string is split in the same
way. The tokenizer removes the marks (`Tokenizer.encode_template`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any

from engine.errors import InvalidRequest

# Unicode's noncharacters; one that does not occur in the messages is used as the mark.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
MOST_SOUGHT = 64  # characters of a searched string that is matched around marks


class Knife:
    """Splits special tokens in texts by a mark."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the special tokens. Without a mark (see `with_mark`) nothing is split."""
        self.mark = ""
        self._short = [name for name in names if len(name) == 1]  # cannot be cut in two
        # Matches the first character of each special token in a text.
        some = "|".join(map(re.escape, names))
        self._spelled = re.compile(f"(?={some})(.)", re.DOTALL) if some else None

    def with_mark(self, mark: str) -> Knife:
        """Return a copy that splits by this mark."""
        knife = copy(self)
        knife.mark = mark
        return knife

    def finds(self, text: str) -> bool:
        """Whether a text spells out a special token."""
        return self._spelled is not None and self._spelled.search(text) is not None

    def cut(self, text: str) -> str:
        """Return a text with its special tokens split."""
        if self._spelled is None or not self.mark or not self._spelled.search(text):
            return text
        return self._spelled.sub(lambda found: found[1] + self.mark, text)

    def cut_strictly(self, text: str) -> str:
        """Return a text with its special tokens split.

        Raises InvalidRequest for special tokens of a single character, which cannot be split.
        """
        for name in self._short:
            if name in text:
                raise InvalidRequest(f"messages may not hold the special token {name!r}")
        return self.cut(text)

    def cut_all(self, value: Any) -> Any:
        """Return a JSON value in which all strings, keys included, are ClientText."""
        if isinstance(value, str):
            return ClientText(self.cut_strictly(value), self)
        if isinstance(value, dict):
            return {self.cut_all(key): self.cut_all(one) for key, one in value.items()}
        return [self.cut_all(one) for one in value] if isinstance(value, list) else value


class ClientText(str):
    """A client's text with its special tokens split, with the methods of str.

    Strings that a method searches for are split, too. Results are split again where they could
    spell out a special token that the text itself did not.
    """

    __slots__ = ("_knife", "_mixed")
    _knife: Knife
    _mixed: bool  # a part may come from the template, whose special tokens must stay whole

    def __new__(cls, text: str = "", knife: Knife | None = None) -> ClientText:
        made = super().__new__(cls, text)
        made._knife = knife or Knife(())
        made._mixed = knife is None
        return made

    def __str__(self) -> str:
        return self  # Jinja's filters call str() on their values

    def _sought(self, value: Any) -> Any:
        """Return the string to search for instead of `value`: its form with marks in this text."""
        if isinstance(value, tuple):
            return tuple(map(self._sought, value))
        if not isinstance(value, str) or str.__contains__(self, value):
            return value
        cut, mark = self._knife.cut(value), self._knife.mark
        if str.__contains__(self, cut) or len(value) > MOST_SOUGHT or not mark:
            return cut
        # The text may hold a part of a special token with the mark inside.
        found = re.search(f"{mark}*".join(map(re.escape, value)), self)
        return found[0] if found else cut

    def _like(self, made: Any, mixed: bool = False) -> Any:
        """Return a method's result with the strings in it as ClientText."""
        if isinstance(made, list | tuple):
            return type(made)(self._like(one, mixed) for one in made)
        if not isinstance(made, str):
            return made
        text = ClientText(made, self._knife)
        text._mixed = self._mixed or mixed
        return text

    def _joined(self, made: Any, *others: Any) -> Any:
        """Return a text that was joined from this one and `others` as ClientText, split again."""
        if not isinstance(made, str):
            return made
        mixed = self._mixed or not all(map(self._is_clients, others))
        return self._like(made if mixed else self._knife.cut_strictly(made), mixed)

    def _is_clients(self, other: Any) -> bool:
        return isinstance(other, ClientText) and not other._mixed

    def __add__(self, other: Any) -> Any:
        return self._joined(super().__add__(other), other)

    def __radd__(self, other: Any) -> Any:
        return self._joined(other.__add__(str.__str__(self)), other)

    def replace(self, old: Any, new: Any, count: Any = -1) -> Any:
        made = super().replace(self._sought(old), new, count)
        if isinstance(new, str) and self._knife.cut(new) == new:
            return self._joined(made)  # the neighbours of what was replaced may form a token
        return self._joined(made, new)


def _seeking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: ClientText, *given: Any, **named: Any) -> Any:
        sought = {name: self._sought(value) for name, value in named.items()}
        return self._like(plain(self, *map(self._sought, given), **sought))

    return method


def _changing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: ClientText, *given: Any) -> Any:
        return self._joined(plain(self, *given))

    return method


for _name in (
    "__contains__", "__eq__", "__ne__", "__getitem__", "startswith", "endswith", "find", "rfind",
    "index", "rindex", "count", "split", "rsplit", "partition", "rpartition", "splitlines",
    "removeprefix", "removesuffix", "strip", "lstrip", "rstrip",
):  # fmt: skip
    setattr(ClientText, _name, _seeking(getattr(str, _name)))
for _name in ("lower", "upper", "title", "capitalize", "casefold", "swapcase"):
    setattr(ClientText, _name, _changing(getattr(str, _name)))


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, keys included."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            rest += one
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one


def unused_marks(texts: Iterable[str], count: int) -> list[str]:
    """Return up to `count` of MARKS that occur in none of the texts.

    Escaped forms count, too: a template may render its input as JSON or with Python's repr.
    """
    text = "\n".join(texts)
    free = (mark for mark in MARKS if mark not in text and escaped(mark) not in text)
    return list(islice(free, count))


def escaped(mark: str) -> str:
    """Return a mark's escaped form in ASCII JSON and in Python's repr."""
    return f"\\u{ord(mark):04x}"
