"""Several engines as one: who is asked, and what is put together of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.client.client import EngineClient
from engine.client.request_stream import RequestStream
from engine.client.router import EngineRouter
from engine.engine import Engine
from engine.errors import EngineDead, EngineLoading, EngineUnavailable, StateBusy, StateNotFound
from engine.inline import InlineTransport
from engine.protocol.events import Finished
from engine.protocol.placement import engine_of_state
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import FakeRunner, recite

ASK = {"timeout": 10.0, "owner": "alice"}


@asynccontextmanager
async def together(engines: int = 3, **options: Any) -> AsyncIterator[EngineRouter]:
    clients: list[EngineClient] = []
    outside: dict[bytes, list[int]] = {}  # what one exports any can take in
    for rank in range(engines):
        runner = FakeRunner(engines=engines, rank=rank, **options)
        runner.outside = outside
        clients.append(EngineClient(InlineTransport(Engine(runner))))
        await clients[-1].start()
        await clients[-1].ready(10)
    router = EngineRouter(clients)
    assert (await router.ready(10)).name == "fake"
    try:
        yield router
    finally:
        for client in clients:
            await client.close()


def ask(router: EngineRouter, text: str, **fields: Any) -> RequestStream:
    count = fields.pop("max_tokens", 3)
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    request = Request(
        id=router.new_id(),
        prompt=pack_ids(text.encode()),
        sampling=sampling,
        owner="alice",
        timeout=60.0,
        **fields,
    )
    return router.submit(request)


def rank_of(router: EngineRouter, stream: RequestStream) -> int:
    (rank,) = (rank for rank, one in enumerate(router.clients) if one.has(stream.id))
    return rank


async def end(stream: RequestStream) -> Finished:
    tokens: list[int] = []
    async for update in stream:
        tokens += update.tokens
        if update.finished is not None:
            return update.finished
    raise AssertionError


async def keep(router: EngineRouter, id: str, text: str = "abc") -> None:
    await end(ask(router, text, max_tokens=0, keep=KeepState(id=id), stream=False))


def ids_of(rank: int, engines: int = 3, count: int = 2) -> list[str]:
    """Ids of states that the engine of this rank keeps."""
    found = (f"id-{number}" for number in range(10_000))
    return [id for id in found if engine_of_state("alice", id, engines) == rank][:count]


async def test_requests_are_spread_and_all_are_answered() -> None:
    async with together(slots=8, step_seconds=0.002) as router:
        asked = [ask(router, f"{number} abc", max_tokens=20) for number in range(24)]
        assert len({one.id for one in asked}) == 24
        loads = [client.in_flight for client in router.clients]
        assert max(loads) - min(loads) <= 1
        assert router.in_flight == 24 and router.slots == 24
        finished = await asyncio.gather(*(end(one) for one in asked))
        assert [one.completion_tokens for one in finished] == [20] * 24
        assert router.in_flight == 0


async def test_turns_of_a_conversation_go_where_the_last_one_was_read() -> None:
    async with together(slots=16, share_slots=64) as router:
        ranks, texts = {}, {name: name * 64 for name in "abcdef"}
        for turn in range(6):
            for name in texts:  # one after the other: nobody has anything to do
                asked = ask(router, texts[name], cache_points=(len(texts[name]),))
                assert ranks.setdefault(name, rank_of(router, asked)) == rank_of(router, asked)
                finished = await end(asked)
                assert finished.cached_tokens >= (len(texts[name]) - 40 if turn else 0)
                texts[name] += f" {turn}" * 20


async def test_conversations_begin_where_there_is_the_least_to_do() -> None:
    async with together(slots=16, step_seconds=0.01) as router:
        for count in range(1, 4):
            ends = [rank_of(router, ask(router, "ab" * count, max_tokens=500)) for _ in range(3)]
            assert sorted(ends) == [0, 1, 2]


async def test_who_has_read_much_of_a_prompt_may_have_more_to_do() -> None:
    async with together(slots=32, step_seconds=0.01) as router:
        for length, more in ((128, 0), (512, 1), (100_000, 3)):
            text = chr(length % 91 + 33) * length
            first = rank_of(router, asked := ask(router, text, max_tokens=100_000))
            extra = 0
            while rank_of(router, ask(router, text, max_tokens=100_000)) == first:
                extra += 1
            assert extra == more
            ids = [id for client in router.clients for id in client._streams]
            router.abort(ids)
            async with asyncio.timeout(10):
                while router.in_flight:
                    await asyncio.sleep(0.01)
            assert asked.id in ids


async def test_one_that_is_full_gets_nothing_while_others_have_slots() -> None:
    async with together(2, slots=16, max_waiting=0, step_seconds=0.01) as router:
        beginning = "x" * 64
        first = rank_of(router, ask(router, f"{beginning} 0", max_tokens=500))
        for number in range(1, 32):  # never refused
            asked = ask(router, f"{beginning} {number}", max_tokens=500)
            await asked.next()
            loads = [client.in_flight for client in router.clients]
            assert max(loads) <= 16 and loads[first] <= loads[1 - first] + 2


async def test_requests_of_one_placement_go_to_one_engine() -> None:
    """To the engine that would keep a state of this name, whatever the prompts are."""
    async with together(slots=16, share_slots=64) as router:
        for rank in range(3):
            for name in ids_of(rank):
                for number in range(4):  # one after the other: nobody has anything to do
                    asked = ask(router, f"{number} {name}" * 40, placement=name)
                    assert rank_of(router, asked) == rank
                    await end(asked)


async def test_a_placement_is_not_followed_where_it_would_cost_much() -> None:
    for slots, more in ((4, 1), (8, 1), (32, 4)):
        async with together(slots=slots, step_seconds=0.01) as router:
            (name,) = ids_of(1, count=1)
            ranks = [
                rank_of(router, ask(router, f"{number}", max_tokens=500, placement=name))
                for number in range(3 * slots)
            ]
            assert ranks[:more] == [1] * more and set(ranks) == {0, 1, 2}
            for count in range(1, len(ranks)):
                loads = [ranks[:count].count(rank) for rank in range(3)]
                assert max(loads) <= min(min(loads) + more, slots)


async def test_a_placement_counts_for_more_than_what_was_read_before() -> None:
    async with together(slots=16, share_slots=64) as router:
        first, second = ids_of(0, count=1)[0], ids_of(2, count=1)[0]
        text = "x" * 64
        asked = ask(router, text, placement=first)
        assert rank_of(router, asked) == 0
        await end(asked)
        asked = ask(router, text)
        assert rank_of(router, asked) == 0, "it has read it"
        await end(asked)
        asked = ask(router, text, placement=second)
        assert rank_of(router, asked) == 2
        await end(asked)


async def test_a_placement_at_an_engine_that_is_away_is_no_error() -> None:
    async with together(slots=16) as router:
        without = EngineRouter([router.clients[0], None, router.clients[2]], [0.0, 5.0, 0.0])
        (name,) = ids_of(1, count=1)
        ranks = set()
        for number in range(4):
            stream = ask(without, f"{number}", placement=name)
            ranks |= {rank for rank in (0, 2) if router.clients[rank].has(stream.id)}
            await end(stream)
        assert ranks == {0, 2}, "the others take turns"


async def test_a_state_decides_before_a_placement() -> None:
    async with together(slots=16) as router:
        (name,), (id,) = ids_of(1, count=1), ids_of(2, count=1)
        asked = ask(router, "abc", keep=KeepState(id=id), placement=name)
        assert rank_of(router, asked) == 2
        await end(asked)
        asked = ask(router, "", state=id, placement=name)
        assert rank_of(router, asked) == 2
        assert (await end(asked)).completion_tokens == 3


async def test_prompts_of_other_owners_and_salts_have_nothing_in_common() -> None:
    async with together(slots=64, step_seconds=0.01) as router:
        ranks = {
            rank_of(router, ask(router, "x" * 64, max_tokens=500, cache_salt=f"{number}"))
            for number in range(12)
        }
        assert len(ranks) > 1


async def test_a_state_is_gone_on_from_where_it_is_kept() -> None:
    async with together() as router:
        for rank in range(3):
            for id in ids_of(rank):
                await keep(router, id)
                asked = ask(router, "d", state=id)
                assert rank_of(router, asked) == rank
                (update,) = [update async for update in asked if update.tokens][:1]
                assert update.tokens[:1] == recite(b"abcd", 1)
                assert (await router.ask_state("get", id=id, **ASK)).states[0].tokens == 3
        listed = await router.ask_state("list", id="", limit=100, **ASK)
        ids = sorted(id for rank in range(3) for id in ids_of(rank))
        assert [info.id for info in listed.states] == ids and not listed.more
        first = await router.ask_state("list", id="", limit=4, **ASK)
        assert [info.id for info in first.states] == ids[:4] and first.more
        rest = await router.ask_state("list", id=ids[3], limit=4, **ASK)
        assert [info.id for info in rest.states] == ids[4:] and not rest.more


async def test_new_ids_say_where_they_are_kept() -> None:
    async with together() as router:
        asked = [ask(router, f"{number}", keep=KeepState(), stream=False) for number in range(9)]
        for finished in await asyncio.gather(*(end(one) for one in asked)):
            assert finished.state is not None
            info = (await router.ask_state("get", id=finished.state.id, **ASK)).states[0]
            assert info.tokens == finished.state.tokens
            forked = await router.ask_state("fork", id=info.id, target="", **ASK)
            await router.ask_state("get", id=forked.states[0].id, **ASK)


@pytest.mark.parametrize("action", ["fork", "move"])
async def test_states_go_from_one_engine_to_another(action: Any) -> None:
    async with together() as router:
        source, (target,) = ids_of(0)[0], ids_of(2, count=1)
        await keep(router, source)
        assert router.keeps_apart("alice", source, target)
        assert not router.keeps_apart("alice", source, ids_of(0)[1])
        reply = await router.ask_state(action, id=source, target=target, ttl=50.0, **ASK)
        info = reply.states[0]
        assert (info.id, info.tokens, info.recent) == (target, 3, list(b"abc"))
        assert round(info.expires - info.created) == 50
        asked = ask(router, "d", state=target)
        assert rank_of(router, asked) == 2
        (update,) = [update async for update in asked if update.tokens][:1]
        assert update.tokens[:1] == recite(b"abcd", 1)
        if action == "fork":
            await router.ask_state("get", id=source, **ASK)
        else:
            with pytest.raises(StateNotFound):
                await router.ask_state("get", id=source, **ASK)
        content = (await router.ask_state("export", id=target, **ASK)).content
        for id in ("", source):
            reply = await router.ask_state("import", content=content, target=id, **ASK)
            assert (await router.ask_state("get", id=reply.states[0].id, **ASK)).states


async def test_a_state_whose_place_is_about_to_be_taken_does_not_move() -> None:
    async with together(step_seconds=0.01) as router:
        source, (target,) = ids_of(0)[0], ids_of(1, count=1)
        await keep(router, source)
        turn = ask(router, "d", state=source, keep=KeepState(id=source), max_tokens=100_000)
        await turn.next()
        with pytest.raises(StateBusy):
            await router.ask_state("move", id=source, target=target, **ASK)
        with pytest.raises(StateNotFound):
            await router.ask_state("get", id=target, **ASK)
        router.abort([turn.id], "stop")
        await end(turn)


async def test_requests_are_ended_wherever_they_are() -> None:
    async with together(slots=4, step_seconds=0.005) as router:
        asked = [ask(router, f"{number}", max_tokens=10_000) for number in range(6)]
        kept = ask(router, "abc", max_tokens=10_000, keep=KeepState(id=ids_of(1)[0]))
        for one in (*asked, kept):
            await one.next()
        router.abort([kept.id], "stop", [1])
        finished = await end(kept)
        assert finished.state is not None and finished.state.tokens == 4
        router.abort([one.id for one in asked[:5]])
        assert {(await end(one)).reason for one in asked[:5]} == {"abort"}
        router.give_up(asked[5].id, EngineUnavailable("enough"))
        with pytest.raises(EngineUnavailable, match="enough"):
            await end(asked[5])
        assert router.in_flight == 0


async def test_one_that_has_died_is_not_asked_and_its_states_are_missing() -> None:
    async with together() as router:
        mine, (theirs,) = ids_of(1), ids_of(2, count=1)
        await keep(router, theirs)
        await router.clients[1].close()
        assert router.state == "ready"
        await router.ping(10)
        for number in range(9):
            assert rank_of(router, ask(router, f"{number}", max_tokens=1000)) != 1
        with pytest.raises(EngineLoading, match="is not available right now"):
            ask(router, "d", state=mine[0])
        there = [router.clients[0], None, router.clients[2]]
        left = EngineRouter(there, waits=[0.0, 17.0, 0.0], before=router)
        assert (await left.ready()).name == "fake" and left.slots == 16
        for missing in (
            left.ask_state("get", id=mine[0], **ASK),
            left.ask_state("fork", id=theirs, target=mine[0], **ASK),
            left.ask_state("list", id="", limit=5, **ASK),
        ):
            with pytest.raises(EngineLoading) as raised:
                await missing
            assert raised.value.retry_after == pytest.approx(17, abs=5)
        assert (await left.ask_state("get", id=theirs, **ASK)).states
        for client in left.clients:
            await client.close()
        assert left.state == "dead"
        with pytest.raises(EngineDead):
            await left.ping(10)
        with pytest.raises(EngineDead):
            await left.ready()
        with pytest.raises(EngineDead):
            ask(left, "x")


async def test_with_a_shared_store_the_states_of_one_that_has_died_are_at_the_others(
    tmp_path: Path,
) -> None:
    async with together(state_store=f"file://{tmp_path}") as router:
        (mine,), (theirs,) = ids_of(1, count=1), ids_of(2, count=1)
        await keep(router, mine)
        assert rank_of(router, ask(router, "d", state=mine)) == 1, "as long as it is there"
        assert (await router.ask_state("fork", id=mine, target=theirs, **ASK)).states
        await router.clients[1].close()
        going_on = ask(router, "", state=mine, keep=KeepState(id=mine), stream=False)
        assert bytes((await end(going_on)).tokens) == b"def"
        left = EngineRouter([router.clients[0], None, router.clients[2]], before=router)
        listed = await left.ask_state("list", id="", limit=5, **ASK)
        assert [one.id for one in listed.states] == sorted([mine, theirs])
        assert (await left.ask_state("get", id=mine, **ASK)).states[0].turns == 2
        assert (await left.ask_state("move", id=mine, target=ids_of(0)[0], **ASK)).states
        assert not (await left.ask_state("delete", id=theirs, **ASK)).states


class Hanging(EngineClient):
    """Never answers."""

    async def ready(self, timeout: float | None = None) -> Any:
        await asyncio.sleep(60)

    async def ping(self, timeout: float) -> None:
        await asyncio.sleep(60)
        raise EngineUnavailable("it hangs")


async def test_nobody_waits_for_one_that_hangs() -> None:
    async with together(2) as router:
        hanging = Hanging(InlineTransport(Engine(FakeRunner())))
        beside = EngineRouter([hanging, *router.clients], before=router)
        async with asyncio.timeout(5):
            assert (await beside.ready()).name == "fake"
            await beside.ping(60)
        for number in range(6):
            assert not hanging.has(ask(beside, f"{number}").id)
        with pytest.raises(EngineLoading):
            await beside.ask_state("list", id="", limit=5, **ASK)


async def test_engines_that_free_places_quicker_do_so_together() -> None:
    async with together(slots=1, max_waiting=64, step_seconds=0.005) as router:
        assert router.pace == 0
        asked = [ask(router, f"{number}", max_tokens=4) for number in range(24)]
        assert router.queued.of("alice")[0] == 24 and router.queued.owners == 1
        await asyncio.gather(*(end(one) for one in asked[:12]))
        paces = [client.pace for client in router.clients]
        assert min(paces) > 0
        assert router.pace == pytest.approx(1 / sum(1 / pace for pace in paces))
        await asyncio.gather(*(end(one) for one in asked[12:]))


async def test_one_engine_is_asked_for_everything() -> None:
    async with together(1, slots=4) as router:
        (client,) = router.clients
        await keep(router, "one")
        asked = ask(router, "d" * 200, state="one", max_tokens=1000)
        assert router.client_of(asked.id) is client and router.in_flight == 1
        assert (router.slots, router.state) == (4, "ready")
        assert router.queued.of("alice") == client.queued.of("alice")
        assert router.most_of_one("alice", ["a", "b", "a"]) == 3
        assert not router.keeps_apart("alice", "a", "b")
        moved = await router.ask_state("fork", id="one", target="two", **ASK)
        assert [info.id for info in moved.states] == ["two"]
        listed = await router.ask_state("list", id="", limit=5, **ASK)
        assert [info.id for info in listed.states] == ["one", "two"]
        router.abort([asked.id])
        assert (await end(asked)).reason == "abort"
        await client.close()
        with pytest.raises(EngineDead):  # and not that a state's engine is missing
            ask(router, "d", state="one")
        with pytest.raises(EngineDead):
            await router.ask_state("get", id="one", **ASK)


async def test_the_next_router_gives_ids_that_the_one_before_has_not() -> None:
    async with together(2, slots=8, step_seconds=0.005) as router:
        asked = [ask(router, f"{number}", max_tokens=10_000) for number in range(4)]
        after = EngineRouter(router.clients, before=router)
        asked += [ask(after, f"{number}", max_tokens=10_000) for number in range(4)]
        asked.append(ask(router, "last", max_tokens=10_000))
        assert len({one.id for one in asked}) == 9
        after.abort([one.id for one in asked])
        assert {(await end(one)).reason for one in asked} == {"abort"}
