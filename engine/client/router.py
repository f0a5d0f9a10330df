"""EngineRouter: several engines of one model, to be talked to as if they were one.

A request that has to do with a kept state goes to the engine that keeps it
(`engine.protocol.placement`); any other to that with the least to do, or to the one that has read
most of its prompt before (`engine.client.prefix_affinity`) where that has little more. Calls about
states go where their ids say, and what several engines know is put together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from engine.client.client import EngineClient
from engine.client.interface import State
from engine.client.prefix_affinity import PrefixAffinity, prefix_hashes
from engine.client.request_stream import ReadyStreams, RequestStream, StreamInbox
from engine.errors import EngineError, EngineLoading, StateBusy, StateNotFound
from engine.protocol.events import ModelInfo
from engine.protocol.placement import engine_of_state
from engine.protocol.queue_policy import Waiters, WaitersOfAll
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateAction, StateReply

# An engine that has read so many of a prompt's tokens before may have one request more in flight
# than the one with the least, if it has a free slot; at most this part of its slots more.
TOKENS_PER_REQUEST = 256
MORE_IN_FLIGHT = 1 / 8

Answer = TypeVar("Answer")

_ids = itertools.count()  # of requests: groups come and go, and their clients stay


async def _first(asked: Sequence[Coroutine[Any, Any, Answer]]) -> Answer:
    """The first answer; where there are errors alone, the last one is raised."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        for soonest in asyncio.as_completed(tasks):
            try:
                return await soonest
            except EngineError as error:
                last = error
        raise last
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _load(client: EngineClient) -> tuple[int, int]:
    return client.in_flight, client.waiting_tokens


class EngineRouter:
    """All methods are called on one event loop."""

    def __init__(
        self,
        clients: Sequence[EngineClient | None],
        waits: Sequence[float] = (),
        familiars: PrefixAffinity[EngineClient] | None = None,
    ) -> None:
        """By rank; None for an engine that is missing just now, and may be back in `waits` seconds.
        There is at least one. `familiars`: what groups before this one knew."""
        now = time.monotonic()
        self._back_at = dict(enumerate([now + wait for wait in waits]))  # by rank
        self._familiars = PrefixAffinity() if familiars is None else familiars
        self._familiars.keep_only(clients)
        self.by_rank = tuple(clients)
        self.clients = [client for client in clients if client is not None]
        self.queued: Waiters = WaitersOfAll([client.queued for client in self.clients])
        self.taps = ReadyStreams()
        self._turn = 0
        self._latest: tuple[bytes, str, list[int]] = b"", "", []

    @property
    def state(self) -> State:
        """As of the engine that is best off."""
        states = {client.state for client in self.clients}
        return "ready" if "ready" in states else "loading" if "loading" in states else "dead"

    @property
    def slots(self) -> int:
        """Of all engines together, which have as many each; one that was not heard of yet, too."""
        return len(self.clients) * max(client.slots for client in self.clients)

    @property
    def pace(self) -> float:
        """Mean seconds from one request's leaving any queue to the next's; 0: unknown."""
        per_second = sum(1 / client.pace for client in self.clients if client.pace)
        return 1 / per_second if per_second else 0.0

    @property
    def in_flight(self) -> int:
        """Requests that the engines hold."""
        return sum(client.in_flight for client in self.clients)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a slot."""
        return sum(client.waiting_tokens for client in self.clients)

    async def ready(self, timeout: float | None = None) -> ModelInfo:
        """Waits until an engine has loaded its model; others are asked when they have. Raises
        EngineDead where all have ended, EngineLoading when `timeout` seconds pass."""
        return await _first([client.ready(timeout) for client in self.clients])

    def new_id(self) -> int:
        """A request id that no group has used."""
        return next(_ids)

    def submit(
        self, request: Request, interval: int = 1, inbox: StreamInbox | None = None, which: int = 0
    ) -> RequestStream:
        """As `EngineClient.submit`; raises EngineLoading also where the engine is missing that
        keeps the request's state."""
        keep = request.keep
        id = request.state or (keep.id if keep is not None else "")
        client = self._keeper(request.owner, id) if id else self._reader(request)
        return client.submit(request, interval, inbox, which)

    def client_of(self, request_id: int) -> EngineClient:
        """The one that has this request in flight; where none has, any."""
        found = (client for client in self.clients if client.has(request_id))
        return next(found, self.clients[0])

    def abort(
        self, ids: Iterable[int], reason: FinishReason = "abort", kept: Iterable[int] = ()
    ) -> None:
        """As `EngineClient.abort`."""
        ids, kept = list(ids), list(kept)
        for client in self.clients:
            mine = [place for place, id in enumerate(ids) if client.has(id)]
            its_kept = [kept[place] for place in mine] if kept else []
            client.abort([ids[place] for place in mine], reason, its_kept)

    def give_up(self, request_id: int, error: EngineError) -> None:
        """As `EngineClient.give_up`."""
        self.client_of(request_id).give_up(request_id, error)

    async def ping(self, timeout: float) -> None:
        """Returns when any engine has answered; one that does not is its supervisor's to see to.

        Raises EngineUnavailable after `timeout` seconds, EngineDead where all have ended.
        """
        await _first([client.ping(timeout) for client in self.clients])

    # Who is asked.

    def missing(self, what: str, ranks: Iterable[int] | None = None) -> EngineLoading:
        """That `what` cannot be had without engines of these ranks (all), and when to ask again."""
        ranks = range(len(self.by_rank)) if ranks is None else ranks
        waits = [self._back_at.get(rank, 0.0) - time.monotonic() for rank in ranks]
        return EngineLoading(f"{what} is missing just now", retry_after=max(1.0, *waits))

    def _keeper(self, owner: str, id: str) -> EngineClient:
        """Raises EngineLoading where the one that keeps this state is missing."""
        rank = engine_of_state(owner, id, len(self.by_rank))
        client = self.by_rank[rank]
        if client is None or client.state != "ready":
            raise self.missing("the engine that keeps this state", [rank])
        return client

    def _there(self) -> list[EngineClient]:
        """Who can be asked; where nobody can, those who can say why."""
        return [client for client in self.clients if client.state == "ready"] or self.clients

    def _idlest(self, there: Sequence[EngineClient]) -> EngineClient:
        """Of equals each in turn."""
        self._turn = (self._turn + 1) % len(there)
        return min((*there[self._turn :], *there[: self._turn]), key=_load)

    def _marks(self, request: Request) -> list[int]:
        """Samples of one prompt share them."""
        prompt, scope = request.prompt, f"{request.owner}\0{request.cache_salt}"
        if prompt is not self._latest[0] or scope != self._latest[1]:
            self._latest = prompt, scope, prefix_hashes(scope, prompt)
        return self._latest[2]

    def _reader(self, request: Request) -> EngineClient:
        there = self._there()
        chosen = self._idlest(there)
        marks = self._marks(request)
        if not marks:
            return chosen
        familiar, tokens = self._familiars.find(marks, there)
        if familiar is not None:
            more = min(tokens / TOKENS_PER_REQUEST, familiar.slots * MORE_IN_FLIGHT)
            if familiar.in_flight < min(familiar.slots, chosen.in_flight + more):
                chosen = familiar
        self._familiars.note(marks, chosen)
        return chosen

    # States.

    def most_of_one(self, owner: str, ids: Iterable[str]) -> int:
        """Of requests that go on from these states, how many one engine gets at most."""
        homes: Counter[int] = Counter()
        for id, count in Counter(ids).items():  # mostly one
            homes[engine_of_state(owner, id, len(self.by_rank))] += count
        return max(homes.values(), default=0)

    def keeps_apart(self, owner: str, id: str, other: str) -> bool:
        """Whether the owner's states of these ids are kept by different engines."""
        engines = len(self.by_rank)
        return engine_of_state(owner, id, engines) != engine_of_state(owner, other, engines)

    async def ask_state(
        self, action: StateAction, *, timeout: float, owner: str = "", **fields: Any
    ) -> StateReply:
        """As `EngineClient.ask_state`; raises EngineLoading also where the engine is missing that
        is to be asked."""
        id, target = fields.get("id", ""), fields.get("target", "")
        if action == "list":
            return await self._list(timeout=timeout, owner=owner, **fields)
        if action == "import":
            client = self._keeper(owner, target) if target else self._idlest(self._there())
        else:
            client = self._keeper(owner, id)
        if action in ("fork", "move") and target and self.keeps_apart(owner, id, target):
            return await self._copy(action, client, timeout=timeout, owner=owner, **fields)
        return await client.ask_state(action, timeout=timeout, owner=owner, **fields)

    async def _list(self, *, limit: int = 100, **fields: Any) -> StateReply:
        if any(client is None or client.state != "ready" for client in self.by_rank):
            raise self.missing("an engine that keeps states")
        asked = [client.ask_state("list", limit=limit, **fields) for client in self.clients]
        replies = await asyncio.gather(*asked)
        states = [info for reply in replies for info in reply.states]
        states.sort(key=lambda info: info.id)
        more = len(states) > limit or any(reply.more for reply in replies)
        return StateReply(replies[0].call, states=states[:limit], more=more)

    async def _copy(
        self,
        action: StateAction,
        client: EngineClient,
        *,
        timeout: float,
        owner: str,
        id: str,
        target: str,
        ttl: float | None = None,
    ) -> StateReply:
        """A fork or move from one engine to another."""
        asked: dict[str, Any] = {"timeout": timeout, "owner": owner}
        keeper = self._keeper(owner, target)
        found = await client.ask_state("export", id=id, **asked)
        if action == "move" and found.states[0].busy:
            raise StateBusy(f"a request is under way that will take the place of {id!r}")
        reply = await keeper.ask_state(
            "import", content=found.content, target=target, ttl=ttl, **asked
        )
        if action == "move":
            with contextlib.suppress(StateNotFound):  # it has expired meanwhile
                await client.ask_state("delete", id=id, **asked)
        return reply
