"""EngineRouter: sends each request to one of the engines of a model.

A request that uses a named state goes to the engine that keeps it (`engine.protocol.placement`).
With a shared store, where every engine finds it, it goes to the next one if that engine is not
available. Any other request goes to the engine that its `placement` names, by the function that
places states, or else to the one that has read most of its prompt before
(`engine.client.prefix_affinity`), in both cases only if that is at most slightly busier than the
least loaded engine, which gets the request otherwise. State calls go where their ids say, and
results of several engines are merged. With a single engine all of this is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from engine.client.client import EngineClient
from engine.client.interface import EngineBackend, State
from engine.client.prefix_affinity import PrefixAffinity, prefix_hashes
from engine.client.request_stream import ReadyStreams, RequestStream, StreamInbox
from engine.errors import EngineError, EngineLoading, StateBusy, StateNotFound
from engine.protocol.events import ModelInfo
from engine.protocol.placement import engine_of_state, engines_in_order
from engine.protocol.queue_policy import Waiters, WaitersOfAll
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateAction, StateReply

# How many more requests than the least loaded engine a prefix hit may cost: one per this many
# cached tokens, at most this part of the engine's slots, and only if it has a free slot. For a
# placement, of which the router does not know how much is cached, it is that part of the slots, but
# at least one request: otherwise two requests at once would part wherever engines have few slots.
TOKENS_PER_REQUEST = 256
MORE_IN_FLIGHT = 1 / 8

Result = TypeVar("Result")


async def _first(asked: Sequence[Coroutine[Any, Any, Result]]) -> Result:
    """Return the first successful result; if all fail, raise the last error."""
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


class EngineRouter(EngineBackend):
    """Routes over the engines that serve at one time; a new router is made when they change."""

    def __init__(
        self,
        clients: Sequence[EngineClient | None],
        waits: Sequence[float] = (),
        before: EngineRouter | None = None,
    ) -> None:
        """Create the router without sending anything.

        Args:
            clients: in order of rank; None for an engine that is not available; at least one is.
            waits: in order of rank, the seconds until a missing engine may be back.
            before: the router that this one replaces. The new router continues its request ids,
                since requests may still be in flight on the same engines, and takes over its prefix
                affinity.
        """
        now = time.monotonic()
        self._back_at = dict(enumerate([now + wait for wait in waits]))  # by rank
        self._ids: Iterator[int] = itertools.count() if before is None else before._ids
        self._affinity: PrefixAffinity[EngineClient] = (
            PrefixAffinity() if before is None else before._affinity
        )
        self._affinity.keep_only(clients)
        self.by_rank = tuple(clients)
        self.clients = [client for client in clients if client is not None]
        # With a single engine, calls made for each request skip all routing.
        self._only = self.clients[0] if len(clients) == 1 else None
        self.queued: Waiters = (
            WaitersOfAll([client.queued for client in self.clients])
            if self._only is None
            else self._only.queued
        )
        self.ready_streams = ReadyStreams()
        self._turn = 0
        self._latest: tuple[bytes, str, list[int]] = b"", "", []

    @property
    def state(self) -> State:
        states = {client.state for client in self.clients}
        return "ready" if "ready" in states else "loading" if "loading" in states else "dead"

    @property
    def slots(self) -> int:
        if self._only is not None:
            return self._only.slots
        # Engines have equally many slots; those not heard from yet count too.
        return len(self.clients) * max(client.slots for client in self.clients)

    @property
    def pace(self) -> float:
        if self._only is not None:
            return self._only.pace
        per_second = sum(1 / client.pace for client in self.clients if client.pace)
        return 1 / per_second if per_second else 0.0

    @property
    def in_flight(self) -> int:
        if self._only is not None:
            return self._only.in_flight
        return sum(client.in_flight for client in self.clients)

    @property
    def waiting_tokens(self) -> int:
        if self._only is not None:
            return self._only.waiting_tokens
        return sum(client.waiting_tokens for client in self.clients)

    async def ready(self, timeout: float | None = None) -> ModelInfo:
        return await _first([client.ready(timeout) for client in self.clients])

    def new_id(self) -> int:
        return next(self._ids)

    def submit(
        self, request: Request, interval: int = 1, inbox: StreamInbox | None = None, which: int = 0
    ) -> RequestStream:
        client = self._only
        if client is None:
            keep = request.keep
            id = request.state or (keep.id if keep is not None else "")
            if id:
                client = self._owner_of_state(request.owner, id)
            else:
                client = self._pick_for_prompt(request)
        return client.submit(request, interval, inbox, which)

    def client_of(self, request_id: int) -> EngineClient:
        found = (client for client in self.clients if client.has(request_id))
        return next(found, self.clients[0])

    def abort(
        self, ids: Iterable[int], reason: FinishReason = "abort", kept: Iterable[int] = ()
    ) -> None:
        if self._only is not None:
            self._only.abort(ids, reason, kept)
            return
        ids, kept = list(ids), list(kept)
        for client in self.clients:
            mine = [index for index, id in enumerate(ids) if client.has(id)]
            its_kept = [kept[index] for index in mine] if kept else []
            client.abort([ids[index] for index in mine], reason, its_kept)

    def give_up(self, request_id: int, error: EngineError) -> None:
        self.client_of(request_id).give_up(request_id, error)

    async def ping(self, timeout: float) -> None:
        await _first([client.ping(timeout) for client in self.clients])

    # Choice of the engine.

    def missing(self, what: str, ranks: Iterable[int] | None = None) -> EngineLoading:
        ranks = range(len(self.by_rank)) if ranks is None else ranks
        waits = [self._back_at.get(rank, 0.0) - time.monotonic() for rank in ranks]
        return EngineLoading(f"{what} is not available right now", retry_after=max(1.0, *waits))

    @property
    def _shares_states(self) -> bool:
        infos = [client.info for client in self.clients]
        return any(info is not None and info.shared_states for info in infos)

    def _owner_of_state(self, owner: str, id: str) -> EngineClient:
        """Return the engine to ask about a state. Raises EngineLoading if none is available."""
        ranks = engines_in_order(owner, id, len(self.by_rank))
        for rank in ranks if self._shares_states else ranks[:1]:
            client = self.by_rank[rank]
            if client is not None and client.state == "ready":
                return client
        raise self.missing("the engine that keeps this state", ranks[:1])

    def _ready_clients(self) -> Sequence[EngineClient]:
        """Return the engines that are ready; if none is, all, since they can say why."""
        return [client for client in self.clients if client.state == "ready"] or self.clients

    def _least_loaded(self, among: Sequence[EngineClient]) -> EngineClient:
        """Return the least loaded engine; equally loaded ones take turns."""
        self._turn = (self._turn + 1) % len(among)
        return min((*among[self._turn :], *among[: self._turn]), key=_load)

    def _hashes(self, request: Request) -> list[int]:
        """Return the prompt's prefix checksums, cached for several samples of one prompt."""
        prompt, scope = request.prompt, f"{request.owner}\0{request.cache_salt}"
        if prompt is not self._latest[0] or scope != self._latest[1]:
            self._latest = prompt, scope, prefix_hashes(scope, prompt)
        return self._latest[2]

    def _pick_for_prompt(self, request: Request) -> EngineClient:
        """Return the engine to read a prompt that does not continue a named state."""
        among = self._ready_clients()
        chosen = self._least_loaded(among)
        hashes = [] if request.no_cache else self._hashes(request)
        placed = self._placed(request) if request.placement else None
        if placed is not None and self._may_take(
            placed, chosen, max(placed.slots * MORE_IN_FLIGHT, 1)
        ):
            chosen = placed
        elif hashes:
            known, tokens = self._affinity.find(hashes, among)
            if known is not None and self._may_take(
                known, chosen, min(tokens / TOKENS_PER_REQUEST, known.slots * MORE_IN_FLIGHT)
            ):
                chosen = known
        if hashes:
            self._affinity.note(hashes, chosen)
        return chosen

    def _placed(self, request: Request) -> EngineClient | None:
        """Return the engine that a request's `placement` names; None if it is not ready."""
        client = self.by_rank[engine_of_state(request.owner, request.placement, len(self.by_rank))]
        return client if client is not None and client.state == "ready" else None

    @staticmethod
    def _may_take(preferred: EngineClient, least: EngineClient, more: float) -> bool:
        """Whether a preferred engine, with `more` requests than the least loaded, may get another.

        Never if it has no free slot.
        """
        return preferred.in_flight < min(preferred.slots, least.in_flight + more)

    # Named states.

    def most_of_one(self, owner: str, ids: Iterable[str]) -> int:
        engines: Counter[int] = Counter()
        for id, count in Counter(ids).items():  # mostly one id
            engines[engine_of_state(owner, id, len(self.by_rank))] += count
        return max(engines.values(), default=0)

    def keeps_apart(self, owner: str, id: str, other: str) -> bool:
        if self._shares_states:
            return False
        engines = len(self.by_rank)
        return engine_of_state(owner, id, engines) != engine_of_state(owner, other, engines)

    async def ask_state(
        self, action: StateAction, *, timeout: float, owner: str = "", **fields: Any
    ) -> StateReply:
        if self._only is not None:
            return await self._only.ask_state(action, timeout=timeout, owner=owner, **fields)
        id, target = fields.get("id", ""), fields.get("target", "")
        if action == "list":
            return await self._list(timeout=timeout, owner=owner, **fields)
        kept_under = target if action == "import" else id
        if action == "import" and not target:  # any engine may choose a new id
            client = self._least_loaded(self._ready_clients())
        else:
            client = self._owner_of_state(owner, kept_under)
        if action in ("fork", "move") and target and self.keeps_apart(owner, id, target):
            return await self._copy(action, client, timeout=timeout, owner=owner, **fields)
        return await client.ask_state(action, timeout=timeout, owner=owner, **fields)

    async def _list(self, *, limit: int = 100, **fields: Any) -> StateReply:
        if self._shares_states:
            client = self._least_loaded(self._ready_clients())
            return await client.ask_state("list", limit=limit, **fields)
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
        """Fork or move a state from one engine to another."""
        asked: dict[str, Any] = {"timeout": timeout, "owner": owner}
        receiver = self._owner_of_state(owner, target)
        found = await client.ask_state("export", id=id, **asked)
        if action == "move" and found.states[0].busy:
            raise StateBusy(f"a running request is going to replace state {id!r}")
        reply = await receiver.ask_state(
            "import", content=found.content, target=target, ttl=ttl, **asked
        )
        if action == "move":
            with contextlib.suppress(StateNotFound):  # the state may have expired meanwhile
                await client.ask_state("delete", id=id, **asked)
        return reply
