"""The HTTP load test against the application over a fake model, on a socket."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.terminal.bench import client
from service.terminal.bench.client import Report
from service.terminal.bench.command import main
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("model"))
    with listening(fake_runner(folder)) as (address, _):
        yield address


def _run(tmp_path: Path, url: str, *options: str, code: int = 0) -> Any:
    figures = tmp_path / "run.json"
    assert main(["--url", url, "--json", str(figures), *options]) == code
    return json.loads(figures.read_text())


COMMON = ("--requests", "12", "--rate", "200", "--prompt-length", "8", "--output-length", "5")


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ((), 12 * 5),
        (("--batch", "3"), 12 * 3 * 5),
        (("--no-stream", "--batch", "2"), 12 * 2 * 5),
        (("--endpoint", "completions"), 12 * 5),
        (("--endpoint", "completions", "--no-stream"), 12 * 5),
        (("--endpoint", "score", "--batch", "2"), 12 * 2 * 7),
        (("--ids", "97", "--arrivals", "burst", "--burst", "6"), 12 * 5),
        (("--arrivals", "closed", "--max-concurrency", "3"), 12 * 5),
        (("--arrivals", "constant", "--max-concurrency", "2"), 12 * 5),
    ],
)
def test_every_kind_of_request_is_counted(
    tmp_path: Path, url: str, options: tuple[str, ...], tokens: int
) -> None:
    summary = _run(tmp_path, url, *COMMON, *options, "--slo", "e2e=60s")
    assert summary["outcomes"] == {"ok": 12}
    assert summary["tokens_per_second"] * summary["seconds"] == pytest.approx(tokens)
    assert summary["goodput"]["share"] == 1
    streams = "score" not in options and "--no-stream" not in options
    assert ("ttft" in summary["latency_ms"]) == streams
    assert set(summary["latency_ms"]["e2e"]) == {"mean", "p50", "p90", "p99", "p99.9"}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-stream", "--batch", "2"),
        ("--endpoint", "completions", "--batch", "2"),
        ("--endpoint", "completions", "--no-stream"),
        ("--endpoint", "score"),
        ("--prompt-unit", "book", "--batch", "2"),
        ("--prompt-unit", "paragraph", "--processes", "2"),
    ],
)
def test_prompts_from_books_are_counted_as_the_server_does(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("I\n\n" + "Rain.\n\n" * 40 + "II\n\n" + "Wind.\n\n" * 40)
    asked = ("--requests", "6", "--rate", "200", "--output-length", "3", "--prompts", str(book))
    summary = _run(tmp_path, url, *asked, *options)
    prompts = summary["prompts"]
    assert summary["outcomes"] == {"ok": 6}
    assert prompts["count"] == 6 * (2 if "--batch" in options else 1)
    assert prompts["tokens"] == prompts["bytes"] > 0  # the tokenizer's tokens are bytes
    assert summary["prompt_tokens_per_second"] * summary["seconds"] == pytest.approx(
        prompts["tokens"]
    )
    assert f"{prompts['bytes']:,} bytes, {prompts['tokens']:,} tokens" in capsys.readouterr().out
    assert summary["run"]["prompts"] == str(book) and "prompt_length" not in summary["run"]


def test_old_records_are_not_looked_through_while_a_run_lasts(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old = gc.get_threshold(), gc.get_stats()[2]["collections"]
    seen: list[int] = []

    async def driven(*given: Any) -> Report:
        begun = gc.get_stats()[2]["collections"]
        kept: list[list[int]] = [
            [] for _ in range(1_000_000)
        ]  # what would have the oldest looked at, several times
        seen.append(gc.get_stats()[2]["collections"] - begun)
        del kept
        return await drive(*given)

    drive = client._drive
    monkeypatch.setattr(client, "_drive", driven)
    summary = _run(tmp_path, url, *COMMON)
    assert summary["outcomes"] == {"ok": 12} and seen == [0]
    assert gc.get_threshold() == before and gc.get_stats()[2]["collections"] > old
    assert gc.get_freeze_count() == 0


def test_several_processes_share_the_work(tmp_path: Path, url: str) -> None:
    summary = _run(tmp_path, url, *COMMON, "--processes", "2")
    assert summary["outcomes"] == {"ok": 12}
    assert summary["client"]["processes"] == 2


def test_errors_are_told_by_kind(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = _run(tmp_path, url, *COMMON, "--body", '{"top_p": 2}', code=1)
    assert summary["outcomes"] == {"400 invalid_value": 12}
    assert "top_p" in summary["messages"]["400 invalid_value"]
    assert summary["messages"]["400 invalid_value"] in capsys.readouterr().out
    summary = _run(tmp_path, "http://127.0.0.1:9", *COMMON, code=1)
    assert summary["outcomes"] == {"no connection: Connection refused": 12}


def test_a_run_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    folder = save_byte_tokenizer(tmp_path)
    with listening(fake_runner(folder, step_seconds=0.2)) as (slow, service):
        options = ("--requests", "2", "--timeout", "0.3", "--output-length", "50")
        summary = _run(tmp_path, slow, *options, code=1)
        assert summary["outcomes"] == {"timeout": 2}
        assert service.lifecycle.state == "ready"


def test_the_report_holds_tables_and_plots(tmp_path: Path, url: str) -> None:
    page = tmp_path / "run.html"
    _run(tmp_path, url, *COMMON, "--api-key", "secret-secret-secret", "--html", str(page))
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<svg" in text and "time to first token" in text
    assert "secret" not in text and "<script" not in text


def test_two_runs_are_compared(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path, url, *COMMON)
    figures = tmp_path / "run.json"
    capsys.readouterr()
    assert main(["--compare", str(figures), str(figures)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert len(rows) == 2 and all("1.000" in row for row in rows)
    saved = json.loads(figures.read_text())
    del saved["prompt_tokens_per_second"]  # as in a run of an earlier version
    older = tmp_path / "older.json"
    older.write_text(json.dumps(saved))
    assert main(["--compare", str(older), str(figures)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert len(rows) == 1 and "1.000" in rows[0]


def test_a_sweep_ends_at_a_rate_or_says_that_there_is_none(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*COMMON, "--sweep", "50:100")
    # Whether this machine leaves the client enough time is not what is tested.
    monkeypatch.setattr("service.terminal.bench.summary.LATE_SECONDS", math.inf)
    monkeypatch.setattr("service.terminal.bench.summary.BUSY", math.inf)
    found = _run(tmp_path, url, *options, "--slo", "e2e=60s")
    assert (found["highest_rate"], found["at_least"]) == (100, True)
    assert "at least 100.00 requests/s" in capsys.readouterr().out
    found = _run(tmp_path, url, *options, "--slo", "e2e=1us", code=1)
    assert (found["highest_rate"], found["at_least"]) == (None, False)


def test_a_sweep_takes_no_rate_that_the_client_limited(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("service.terminal.bench.summary.BUSY", -1.0)
    options = (*COMMON, "--sweep", "50:100", "--slo", "e2e=60s")
    found = _run(tmp_path, url, *options, code=1)
    assert found["highest_rate"] is None
    assert [(probe["share"], probe["client_limited"]) for probe in found["probes"]] == [(1, True)]
    assert "the client was the bottleneck" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ("--arrivals", "closed"),
        ("--rate", "0"),
        ("--slo", "e2e"),
        ("--prompt-length", "0"),
        ("--data", "/nonexistent"),
        ("--prompts", "/nonexistent"),
        ("--prompts", __file__, "--prompt-length", "8"),
        ("--prompts", __file__, "--data", __file__),
        ("--prompt-unit", "book"),
        ("--requests", "0"),
        ("--sweep", "1:2"),
        ("--processes", "0"),
        ("--compare", "/nonexistent", "/nonexistent"),
        ("--compare", __file__, __file__),
        ("--compare", __file__, __file__, "--html", "page.html"),
        ("--sweep", "1:2", "--slo", "e2e=1s", "--html", "page.html"),
        ("--url", "nowhere"),
        ("--body", "[1]"),
        ("--body", "{"),
        ("--no-stream", "--slo", "ttft=1us,e2e=1s"),
        ("--no-stream", "--slo", "tpot=1us"),
        ("--endpoint", "score", "--sweep", "5:20", "--slo", "itl=1us"),
        ("--output-length", "1", "--slo", "itl=1us"),
    ],
)
def test_bad_arguments_are_one_line(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(options)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "error" in line


def test_connections_that_the_server_has_closed_are_opened_again(tmp_path: Path) -> None:
    """As servers do with connections that have been idle for some seconds."""
    with listening(fake_runner(save_byte_tokenizer(tmp_path)), keep_alive=0) as (address, _):
        options = ("--requests", "6", "--rate", "20", "--arrivals", "constant")
        assert _run(tmp_path, address, *options)["outcomes"] == {"ok": 6}
