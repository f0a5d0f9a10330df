"""Starts: what a model's folder offers to begin from, and what it may not say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.text.starts import MOST_BYTES, MOST_STARTS, Start, load_starts
from service.text.tokenizer import Tokenizer
from tests.service.harness import fake_runner, running, save_byte_tokenizer

EMMA = {"name": "jane-austen", "title": "Jane Austen", "text": "Title: Emma\n\n"}
ALICE = {"name": "carroll", "title": "Lewis Carroll", "text": "Title: Alice\u2019s\n\n"}


def load(folder: Path, content: Any) -> tuple[Start, ...]:
    """Of a folder with a tokenizer; content that is not bytes is written as JSON."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "starts.json").write_bytes(raw)
    return load_starts(folder, Tokenizer.load(save_byte_tokenizer(folder), 257))


def test_starts_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, [EMMA, ALICE]) == (Start(**EMMA), Start(**ALICE))
    assert load(tmp_path, []) == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[", "truncated"),
        (b"\xff[]", "malformed"),
        ({"starts": [EMMA]}, "Expected `array`"),
        ([EMMA, {"name": "x", "title": "X"}], "missing required field `text`"),
        ([{**EMMA, "author": "Jane Austen"}], "unknown field `author`"),
        ([{**EMMA, "text": ""}], "length >= 1"),
        ([{**EMMA, "text": "x" * 4097}], "length <= 4096"),
        ([{**EMMA, "text": 7}], "Expected `str`"),
        ([{**EMMA, "name": "jane austen"}], r"\$\[0\].name"),
        ([{**EMMA, "name": "x\n"}], r"\$\[0\].name"),
        ([{**EMMA, "name": "x" * 65}], r"\$\[0\].name"),
        ([{**EMMA, "title": "Jane\nAusten"}], r"\$\[0\].title"),
        ([{**EMMA, "title": ""}], r"\$\[0\].title"),
        ([EMMA, {**ALICE, "name": "jane-austen"}], "two starts have the name 'jane-austen'"),
        ([{**EMMA, "name": f"n{i}"} for i in range(MOST_STARTS + 1)], f"<= {MOST_STARTS}"),
        (b"[" + b" " * MOST_BYTES + b"]", "more than 65,536 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: Any, reason: str
) -> None:
    assert load(tmp_path, content) == ()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path / "starts.json") in record.getMessage()
    assert re.search(reason, record.getMessage()), record.getMessage()


def test_a_file_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(save_byte_tokenizer(tmp_path), 257)
    assert load_starts(tmp_path, tokenizer) == () and not caplog.records
    (tmp_path / "starts.json").mkdir()
    assert load_starts(tmp_path, tokenizer) == ()
    assert "it is not a file" in caplog.text


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "starts.json").write_text(json.dumps([EMMA]))
    assert load_starts(tmp_path, None) == ()


async def test_clients_are_told_of_them(tmp_path: Path) -> None:
    (tmp_path / "starts.json").write_text(json.dumps([EMMA, ALICE]))
    async with running(fake_runner(save_byte_tokenizer(tmp_path)), max_states=0) as service:
        listed = (await service.http.get("/v1/models")).json()["data"][0]
        one = (await service.http.get("/v1/models/fake")).json()
    assert listed == one
    assert one["starts"] == [EMMA, ALICE] and one["max_states"] == 0


async def test_a_malformed_file_keeps_no_model_from_serving(tmp_path: Path) -> None:
    (tmp_path / "starts.json").write_text('{"Jane Austen": "Title: Emma"}')
    async with running(fake_runner(save_byte_tokenizer(tmp_path))) as service:
        assert (await service.http.get("/v1/models")).json()["data"][0]["starts"] == []
        await service.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
