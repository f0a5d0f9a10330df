"""Books are cut into chapters at their headings, or into stretches, or into paragraphs."""

from __future__ import annotations

import pytest

from service.text.passages import LEAST, MOST, STRETCH, chapters, paragraphs

PROSE = "The rain had stopped, and nobody spoke of the day before.\n\n" * 20
assert len(PROSE) > LEAST


@pytest.mark.parametrize(
    "heading",
    [
        "CHAPTER IV",
        "Chapter 12. - The Storm",
        "Chapter Twenty-One: Home",
        "BOOK THE FIRST",
        "Letter 3",
        "ACT II. SCENE I",
        "# The Storm",
        "XIV.",
        "7",
        "EPILOGUE",
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_chapters_begin_at_headings(heading: str, newline: str) -> None:
    body = (PROSE + f"{heading}\n\n" + PROSE + PROSE).replace("\n", newline)
    parts = chapters(body)
    assert "".join(parts) == body
    assert len(parts) == 2 and parts[1].startswith(heading)


@pytest.mark.parametrize(
    "line",
    [
        "Chapter one was long.",
        "Part of the crew slept.",
        "Letters from home",
        "I saw him.",
        "CHAPTER I\nand a line below",
        "THE END",
    ],
)
def test_other_lines_are_no_headings(line: str) -> None:
    body = f"{PROSE}{line}\n\n{PROSE}"
    assert chapters(body) == [body]


def test_headings_and_mottos_go_with_the_chapter_below() -> None:
    first = "BOOK I\n\nCHAPTER I\n\n“A motto.”\n\n" + PROSE
    body = f"A note.\n\n{first}CHAPTER II\n\n{PROSE}THE END"
    assert chapters(body) == [f"A note.\n\n{first}", f"CHAPTER II\n\n{PROSE}THE END"]
    assert chapters(f"{body}\n\nIII\n\n")[-1].endswith("III\n\n")


def test_a_book_without_headings_becomes_stretches_of_whole_paragraphs() -> None:
    body = PROSE * 40
    parts = chapters(body)
    assert "".join(parts) == body and len(parts) > 2
    assert all(part.endswith("\n\n") for part in parts)
    assert all(STRETCH <= len(part) < STRETCH + len(PROSE) for part in parts[:-1])


def test_a_chapter_that_is_too_long_becomes_stretches() -> None:
    long = "CHAPTER I\n\n" + PROSE * (1 + MOST // len(PROSE))
    body = long + "CHAPTER II\n\n" + PROSE
    parts = chapters(body)
    assert "".join(parts) == body
    assert parts[-1] == "CHAPTER II\n\n" + PROSE
    assert len(parts) > 3 and max(map(len, parts)) < MOST


def test_paragraphs_end_with_empty_lines() -> None:
    body = "one\nline more\n\n \n two\r\n\r\nthree"
    assert paragraphs(body) == ["one\nline more\n\n \n ", "two\r\n\r\n", "three"]


@pytest.mark.parametrize("body", ["\n\n", "a", "I"])
def test_hardly_any_text_is_one_passage(body: str) -> None:
    assert chapters(body) == paragraphs(body) == [body]
    assert chapters("") == paragraphs("") == []
