"""Events rendered ahead are those that are rendered one by one, whatever comes and however."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.request_stream import RequestStream, StreamInbox, Update
from engine.errors import EngineDead
from engine.protocol.events import Finished
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.training.tokenizer import byte_level_tokenizer
from service.http.json_response import DONE, event
from service.inference.event_template import HOLE, Template, TokenParts
from service.inference.generation import GenerationTask, Outcome, TaskRenderer, stream
from service.inference.output_text import OutputText, Piece, grouped
from service.inference.runtime import Runtime
from service.text.stop import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer
from tests.service.harness import fake_runner, running
from tests.tokenizer_types import metaspace_first

TOKENIZER = Tokenizer(byte_level_tokenizer())
PARTS = TokenParts.of(TOKENIZER)
END = 256  # a special token: no text
TEXT = 'ab"\n\\<é€😀\x00'.encode()
# Bytes of whole characters, cut anywhere, and such as are none.
RUNS = st.lists(st.sampled_from([*TEXT, 0xFF, 0xC3, END, 999]), max_size=30)
STOPS = st.lists(st.text("ab<é\n", min_size=1, max_size=3), max_size=3)


class _Inference:
    """Brings updates of one request."""

    def __init__(self, updates: list[Update]) -> None:
        self._updates = list(updates)
        self.stopped = False

    @property
    def is_over(self) -> bool:
        return not self._updates

    def submit(self, *_: Any, **__: Any) -> None:
        """Takes anything."""

    check_tokens = check_kept = submit

    def stop(self, *_: Any) -> None:
        self.stopped = True

    async def next_arrivals(self) -> list[tuple[int, Update]]:
        return [] if self.is_over else [(0, self._updates.pop(0))]


class _Runtime:
    tokenizer = TOKENIZER


def _updates(runs: Sequence[Sequence[int]], end: bool) -> list[Update]:
    updates = [Update(tokens=list(run)) for run in runs if run]
    if end:
        last = Update(tokens=list(runs[-1]) if runs else [])
        last.finished = Finished(0, "length", 1, 0, sum(map(len, runs)))
        updates = [*updates[: len(updates) - bool(runs and runs[-1])], last]
    return updates


def _events(
    runs: list[list[int]], stops: list[str], interval: int, template: Template | None, tapped: bool
) -> bytes:
    """What a stream sends of an answer of one prompt; `tapped`: as while its task waits."""

    def render(_: int, __: OutputText, pieces: list[Piece]) -> bytes:
        return b"".join(
            event(_content(group) | {"finish": group[-1].finish_reason})
            for group in grouped(pieces, interval)
        )

    async def collect() -> bytes:
        stop = StopStrings(stops) if stops else None
        ids = TOKENIZER.encode("x")
        task = GenerationTask(ids, pack_ids(ids), SamplingParams(), stop, 1.0, 0, interval)
        inference: Any = _Inference(_updates(runs, end=True))
        runtime: Any = _Runtime()
        if tapped:
            renderer = TaskRenderer(runtime, inference, 0, task, render, lambda _: template)
            told = b""
            while came := await inference.next_arrivals():
                [(_, update)] = came
                events = None if update.finished else renderer.render_tokens(update.tokens)
                told += renderer.render(update) if events is None else events
            return told + DONE
        chunks = stream(
            runtime, inference, [task], render, lambda *_: b"", lambda _: b"", lambda _: template
        )
        told = b""
        while not chunks.over:
            told += await chunks.next()
        return told

    return asyncio.run(collect())


def _content(group: list[Piece]) -> dict[str, Any]:
    ids = [piece.token for piece in group if piece.token is not None]
    return {"text": "".join([piece.text for piece in group]), "token_ids": ids}


@settings(max_examples=300, deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=5), STOPS, st.sampled_from([1, 1, 2, 5]), st.booleans())
def test_a_template_changes_nothing(
    runs: list[list[int]], stops: list[str], interval: int, tapped: bool
) -> None:
    assert PARTS is not None
    template = Template({"text": HOLE, "finish": None}, PARTS.with_ids)
    expected = _events(runs, stops, interval, None, tapped=False)
    assert _events(runs, stops, interval, template, tapped) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=4), STOPS)
def test_an_outcome_without_pieces_says_the_same(runs: list[list[int]], stops: list[str]) -> None:
    stop = StopStrings(stops) if stops else None
    outcomes = [Outcome(OutputText(TOKENIZER, [97], stop), pieces) for pieces in (True, False)]
    for outcome in outcomes:
        for update in _updates(runs, end=True):
            outcome.take(update)
    whole, lean = outcomes
    assert (whole.text, whole.tokens) == (lean.text, lean.tokens)
    for name in ("finish_reason", "completion_tokens"):
        assert getattr(whole.output, name) == getattr(lean.output, name)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab<é\n", max_size=4), max_size=6), STOPS)
def test_texts_that_are_clear_need_not_be_fed(texts: list[str], stops: list[str]) -> None:
    strings = StopStrings(stops or ["never"])
    fed, spared = StopMatcher(strings), StopMatcher(strings)
    for text in texts:
        expected = fed.feed(text)
        passes = not (spared.holds or spared.stopped) and strings.all_clear([0], {0: text})
        assert (text if passes else spared.feed(text)) == expected
        assert fed.stopped == spared.stopped
    assert fed.flush() == spared.flush()


async def test_an_inbox_tells_each_delivery_once_until_it_is_read() -> None:
    inbox = StreamInbox()
    first, second = (
        RequestStream(Request(id=i, prompt=pack_ids([1])), inbox=inbox, which=i) for i in range(2)
    )
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    second.add_tokens([1])
    second.add_tokens([2])
    first.fail(EngineDead("dead"))
    assert await waiting == [second, first]
    assert second.take().tokens == [1, 2] and second.take() == Update()
    assert first.error is not None
    second.add_tokens([3])
    assert await inbox.next() == [second]


def test_what_is_known_of_tokens_holds_for_their_texts_alone() -> None:
    """Models with other tokenizers may have requests with the same stop strings."""
    strings = StopStrings(["stop"])
    one: dict[int, str | None] = {7: "a"}
    other: dict[int, str | None] = {7: "s", 8: None}
    assert strings.all_clear([7], one) and strings.known_clear(one) == {7}
    known = strings.known_clear(one)
    assert not strings.all_clear([7], other) and not strings.all_clear([8], other)
    assert strings.known_clear(other) == set() and known == {7}


async def test_an_inbox_whose_reader_was_cancelled_keeps_its_news() -> None:
    inbox = StreamInbox()
    delivery = RequestStream(Request(id=0, prompt=pack_ids([1])), inbox=inbox)
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    waiting.cancel()
    delivery.add_tokens([1])
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inbox.next() == [delivery]


async def test_streams_of_a_model_share_what_is_rendered(byte_folder: Path) -> None:
    """Those of one application; another one has its own."""
    body = {"prompts": ["abc"], "max_tokens": 4, "temperature": 0}
    async with running(fake_runner(byte_folder)) as one, running(fake_runner(byte_folder)) as two:
        parts, others = one.lifecycle.runtime.parts, two.lifecycle.runtime.parts
        assert parts is not None and others is not None
        told = [await one.stream("/v1/generate", body) for _ in range(2)]
        texts = ["".join(event["text"] for event in events) for events in told]
        assert texts[0] == texts[1] == "defg"
        known = dict(parts.with_ids)
        assert known and not parts.texts  # nobody asked for events without ids
        assert known == {id: b'"%c","token_ids":[%d]' % (id, id) for id in known}
        assert not others.with_ids and not others.texts


async def test_parts_stay_with_a_model_whose_engines_change(byte_folder: Path) -> None:
    """Engines come and go; the tokenizer is the same."""
    async with running(fake_runner(byte_folder)) as service:
        runtime = service.lifecycle.runtime
        settings = service.lifecycle.settings
        metrics = service.lifecycle.metrics
        again = await Runtime.load(runtime.backend, settings, metrics, runtime)
        afresh = await Runtime.load(runtime.backend, settings, metrics)
        assert again.parts is runtime.parts is not None
        assert afresh.parts is not runtime.parts


def test_tokens_whose_texts_depend_on_others_have_no_parts() -> None:
    assert TokenParts.of(None) is None
    assert TokenParts.of(Tokenizer(metaspace_first())) is None
