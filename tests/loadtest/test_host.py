"""loadtest.host: the mock device's time, and when the loop ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import process_time

import pytest

from engine.protocol.events import Finished, Stats, StepEvents
from engine.protocol.requests import Request, Shutdown
from engine.protocol.token_ids import pack_ids
from loadtest import slow_host
from loadtest.host import (
    POST,
    Clock,
    EncodingMailbox,
    PostingMailbox,
    main,
    measure,
    posts,
    turning,
)


def test_the_clock_waits_without_waiting_and_forgets() -> None:
    clock = Clock()
    begin = clock()
    clock.skip_to(begin + 1000)
    assert 1000 <= clock() - begin < 1010
    assert 990 < clock.waited <= 1000
    clock.skip_to(begin)  # that is past
    assert clock() >= begin + 1000
    clock.forget_since(begin)
    assert begin <= clock() < begin + 10


@pytest.mark.parametrize("batch", [1, 5])
def test_a_paced_engine_is_no_faster_than_its_device(batch: int) -> None:
    lengths = turning(batch, 5, 40)
    assert len(lengths) == 4 * batch and 5 <= min(lengths) <= max(lengths) <= 40
    rate = measure(batch, lengths, math.inf, 0.001, paced=True)
    assert 0 < rate <= 1.001 * batch / 0.001


def test_the_loop_ends_after_the_tokens_that_are_wanted_or_the_last_answer() -> None:
    for events in (
        [StepEvents(stats=Stats(decode_tokens=3)), StepEvents(stats=Stats(decode_tokens=2))],
        [StepEvents(), StepEvents(finished=[Finished(0, "length", 1, 0, 1)])],
    ):
        mailbox = EncodingMailbox([Request(id=0, prompt=pack_ids([1]))], 5)
        (first,) = mailbox.receive(0)
        assert isinstance(first[1], Request)
        mailbox.send("client", events[0])
        assert list(mailbox.receive(0)) == []
        mailbox.send("client", events[1])
        assert list(mailbox.receive(0)) == [("client", Shutdown())]


def test_a_post_follows_one_whose_prompts_have_all_been_answered() -> None:
    mailbox = PostingMailbox(posts(3), at_once=2)
    came = [message for _, message in mailbox.receive(0)]
    assert [one.id for one in came if isinstance(one, Request)] == list(range(2 * POST))
    answers = [Finished(id, "length", 16, 0, 128) for id in range(3 * POST)]
    mailbox.send("client", StepEvents(finished=answers[1 : POST + 1]))
    assert list(mailbox.receive(0)) == []
    mailbox.send("client", StepEvents(finished=answers[:1], stats=Stats(decode_tokens=9)))
    assert len(list(mailbox.receive(0))) == POST and mailbox.tokens == 9
    mailbox.send("client", StepEvents(finished=answers[POST + 1 :]))
    assert list(mailbox.receive(0)) == [("client", Shutdown())]


def test_a_slow_host_s_own_time_counts_more_and_a_device_s_does_not() -> None:
    clock = Clock(times=3.0)
    begin, spent = clock(), process_time()
    while process_time() < spent + 0.01:
        pass
    assert 0.03 <= clock() - begin < 0.1
    clock.spend(5)
    clock.skip_to(begin + 6)
    assert 6 <= clock() - begin < 6.1 and 0.8 < clock.waited < 0.98


def test_a_host_that_is_slow_uses_less_of_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than decoding alone would bring."""
    monkeypatch.setattr(slow_host, "SLOTS", 128)
    target = tmp_path / "slow.json"
    slow_host.main(["--slower", "1", "100", "--turns", "8", "--json", str(target)])
    quick, slow = json.loads(target.read_text())["slow_host"].values()
    assert 0 < 2 * slow < quick < 1
    assert "host slower by" in capsys.readouterr().out


def test_it_prints_and_saves_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "2", "--step-ms", "0.5", "--tokens", "200", "--seconds", "0.1"]
    target = tmp_path / "host.json"
    main([*options, "--answers", "3", "9", "--repeat", "1", "--share", "--json", str(target)])
    saved = json.loads(target.read_text())
    (figure,), (share,) = saved["host"], saved["share"]
    # Times a request by what is left of others: of so short a run they may be below nothing.
    assert share["free_least"] <= share["free"] and share["paced_least"] <= share["paced"]
    assert all(math.isfinite(share[name]) for name in ("free", "paced"))
    assert figure["device"] == pytest.approx(4000)
    assert 0 < figure["paced"] <= 4004 and 0 < figure["turning"] <= 4004
    assert "mock runner" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*options, "--batch", "2", "3"])
