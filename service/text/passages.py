"""Passages: a book's body as chapters or paragraphs. Joined again they are the body."""

from __future__ import annotations

import re
from collections.abc import Iterator

STRETCH = 12_000  # characters of a stretch, where there are no headings; about a chapter's median
MOST = 120_000  # characters of a chapter; what is longer lacks headings and becomes stretches
LEAST = 200  # characters; what is shorter is a heading or a motto, and goes with what follows

_NUMBER = (
    r"(?:the[ \t]+)?(?:\d+|[ivxlc]+|(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|"
    r"twel|thirt|fourt|fift|sixt|sevent|ninet|twent|fort|first|second|third|ninth|last)[a-z-]*)"
)
# A line between empty ones: "CHAPTER IV. - The Storm", "BOOK THE FIRST", "XII.", "# The Storm".
# What follows the number is no small letter, as in the sentence "Part one was over."
_HEADING = re.compile(
    rf"""\n[ \t\r]*\n(?=[ \t]*(?:
        \#{{1,6}}[ \t]+\S[^\n]*
      | (?i:chapter|book|part|letter|canto|act|scene|section|volume|stave|adventure|lecture)
        [ \t]+(?i:{_NUMBER})\b(?![ \t]+[a-z])[^\n]{{0,120}}
      | (?i:preface|prologue|epilogue|introduction|conclusion)\.?[ \t]*
      | (?:[IVXLC]{{1,8}}|\d{{1,3}})\.?[ \t]*
    )\r?(?:\n[ \t\r]*(?:\n|\Z)|\Z))""",
    re.VERBOSE,
)
_EMPTY_LINE = re.compile(r"\n[ \t\r]*\n\s*")


def chapters(body: str) -> list[str]:
    """Return the parts of a body that begin at its headings.

    A body that no heading divides, and a chapter of more than MOST characters, is cut at ends of
    paragraphs into stretches of at least STRETCH characters.
    """
    parts = _joined(_cut(body, _HEADING))
    if len(parts) <= 1:
        return _stretches(body)
    return [
        stretch for part in parts for stretch in (_stretches(part) if len(part) > MOST else [part])
    ]


def paragraphs(body: str) -> list[str]:
    """Return the parts of a body that end with empty lines."""
    return list(_cut(body, _EMPTY_LINE))


def _cut(text: str, end: re.Pattern[str]) -> Iterator[str]:
    """Yield the parts of a text, cut behind every match."""
    at = 0
    for found in end.finditer(text):
        yield text[at : found.end()]
        at = found.end()
    if at < len(text):
        yield text[at:]


def _joined(parts: Iterator[str]) -> list[str]:
    """Return the parts, those below LEAST characters joined with the next one."""
    found: list[str] = []
    held = ""
    for part in parts:
        held += part
        if len(held) >= LEAST:
            found.append(held)
            held = ""
    if held and found:
        found[-1] += held
    elif held:
        found.append(held)
    return found


def _stretches(text: str) -> list[str]:
    found: list[str] = []
    begin = end = 0
    for paragraph in _cut(text, _EMPTY_LINE):
        end += len(paragraph)
        if end - begin >= STRETCH:
            found.append(text[begin:end])
            begin = end
    if begin < end:
        found.append(text[begin:])
    return found
