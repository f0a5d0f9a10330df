"""What clients write, as chat templates see it: special tokens that it spells out are text.

Each one is cut in two by a mark, a character without a meaning. A template that looks for such a
token in the text finds it all the same, since what it looks for is cut in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any

from engine.errors import InvalidRequest

# Characters that Unicode gives no meaning for good: one that no message holds is the mark.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
MOST_SOUGHT = 64  # characters of what is looked for around marks


class Knife:
    """Cuts the special tokens `names` in texts by a mark; "" cuts none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.mark = ""
        self._short = [name for name in names if len(name) == 1]  # cannot be cut in two
        # The first character of each place where a special token begins.
        some = "|".join(map(re.escape, names))
        self._spelled = re.compile(f"(?={some})(.)", re.DOTALL) if some else None

    def with_mark(self, mark: str) -> Knife:
        """The same, with this mark."""
        knife = copy(self)
        knife.mark = mark
        return knife

    def finds(self, text: str) -> bool:
        """Some special token is spelled out."""
        return self._spelled is not None and self._spelled.search(text) is not None

    def cut(self, text: str) -> str:
        """The text with its special tokens cut."""
        if self._spelled is None or not self.mark or not self._spelled.search(text):
            return text
        return self._spelled.sub(lambda found: found[1] + self.mark, text)

    def cut_strictly(self, text: str) -> str:
        """The same. Raises InvalidRequest for a special token that cannot be cut."""
        for name in self._short:
            if name in text:
                raise InvalidRequest(f"messages may not hold the special token {name!r}")
        return self.cut(text)

    def cut_all(self, value: Any) -> Any:
        """A JSON value whose strings, keys too, are ClientText."""
        if isinstance(value, str):
            return ClientText(self.cut_strictly(value), self)
        if isinstance(value, dict):
            return {self.cut_all(key): self.cut_all(one) for key, one in value.items()}
        return [self.cut_all(one) for one in value] if isinstance(value, list) else value


class ClientText(str):
    """A text that its knife has cut, with the methods of strings: what they look for is cut too,
    and what they make is cut again where it could spell out a token that the text did not."""

    __slots__ = ("_knife", "_mixed")
    _knife: Knife
    _mixed: bool  # some of it may be the template's, whose special tokens are meant as such

    def __new__(cls, text: str = "", knife: Knife | None = None) -> ClientText:
        made = super().__new__(cls, text)
        made._knife = knife or Knife(())
        made._mixed = knife is None
        return made

    def __str__(self) -> str:
        return self  # Jinja's filters make strings of their values

    def _sought(self, value: Any) -> Any:
        """What to look for instead of `value`: as it stands in this text, where it does."""
        if isinstance(value, tuple):
            return tuple(map(self._sought, value))
        if not isinstance(value, str) or str.__contains__(self, value):
            return value
        cut, mark = self._knife.cut(value), self._knife.mark
        if str.__contains__(self, cut) or len(value) > MOST_SOUGHT or not mark:
            return cut
        # A part of a special token may stand there around the mark.
        found = re.search(f"{mark}*".join(map(re.escape, value)), self)
        return found[0] if found else cut

    def _like(self, made: Any, mixed: bool = False) -> Any:
        """A method's result, texts in it as this one is."""
        if isinstance(made, list | tuple):
            return type(made)(self._like(one, mixed) for one in made)
        if not isinstance(made, str):
            return made
        text = ClientText(made, self._knife)
        text._mixed = self._mixed or mixed
        return text

    def _joined(self, made: Any, *others: Any) -> Any:
        """As `_like`, of a text that was put together from this one and others."""
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
            return self._joined(made)  # what comes to stand together may be a token now
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
    """The strings of a JSON value, its keys too."""
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
    """So many of MARKS, or fewer, that none of the texts holds, neither as such nor as JSON and
    Python escape them: a template may write what it was given in either way."""
    text = "\n".join(texts)
    free = (mark for mark in MARKS if mark not in text and escaped(mark) not in text)
    return list(islice(free, count))


def escaped(mark: str) -> str:
    """A mark as JSON in ASCII and Python's repr have it."""
    return f"\\u{ord(mark):04x}"
