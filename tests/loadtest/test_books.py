"""Whole books against the application over a fake model, on a socket, beside short requests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.books import joined, judge, longest, main, places
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

END = "<|endoftext|>"
SHORT, MIDDLE, LONG = (
    f"Title: {name}\n\n" + "It rained — again.\n\n" * lines
    for name, lines in (("Short", 10), ("Middle", 50), ("Long", 200))
)
MOST = 20_000  # bytes of a body
FEW = ("--seconds", "0.3", "--rate", "20", "--max-tokens", "2", "--timeout", "60")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("model"))
    with listening(fake_runner(folder), max_body_bytes=MOST) as (address, _):
        yield address


@pytest.fixture
def library(tmp_path: Path) -> Path:
    file = tmp_path / "library.txt"
    file.write_text(f"\n{END}\n".join((SHORT, LONG, MIDDLE)))
    return file


def _run(library: Path, *options: str, code: int = 0) -> Any:
    figures = library.with_name("figures.json")
    assert main([str(library), *FEW, "--json", str(figures), *options]) == code
    return json.loads(figures.read_text())


def test_the_longest_documents_are_chosen(library: Path) -> None:
    found = places([library])
    assert [place.read()[0] for place in longest(found, 2, None)] == ["Long", "Middle"]
    assert [place.read()[0] for place in longest(found, 2, 2_000)] == ["Middle", "Short"]
    assert joined(found, 1) == f"{LONG}\n"
    assert joined(found, len(LONG.encode()) + 9) == f"{LONG}\n\n{MIDDLE}"
    assert joined(found, 10**9).startswith(f"{LONG}\n\n{MIDDLE}\n{SHORT}")
    with pytest.raises(ValueError, match="no document of up to 10 bytes"):
        longest(found, 1, 10)


def test_each_book_is_one_request_and_short_ones_go_on_beside_it(library: Path, url: str) -> None:
    asked = ("--count", "2", "--endpoint", "generate", "score", "--pid", str(os.getpid()))
    found = _run(library, "--url", url, *asked)
    rows = found["books"]
    kinds = ("generate", "score")
    assert [(row["text"], row["endpoint"]) for row in rows] == [
        (name, kind) for name in ("Long", "Middle") for kind in kinds
    ]
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        # Tokens are bytes. The file's last document has no end of line before an end-of-text line.
        text = {"Long": f"{LONG}\n", "Middle": MIDDLE}[row["text"]]
        assert row["bytes"] == row["prompt_tokens"] == len(text.encode())
        assert (row["ttft"] is None) == (row["endpoint"] == "score")
        assert row["memory"]["peak"] >= row["memory"]["before"] > 0
        assert row["short"]["requests"] > 0 and row["short"]["failed"] == []
    assert found["alone"]["requests"] > 1
    assert set(found["alone"]["latency_ms"]) == {"ttft", "e2e"}


def test_a_refused_book_is_told(
    library: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library.write_text(f"{LONG * 3}{END}\n{LONG * 2}")
    found = _run(library, "--url", url, "--most-bytes", "10000", "--joined", "15000")
    first, second = found["books"]
    assert first["outcome"] == "ok" and first["memory"] is None
    assert (second["outcome"], second["bytes"]) == (
        "413 body_too_large",
        5 * len(LONG.encode()) + 1,
    )
    assert f"REFUSED, {second['message']}" in capsys.readouterr().out


def test_what_is_lost_is_judged(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _run(library, "--url", "http://127.0.0.1:9", "--count", "1", code=1)
    assert found["books"][0]["outcome"].startswith("no connection")
    assert "short requests failed, no book" in capsys.readouterr().out
    good: dict[str, Any] = {"failed": []}
    bad = {"failed": ["timeout"]}

    def judged(outcome: str, alone: dict[str, Any] = good, beside: dict[str, Any] = good) -> bool:
        return judge(
            {"alone": alone, "books": [{"text": "x", "outcome": outcome, "short": beside}]}
        )

    assert judged("ok") and judged("413 body_too_large") and judged("400 invalid_value")
    assert not judged("500") and not judged("stream cut short") and not judged("timeout")
    assert not judged("ok", alone=bad) and not judged("ok", beside=bad)


@pytest.mark.parametrize("options", [("--most-bytes", "1"), ("--url", "nowhere"), ("--rate", "0")])
def test_what_cannot_be_measured_is_one_line(
    library: Path, url: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert main([str(library), *FEW, "--url", url, *options]) == 2
    assert "not measured: " in capsys.readouterr().out.splitlines()[-1]
