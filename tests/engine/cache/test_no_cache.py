"""Requests that have nothing to do with the prefix cache: what they are told, what they leave."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.client.client import EngineClient
from engine.client.router import EngineRouter
from engine.engine import Engine
from engine.inline import InlineTransport
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import FakeRunner, recite

LONG = bytes(97 + i % 23 for i in range(400))


class Asked:
    """An engine, what was asked of it and how it ended."""

    def __init__(self, **options: Any) -> None:
        self.runner = FakeRunner(**{"slots": 3, "share_slots": 24, "eos": None, **options})
        self.engine = Engine(self.runner)
        self.requests: dict[int, Request] = {}
        self.ends: dict[int, Finished | Failed] = {}
        self.hits = self.queried = 0
        self.misses: dict[str, int] = {}

    def submit(self, prompt: bytes, count: int = 3, *, choice: int = 0, **fields: Any) -> int:
        id = len(self.requests)
        self.requests[id] = Request(
            id=id,
            prompt=pack_ids(prompt),
            sampling=SamplingParams(max_tokens=count, temperature=0, choice=choice),
            stream=False,
            **fields,
        )
        self.engine.add("c", self.requests[id])
        return id

    def step(self) -> None:
        for events in self.engine.step().values():
            self.hits += events.stats.prefix_hits
            self.queried += events.stats.prefix_queries_tokens
            for reason, count in events.stats.prefix_misses.items():
                self.misses[reason] = self.misses.get(reason, 0) + count
            for end in (*events.finished, *events.failed):
                self.ends[end.request] = end

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def ask(self, prompt: bytes, count: int = 3, **fields: Any) -> Finished:
        id = self.submit(prompt, count, **fields)
        self.finish()
        end = self.ends[id]
        assert isinstance(end, Finished), end
        return end

    @property
    def kept_texts(self) -> int:
        """How many texts the prefix cache has any trace of."""
        trees = self.engine._cache.cache._trees.values()
        return sum(not tree.empty for tree in trees)

    @property
    def rows(self) -> int:
        """How many states are anywhere, named or cached."""
        tiers = self.engine._cache.tiers
        return tiers.device_used + tiers.host_used


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_left_and_nothing_is_found(deterministic: bool) -> None:
    asked = Asked(deterministic=deterministic)
    for _ in range(2):  # the second time it would be known
        end = asked.ask(LONG, no_cache=True)
        assert (end.cached_tokens, end.tokens) == (0, recite(LONG, 3))
        assert (asked.kept_texts, asked.rows) == (0, 0)
    assert (asked.hits, asked.queried, asked.misses) == (0, 0, {})
    assert asked.ask(LONG).cached_tokens == 0, "it was not left by those before"
    assert asked.ask(LONG).cached_tokens == len(LONG)
    before = asked.kept_texts, asked.rows
    other = LONG + b"another end"
    for prompt in (LONG, other, LONG[:200]):  # all of it, or its beginning, is there
        end = asked.ask(prompt, no_cache=True)
        assert (end.cached_tokens, end.tokens) == (0, recite(prompt, 3))
    assert (asked.kept_texts, asked.rows) == before
    assert asked.hits == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_cache_points_and_samples_leave_nothing_either(deterministic: bool) -> None:
    asked = Asked(deterministic=deterministic)
    for choice in range(5):  # more than there are slots
        asked.submit(LONG, choice=choice, cache_points=(128, 256, len(LONG)), no_cache=True)
    asked.submit(LONG, score=True, no_cache=True)
    asked.finish()
    for end in asked.ends.values():
        assert isinstance(end, Finished)
        assert (end.cached_tokens, end.tokens) == (0, recite(LONG, 3))
    assert (asked.kept_texts, asked.rows) == (0, 0)


@pytest.mark.parametrize("no_cache", [False, True])
def test_a_slot_is_handed_over_without_a_copy(no_cache: bool) -> None:
    asked = Asked(most_steps=8, overlaps=True)
    for number in range(40):
        asked.submit(b"%d abc" % number, 16, no_cache=no_cache)
    most = 0
    while asked.engine.has_work:
        asked.step()
        most = max(most, asked.rows)
    assert (most > 0) == (not no_cache)


def test_no_one_waits_for_what_it_reads() -> None:
    """It is no reader of a shared prefix, so a request that could wait for it reads by itself."""
    asked = Asked(max_step_tokens=128)
    first = asked.submit(LONG, no_cache=True)
    second, third = asked.submit(LONG), asked.submit(LONG + b"x")
    asked.finish()
    told = [asked.ends[id] for id in (first, second, third)]
    assert all(isinstance(end, Finished) for end in told)
    cached = [end.cached_tokens for end in told if isinstance(end, Finished)]
    assert cached == [0, 0, len(LONG)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_named_states_are_kept_all_the_same(deterministic: bool) -> None:
    asked = Asked(deterministic=deterministic)
    end = asked.ask(LONG, keep=KeepState(id="talk"), no_cache=True)
    assert end.state is not None and end.state.tokens == len(LONG) + 3
    assert (asked.kept_texts, asked.rows) == (0, 1)
    text = LONG + bytes(recite(LONG, 3)) + b"more"
    keep = KeepState(id="talk")
    end = asked.ask(b"more", state="talk", keep=keep, no_cache=True, cache_points=(2,))
    assert (end.cached_tokens, end.tokens) == (0, recite(text, 3))
    assert end.state is not None and end.state.tokens == len(text) + 3
    assert (asked.kept_texts, asked.rows) == (0, 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_else_is_asked(seed: int, overlaps: bool, deterministic: bool) -> None:
    """Among other requests in any order, their slots handed over, aborted, with rows short or not:
    the runner checks the rows, and afterwards the cache knows the others' texts alone."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"most_steps": chance.choice([1, 8]), "overlaps": overlaps}
    options |= {"share_slots": chance.choice([2, 24]), "host_rows": chance.choice([0, 30])}
    asked = Asked(deterministic=deterministic, **options)
    for _ in range(60):
        no_cache = chance.random() < 0.6
        own = b"A" if no_cache else b"B"  # so that a trace tells who has left it
        prompt = own + LONG[: chance.choice([5, 130, 300, 399])]
        id = asked.submit(
            prompt,
            chance.choice([0, 1, 3, 20]),
            choice=chance.randrange(2),
            cache_points=chance.choice([(), (1,), (3, len(prompt))]),
            no_cache=no_cache,
        )
        if chance.random() < 0.1:
            asked.engine.abort("c", [chance.randint(0, id)], chance.choice(["stop", "abort"]))
        for _ in range(chance.randrange(3)):
            asked.step()
        tree = asked.engine._cache.cache._trees.get(("", "", None))
        if tree is not None:
            path, same = tree.walk(pack_ids(b"A" + LONG))
            assert (list(path), same) == ([], 0), "a trace of a text that was not to be cached"
    asked.finish()
    for id, end in asked.ends.items():
        assert isinstance(end, Finished), end
        request = asked.requests[id]
        if request.no_cache:
            assert end.cached_tokens == 0
        answer = recite([*(request.prompt[::4])], request.sampling.max_tokens)
        assert end.tokens == answer[: len(end.tokens)]
    assert set(asked.ends) == set(asked.requests)


async def test_the_router_does_not_follow_or_remember_them() -> None:
    clients = [EngineClient(InlineTransport(Engine(FakeRunner(slots=16)))) for _ in range(3)]
    for client in clients:
        await client.start()
        await client.ready(10)
    router = EngineRouter(clients)

    def rank(**fields: Any) -> int:
        sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        request = Request(
            id=router.new_id(), prompt=pack_ids(LONG), sampling=sampling, timeout=60.0, **fields
        )
        stream = router.submit(request)
        (found,) = (rank for rank, one in enumerate(clients) if one.has(stream.id))
        router.abort([stream.id])
        return found

    async def settle() -> None:
        while router.in_flight:
            await router.ping(10)

    try:
        seen = []
        for fields in ({"no_cache": True}, {"no_cache": True}, {}, {"no_cache": True}, {}):
            seen.append(rank(**fields))
            await settle()
        assert len(set(seen[:3])) == 3, "they take turns, and nobody has read it before"
        assert seen[4] == seen[2] != seen[3]
    finally:
        for client in clients:
            await client.close()
