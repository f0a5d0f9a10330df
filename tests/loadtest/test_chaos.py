"""The chaos run: its judge, and one scenario end to end on the bundled model."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.chaos.command import Finding, run
from loadtest.chaos.judge import Ending
from loadtest.chaos.scenarios import SCENARIOS

DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"index":0,"token_ids":[1],"finish_reason":null}\n\n'
LAST = b'data: {"index":0,"token_ids":[2],"finish_reason":"length"}\n\n'
ERROR = b'data: {"error":{"message":"x"}}\n\n'


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (TOKEN + LAST + DONE, "answered"),
        (TOKEN + ERROR, "failed"),
        (ERROR, "failed"),
        (TOKEN + LAST, "BROKEN"),  # no end
        (TOKEN + DONE, "BROKEN"),  # a prompt without an end
        (TOKEN + LAST + LAST + DONE, "BROKEN"),  # two ends
        (TOKEN + ERROR + DONE, "BROKEN"),
        (ERROR + ERROR, "BROKEN"),
        (TOKEN + ERROR + TOKEN, "BROKEN"),
        (TOKEN + LAST + DONE[:-1], "BROKEN"),
        (b"", "BROKEN"),
        (b"data: nonsense\n\n", "BROKEN"),
    ],
)
def test_streams_are_judged_by_their_end(body: bytes, verdict: str) -> None:
    ending = Ending(stream=True)
    for byte in body:
        ending.take(bytes([byte]))
    assert ending.judge(200) == verdict


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, b'{"results":[{},{}]}', "answered"),
        (200, b'{"results":[{}]}', "BROKEN"),
        (200, b"{", "BROKEN"),
        (503, b'{"error":{"message":"x"}}', "refused"),
        (500, b"Internal Server Error", "BROKEN"),
    ],
)
def test_plain_answers_are_judged_by_their_body(status: int, body: bytes, verdict: str) -> None:
    ending = Ending(stream=False, prompts=2)
    ending.take(body)
    assert ending.judge(status) == verdict


def _finding(server: str, idle: float | None, **verdicts: int) -> Finding:
    return Finding("x", verdicts, 0.0, idle, 0.0, server)  # type: ignore[arg-type]


def test_a_finding_is_good_where_all_ended_and_the_server_is_back_or_gone() -> None:
    assert _finding("ready", 0.1, answered=3, failed=1).good
    assert _finding("ready after 3.0 s", 0.1, refused=1).good
    assert _finding("exit code 1", None, failed=1).good
    assert not _finding("exit code 0", None, answered=1).good
    assert not _finding("not ready", None, answered=1).good
    assert not _finding("ready", None, answered=1).good  # something is still held
    assert not _finding("ready", 0.1, HUNG=1).good
    assert not _finding("exit code 1", None, BROKEN=1).good


@pytest.mark.slow
def test_an_engine_that_fails_a_round_spoils_nothing_else() -> None:
    found = asyncio.run(run(SCENARIOS["step"], users=4))
    assert found.good, found
    spoilt = found.verdicts.get("failed", 0) + found.verdicts.get("refused", 0)
    assert found.verdicts.get("answered", 0) and spoilt
