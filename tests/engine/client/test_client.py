"""EngineClient over an in-line engine, and over a transport that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import pytest
import zmq

from engine.client.client import TURN_MESSAGES, EngineClient
from engine.client.request_stream import RequestStream, Update
from engine.client.socket_transport import SocketTransport
from engine.engine import Engine
from engine.errors import (
    CheckpointError,
    DeviceLost,
    EngineDead,
    EngineError,
    EngineLoading,
    EngineUnavailable,
    InvalidRequest,
    StepFailed,
)
from engine.inline import InlineTransport
from engine.protocol.events import (
    Finished,
    FromEngine,
    LoadFailed,
    Pong,
    Ready,
    Run,
    Scores,
    Stats,
    StepEvents,
)
from engine.protocol.failed import Failed
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Ping, Request, ToEngine
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import FakeRunner, log_probabilities, recite
from tests.reports import packed

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


IDS: WeakKeyDictionary[EngineClient, Iterator[int]] = WeakKeyDictionary()


def ask(client: EngineClient, prompt: bytes = b"abc", **fields: object) -> Request:
    fields.setdefault("sampling", GREEDY)
    number = next(IDS.setdefault(client, itertools.count()))
    return Request(id=number, prompt=pack_ids(prompt), **fields)  # type: ignore[arg-type]


async def read_all(stream: RequestStream) -> Update:
    """Every update of a request in one."""
    whole = Update()
    async for update in stream:
        whole.tokens += update.tokens
        whole.logprobs += update.logprobs
        if update.finished is not None:
            whole.logprobs += update.finished.logprobs
        whole.scores += update.scores
        whole.finished = update.finished
    return whole


@contextlib.asynccontextmanager
async def serving(runner: FakeRunner | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(InlineTransport(Engine(runner or FakeRunner())))
    await client.start()
    try:
        await client.ready(10)
        yield client
    finally:
        await client.close()


class ScriptedTransport:
    """Says what it is told to say; None ends the engine."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self.sent: list[ToEngine] = []
        self.closed = False

    async def start(self) -> None:
        pass

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        message = await self.said.get()
        if message is None:
            raise EngineDead("it was killed")
        return message

    async def close(self) -> None:
        self.closed = True
        self.said.put_nowait(None)

    async def say(self, *messages: FromEngine | None) -> None:
        """Returns when the client has taken it all in."""
        for message in messages:
            self.said.put_nowait(message)
        for _ in range(3 * len(messages) + 3):
            await asyncio.sleep(0)


READY = Ready(FakeRunner().info)


@contextlib.asynccontextmanager
async def scripted(*first: FromEngine) -> AsyncIterator[tuple[EngineClient, ScriptedTransport]]:
    transport = ScriptedTransport()
    client = EngineClient(transport)
    await client.start()
    await transport.say(*first)
    try:
        yield client, transport
    finally:
        await client.close()


def finished(request: int, *tokens: int) -> Finished:
    return Finished(request, "length", 1, 0, len(tokens), answer=pack_ids(tokens))


# Against an in-line engine.


async def test_many_requests_each_get_their_own_answer() -> None:
    async with serving() as client:
        prompts = [bytes([start]) * 3 for start in range(20)]
        streams = [
            client.submit(ask(client, prompt, stream=start % 2 == 0))
            for start, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*map(read_all, streams))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == recite(prompt, 8)
            assert answer.finished is not None and answer.finished.reason == "length"
        assert client.info is not None and client.info.vocab_size == 257
        assert client.stats.slots_total == 8


async def test_logprobs_run_beside_tokens_streamed_or_not() -> None:
    async with serving() as client:
        asking = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
        plain = client.submit(ask(client))
        for stream in (True, False):
            answer = await read_all(client.submit(ask(client, sampling=asking, stream=stream)))
            assert [one.top_ids for one in answer.logprobs if one] == [[100], [101], [102]]
        assert (await read_all(plain)).logprobs == []


async def test_scores_of_a_prompt() -> None:
    async with serving() as client:
        request = ask(client, b"ab" * 300, sampling=SamplingParams(max_tokens=0), score=True)
        answer = await read_all(client.submit(request))
        row, back = log_probabilities(ord("a")), log_probabilities(ord("b"))
        expected = [row[ord("b")], back[ord("a")]] * 300
        assert [one.logprob for one in answer.scores] == expected[:599]
        assert answer.tokens == []


async def test_refusals_come_from_the_stream() -> None:
    async with serving() as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.submit(ask(client, b"")).next()
        assert caught.value.param == "prompt"


async def test_a_failed_step_is_raised_and_the_next_request_is_served() -> None:
    runner = FakeRunner(failures=[RuntimeError("boom")])
    async with serving(runner) as client:
        with pytest.raises(StepFailed, match="boom"):
            await client.submit(ask(client)).next()
        assert (await read_all(client.submit(ask(client)))).tokens == recite(b"abc", 8)
        assert client.state == "ready"


async def test_abort_ends_with_its_reason() -> None:
    async with serving(FakeRunner(step_seconds=0.001)) as client:
        endless = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
        stream = client.submit(ask(client, sampling=endless))
        await stream.next()
        client.abort([stream.id, 12345], "stop")
        end = (await read_all(stream)).finished
        assert end is not None and end.reason == "stop"
        client.abort([stream.id])  # ended already: nothing happens
        await client.ping(10)


async def test_close_leaves_nobody_waiting() -> None:
    async with serving(FakeRunner(step_seconds=0.001)) as client:
        endless = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
        reading = asyncio.create_task(read_all(client.submit(ask(client, sampling=endless))))
        await asyncio.sleep(0)
        await client.close()
        end = (await reading).finished
        assert end is not None and end.reason == "abort"
        with pytest.raises(EngineDead):
            client.submit(ask(client))


async def test_an_engine_that_breaks_fails_everybody() -> None:
    runner = FakeRunner(slots=1, failures=[DeviceLost("CUDA error: gone")])
    async with serving(runner) as client:
        streams = [client.submit(ask(client)) for _ in range(2)]
        for stream in streams:
            with pytest.raises(EngineUnavailable, match="gone"):
                await stream.next()
        await asyncio.wait_for(client.wait_dead(), 10)
        assert client.state == "dead"


# Against a script.


async def test_updates_merge_until_they_are_read() -> None:
    async with scripted(READY) as (client, transport):
        stream = client.submit(ask(client))
        await transport.say(
            StepEvents(requests=[0], tokens=[7]),
            StepEvents(requests=[0], tokens=[8]),
            StepEvents(scores=[Scores(0, 1, packed([TokenLogprobs(-1.0)], top=0))]),
        )
        update = await stream.next()
        assert (update.tokens, len(update.scores), update.finished) == ([7, 8], 1, None)
        await transport.say(StepEvents(requests=[0], tokens=[9], finished=[finished(0)]))
        assert [update.tokens async for update in stream] == [[9]]
        with pytest.raises(RuntimeError, match="has ended"):
            await stream.next()


async def test_several_tokens_of_several_requests_come_in_runs() -> None:
    async with scripted(READY) as (client, transport):
        streams = [client.submit(ask(client)) for _ in range(3)]
        await transport.say(
            StepEvents(requests=[0], tokens=[5]),
            StepEvents(
                requests=[1],
                tokens=[6],
                runs=[
                    Run([0, 1, 99], 2, pack_ids([7, 8, 9, 10, 1, 1])),
                    Run([1], 1, pack_ids([11])),
                ],
                finished=[finished(1)],
            ),
        )
        assert (await streams[0].next()).tokens == [5, 7, 8]
        update = await streams[1].next()
        assert update.tokens == [6, 9, 10, 11] and update.finished is not None
        assert update.logprobs == []


async def test_log_probabilities_of_several_requests_come_in_runs() -> None:
    async with scripted(READY) as (client, transport):
        streams = [client.submit(ask(client)) for _ in range(3)]
        told = [
            TokenLogprobs(-float(i), [i, 9 - i], [-0.5, -0.25 * i], is_greedy=i % 3 == 0)
            for i in range(4)
        ]
        runs = [
            Run([0, 1], 2, pack_ids([7, 8, 9, 10]), packed(told, top=2)),
            Run([2], 2, pack_ids([5, 6])),
            Run([1], 1, pack_ids([11]), packed(told[:1], top=2)),
        ]
        await transport.say(StepEvents(runs=runs))
        update = await streams[0].next()
        assert (update.tokens, update.logprobs) == ([7, 8], told[:2])
        update = await streams[1].next()
        assert (update.tokens, update.logprobs) == ([9, 10, 11], [*told[2:], told[0]])
        update = await streams[2].next()
        assert (update.tokens, update.logprobs) == ([5, 6], [])


async def test_what_is_in_flight_counts_other_processes_too() -> None:
    async with scripted(READY) as (client, transport):
        client.submit(ask(client))
        client.submit(ask(client))
        assert client.in_flight == 2
        # Three run and four wait, two of them ours.
        await transport.say(StepEvents(requests=[0], tokens=[7], stats=Stats(running=3, waiting=4)))
        assert client.in_flight == 7
        await transport.say(StepEvents(finished=[finished(0)], stats=Stats(running=3, waiting=3)))
        assert client.in_flight == 6
        client.submit(ask(client))
        assert client.in_flight == 7


async def test_what_came_before_a_failure_is_read_first() -> None:
    async with scripted(READY) as (client, transport):
        stream = client.submit(ask(client))
        await transport.say(
            StepEvents(requests=[0], tokens=[7]),
            StepEvents(failed=[Failed(0, "step_failed", "boom")]),
        )
        assert (await stream.next()).tokens == [7]
        for _ in range(2):
            with pytest.raises(StepFailed, match="boom"):
                await stream.next()


async def test_an_update_for_a_cancelled_reader_harms_nobody() -> None:
    async with scripted(READY) as (client, transport):
        cancelled, other = client.submit(ask(client)), client.submit(ask(client))
        reading = asyncio.create_task(cancelled.next())
        await asyncio.sleep(0)
        # Both in one turn of the loop: the waiter is cancelled before its task has noticed.
        transport.said.put_nowait(StepEvents(requests=[0, 1], tokens=[7, 8]))
        reading.cancel()
        assert (await other.next()).tokens == [8]
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await cancelled.next()).tokens == [7]
        assert client.state == "ready"


async def test_a_raising_listener_does_not_cut_the_link() -> None:
    async with scripted(READY) as (client, transport):
        seen = []

        def listener(events: StepEvents) -> None:
            seen.append(events)
            raise ValueError("a bug in the metrics")

        client.on_step(listener)
        stream = client.submit(ask(client))
        await transport.say(
            StepEvents(requests=[0], tokens=[7]), StepEvents(finished=[finished(0, 8)])
        )
        assert (await read_all(stream)).tokens == [7, 8]
        assert len(seen) == 2


async def test_a_flood_of_messages_leaves_turns_to_others() -> None:
    """A transport that always has a message gives it without a pause."""

    class Flood(ScriptedTransport):
        given = 0

        async def receive(self) -> FromEngine:
            if self.given == 10_000:
                return await super().receive()
            self.given += 1
            return READY if self.given == 1 else StepEvents(requests=[0], tokens=[7])

    transport = Flood()
    client = EngineClient(transport)
    await client.start()
    turns = []
    while transport.given < 10_000:
        before = transport.given
        await asyncio.sleep(0)
        turns.append(transport.given - before)
    assert max(turns) <= TURN_MESSAGES
    await client.close()


async def test_events_of_unknown_requests_are_ignored() -> None:
    async with scripted(READY) as (client, transport):
        stream = client.submit(ask(client))
        await transport.say(
            StepEvents(requests=[5], tokens=[1], finished=[finished(6)]),
            Pong(99),
            StepEvents(failed=[Failed(7, "no such code", "?")]),
            StepEvents(finished=[finished(0, 3)]),
        )
        assert (await read_all(stream)).tokens == [3]


async def test_two_readers_of_one_delivery_are_a_mistake() -> None:
    async with scripted(READY) as (client, _):
        stream = client.submit(ask(client))
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await stream.next()
        reading.cancel()


async def test_ids_are_not_used_twice() -> None:
    async with scripted(READY) as (client, _):
        request = ask(client)
        client.submit(request)
        with pytest.raises(ValueError, match="in flight"):
            client.submit(request)


async def test_nothing_is_taken_before_the_model_is_loaded() -> None:
    async with scripted() as (client, transport):
        with pytest.raises(EngineLoading):
            client.submit(ask(client))
        with pytest.raises(EngineLoading):
            await client.ready(timeout=0.01)
        assert client.state == "loading" and client.info is None
        await transport.say(READY)
        assert (await client.ready()) == READY.info and client.state == "ready"


@pytest.mark.parametrize(
    ("code", "error"),
    [("checkpoint_error", CheckpointError), ("engine_error", EngineError), ("?", EngineError)],
)
async def test_a_failed_load_says_why(code: str, error: type[EngineError]) -> None:
    async with scripted(LoadFailed(code, "no weights"), None) as (client, _):  # type: ignore[arg-type]
        with pytest.raises(error, match="no weights"):
            await client.ready()
        with pytest.raises(EngineDead, match="no weights"):
            client.submit(ask(client))
        assert client.state == "dead"


async def test_death_fails_everything_at_once() -> None:
    async with scripted(READY) as (client, transport):
        streams = [client.submit(ask(client)) for _ in range(3)]
        reading = asyncio.create_task(streams[0].next())
        pinging = asyncio.create_task(client.ping(30))
        await transport.say(StepEvents(requests=[1], tokens=[7]), None)
        for waiting in (reading, pinging):
            with pytest.raises(EngineDead, match="killed"):
                await waiting
        assert (await streams[1].next()).tokens == [7]
        for stream in streams[1:]:
            with pytest.raises(EngineDead, match="killed"):
                await stream.next()
        await asyncio.wait_for(client.wait_dead(), 1)
        for call in (client.ready(), client.ping(1)):
            with pytest.raises(EngineDead):
                await call
        client.abort([0])


async def test_a_silent_engine_fails_the_ping() -> None:
    async with scripted(READY) as (client, transport):
        with pytest.raises(EngineUnavailable, match="has not answered"):
            await client.ping(0.01)
        ping = transport.sent[-1]
        await transport.say(Pong(ping.nonce))  # type: ignore[union-attr]
        assert client.state == "ready", "an answer that comes too late is no error"


async def test_close_twice_and_without_start() -> None:
    client = EngineClient(InlineTransport(Engine(FakeRunner())))
    await client.close()
    await client.close()
    assert client.state == "dead"


async def test_the_client_knows_which_of_its_requests_wait() -> None:
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    async with serving(FakeRunner(slots=1, step_seconds=0.002)) as client:
        for owner, prompt in (("a", b"abc"), ("a", b"abcd"), ("b", b"abcde")):
            client.submit(ask(client, prompt, owner=owner, sampling=sampling))
        assert client.queued.of("a") == (2, 7) and client.queued.of("b") == (1, 5)
        assert client.waiting_tokens == 12 and client.queued.owners == 2
        while client.queued.of("a") == (2, 7):
            await asyncio.sleep(0.001)
        assert client.queued.of("a") == (1, 4) and client.waiting_tokens == 9
        client.abort([1])
        while client.queued.of("a") != (0, 0):
            await asyncio.sleep(0.001)
        assert client.queued.of("b") == (1, 5)
    assert client.queued.of("b") == (0, 0) and client.queued.tokens == 0


async def connected(
    tmp_path: Path,
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes], SocketTransport]:
    """A context, an engine's socket in it, and a transport that has sent its greeting there."""
    context = zmq.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(f"ipc://{tmp_path}/socket")
    transport = SocketTransport(f"ipc://{tmp_path}/socket")
    await transport.start()
    return context, engine, transport


async def test_what_is_sent_in_one_turn_leaves_together(tmp_path: Path) -> None:
    context, engine, transport = await connected(tmp_path)
    transport.send(Ping(1))
    await asyncio.sleep(0)  # the greeting leaves with it
    for nonce in (2, 3):
        transport.send(Ping(nonce))
    await asyncio.sleep(0)
    lists = []
    for _ in range(2):
        _, *frames = await asyncio.to_thread(engine.recv_multipart)
        lists += [msgspec.msgpack.decode(frame, type=list[ToEngine]) for frame in frames]
    assert lists == [[Ping(0), Ping(1)], [Ping(2), Ping(3)]]
    await transport.close()
    engine.close(linger=0)
    await asyncio.to_thread(context.term)


async def test_what_a_dead_engine_has_said_is_heard(tmp_path: Path) -> None:
    """All of it, however late it is looked at."""
    context, engine, transport = await connected(tmp_path)
    client, greeting = await asyncio.to_thread(engine.recv_multipart)
    assert msgspec.msgpack.decode(greeting, type=list[ToEngine]) == [Ping(nonce=0)]
    for nonce in range(3):
        engine.send_multipart([client, msgspec.msgpack.encode(Pong(nonce))])
    engine.close()
    await asyncio.to_thread(context.term)
    await transport.end(EngineDead("gone"))
    assert [await transport.receive() for _ in range(3)] == [Pong(nonce) for nonce in range(3)]
    with pytest.raises(EngineDead, match="gone"):
        await transport.receive()
    await transport.close()
    with pytest.raises(EngineDead):
        await transport.receive()
