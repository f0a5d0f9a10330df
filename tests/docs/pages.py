"""The project's pages, parsed: headings, links, tables, lists and fenced blocks."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("service", "docker", "engine", "csrc", "loadtest")
# Readers follow these in this order; the others come after them by name.
FIRST = (
    "README.md",
    "service/README.md",
    "docker/README.md",
    "engine/models/README.md",
    "loadtest/README.md",
)
PARSER = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page where its text begins."""

    page: str
    line: int
    language: str
    text: str


class Link(NamedTuple):
    """A link or an image of a page, with the line where its paragraph begins."""

    line: int
    target: str


def pages() -> tuple[str, ...]:
    """Return every page of the project, in the order in which a reader meets them."""
    found = {"README.md", "CHANGELOG.md"}
    for folder in FOLDERS:
        found |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.md")}
    return (*FIRST, *sorted(found - set(FIRST)))


@cache
def text_of(page: str) -> str:
    """Return a page as it is written. Raises FileNotFoundError."""
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def tokens(page: str) -> list[Token]:
    """Return a page's block tokens, in order."""
    return PARSER.parse(text_of(page))


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, those in lists included."""
    found = []
    for token in tokens(page):
        if token.type == "fence":
            assert token.map is not None
            found.append(Block(page, token.map[0] + 2, token.info.strip(), token.content))
    return found


def plain(token: Token) -> str:
    """Return the words of an inline token without their markup."""
    return "".join(
        child.content for child in token.children or () if child.type in ("text", "code_inline")
    )


def headings(page: str, level: str = "h") -> list[str]:
    """Return the texts of a page's headings: of all levels, or of one, such as "h2"."""
    return [
        plain(token)
        for before, token in pairwise(tokens(page))
        if before.type == "heading_open" and before.tag.startswith(level)
    ]


def anchors(titles: list[str]) -> list[str]:
    """Return the anchors that GitHub gives the headings of one page."""
    seen: Counter[str] = Counter()
    found = []
    for title in titles:
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(page: str) -> list[Link]:
    """Return the targets of a page's links and images."""
    found = []
    for token in tokens(page):
        line = token.map[0] + 1 if token.map else 0
        for child in token.children or ():
            target = child.attrGet("href" if child.type == "link_open" else "src")
            if target is not None:
                found.append(Link(line, str(target)))
    return found
