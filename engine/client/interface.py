"""EngineBackend: what an API process sends requests to: one engine, or several that serve as
one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.client.request_stream import ReadyStreams, RequestStream, StreamInbox
from engine.errors import EngineError, EngineLoading
from engine.protocol.events import ModelInfo
from engine.protocol.queue_policy import Waiters
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateAction, StateReply

if TYPE_CHECKING:
    from engine.client.client import EngineClient

State = Literal["loading", "ready", "dead"]


class EngineBackend(Protocol):
    """EngineClient says more of each; an EngineRouter answers for all of its engines."""

    @property
    def clients(self) -> Sequence[EngineClient]:
        """Of each engine, by rank, but for those that are missing."""

    @property
    def by_rank(self) -> Sequence[EngineClient | None]:
        """Of all engines; None for one that is missing."""

    @property
    def state(self) -> State:
        """ "ready" where any engine is."""

    @property
    def slots(self) -> int:
        """How many requests run at once."""

    @property
    def pace(self) -> float:
        """Mean seconds from one request's leaving the queue to the next's; 0: unknown."""

    @property
    def in_flight(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    @property
    def queued(self) -> Waiters: ...

    @property
    def taps(self) -> ReadyStreams: ...

    async def ready(self, timeout: float | None = None) -> ModelInfo: ...

    def new_id(self) -> int: ...

    def submit(
        self, request: Request, interval: int = 1, inbox: StreamInbox | None = None, which: int = 0
    ) -> RequestStream: ...

    def client_of(self, request_id: int) -> EngineClient:
        """The one that has this request in flight; where none has, any."""

    def abort(
        self, ids: Iterable[int], reason: FinishReason = "abort", kept: Iterable[int] = ()
    ) -> None: ...

    def give_up(self, request_id: int, error: EngineError) -> None: ...

    def missing(self, what: str, ranks: Iterable[int] | None = None) -> EngineLoading:
        """That `what` cannot be had without the engines of these ranks (all)."""

    def most_of_one(self, owner: str, ids: Iterable[str]) -> int:
        """Of requests that go on from these states of the owner, how many one engine gets."""

    def keeps_apart(self, owner: str, id: str, other: str) -> bool:
        """Whether the owner's states of these ids are kept by different engines, so that no one
        request can go on from one and leave the other."""

    async def ask_state(
        self, action: StateAction, *, timeout: float, owner: str = "", **fields: Any
    ) -> StateReply: ...

    async def ping(self, timeout: float) -> None: ...
