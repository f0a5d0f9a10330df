"""Places where a long text may be worth cutting."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

MOST_CUTS = 64  # places of each kind that are tried


def places(text: str, end: int) -> Iterator[int]:
    """Where a text may be worth cutting before index `end`, the last first: between a line's end
    and a character that is no white space, then between a word and the white space behind it."""
    yield from islice(_line_begins(text, end), MOST_CUTS)
    yield from islice(_word_ends(text, end), MOST_CUTS)


def _line_begins(text: str, end: int) -> Iterator[int]:
    while (end := text.rfind("\n", 0, max(end, 0))) >= 0:
        if not text[end + 1 : end + 2].isspace():
            yield end + 1


def _word_ends(text: str, end: int) -> Iterator[int]:
    while end > 0 and (end := max(text.rfind(" ", 0, end), text.rfind("\n", 0, end))) > 0:
        if not text[end - 1].isspace():
            yield end
