"""Candidate places to cut a long text: line ends and word ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

MOST_CUTS = 64  # candidates of each kind


def places(text: str, end: int) -> Iterator[int]:
    """Yield candidate places to cut a text before index `end`, the last ones first.

    First places between a line's end and a character that is not white space, then places between a
    word and the white space after it.
    """
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
