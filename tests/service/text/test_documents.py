"""Texts of files and folders are read as documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from service.text.documents import (
    ByteRange,
    Document,
    TextError,
    document_ranges,
    files_of,
    first_lines,
    read_documents,
)

HEADER = "Title: Emma\nAuthor: Jane Austen\nYear: 1815\n\n"
END = "<|endoftext|>"


def test_a_header_is_lines_of_names_and_values_before_an_empty_line() -> None:
    document = Document.of(HEADER + "Emma Woodhouse, handsome.\n")
    assert (document.header, document.body) == (HEADER, "Emma Woodhouse, handsome.\n")
    assert document.first_line == "Title: Emma"
    for text in ("Emma: a novel", "Title: Emma\nno header\n\n", "\n" + HEADER, "He said: no\n"):
        assert Document.of(text) == Document("", text)


def test_a_line_of_the_separator_ends_a_document(tmp_path: Path) -> None:
    file = tmp_path / "books.txt"
    file.write_text(f"one\n{END}\n{HEADER}two {END} in a line\n\n{END}\n\n{END}\n\nthree")
    whole = list(read_documents([file]))
    assert [document.text for document in whole] == [file.read_text()]
    parts = list(read_documents([file], separator=END))
    assert [part.text for part in parts] == [
        "one\n",
        f"{HEADER}two {END} in a line\n\n",
        "three",
    ]
    assert [part.header for part in parts] == ["", HEADER, ""]


def test_folders_are_read_by_name_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/2.txt", "a.txt", ".hidden", ".git/config", "c.txt"):
        (tmp_path / name).write_text(name)
    texts = [document.text for document in read_documents([tmp_path, tmp_path / "a.txt"])]
    assert texts == ["a.txt", "b/2.txt", "c.txt", "a.txt"]
    (tmp_path / "empty").mkdir()
    for missing, told in (("none", "no such file or folder"), ("empty", "has no file")):
        with pytest.raises(ConfigError, match=told):
            files_of([tmp_path / missing])


def test_a_range_counts_the_bytes_of_all_files(tmp_path: Path) -> None:
    for name, text in (("1", "abcé"), ("2", "fgh"), ("3", "ijk")):  # 5, 3 and 3 bytes
        (tmp_path / name).write_text(text)

    def read(text: str) -> list[str]:
        within = ByteRange.parse(text)
        assert within is not None
        return [document.text for document in read_documents([tmp_path], within=within)]

    assert read("1:7") == ["bcé", "fg"]
    assert read(":3") == ["abc"]
    assert read("8:") == ["ijk"]
    with pytest.raises(TextError, match=r"1: not UTF-8 text.* at byte 3"):
        read("2:4")
    with pytest.raises(TextError, match="at byte 4"):
        read("4:")
    with pytest.raises(ConfigError, match="begins at byte 11; the data has 11"):
        read("11:12")
    assert [ByteRange.parse(text) for text in ("books.txt", ":", "-1:2", "1:2:3")] == [None] * 4


def test_a_list_of_first_lines(tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    file.write_text("# by one author\nTitle: Emma\n\n  Title: Persuasion \n")
    assert first_lines(file) == {"Title: Emma", "Title: Persuasion"}
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="names no document"):
        first_lines(file)


def test_ranges_are_those_of_the_documents(tmp_path: Path) -> None:
    file = tmp_path / "books.txt"
    text = f"é one\n{END}\n{HEADER}two {END} in a line\n\n{END} \r\n\n{END}\n\nthree{END}\n{END}"
    file.write_bytes(text.encode())
    parts = [document.text for document in read_documents([file], separator=END)]
    ranges = list(document_ranges(file, separator=END))
    assert len(parts) == 3
    found = [doc.text for within in ranges for doc in read_documents([file], within=within)]
    assert found == parts
    assert next(document_ranges(file, separator=END)) == ranges[0]  # and no more of it is read
    file.write_bytes(b"")
    assert list(document_ranges(file, separator=END)) == []
