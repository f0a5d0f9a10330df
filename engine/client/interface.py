"""EngineBackend: the interface to which an API process submits requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from engine.client.request_stream import ReadyStreams, RequestStream, StreamInbox
from engine.errors import EngineError, EngineLoading
from engine.protocol.events import ModelInfo
from engine.protocol.queue_policy import Waiters
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateAction, StateReply

if TYPE_CHECKING:
    from engine.client.client import EngineClient

State = Literal["loading", "ready", "dead"]


class EngineBackend(ABC):
    """The engines of one model, used as if they were one.

    All methods are called on one event loop; only the coroutines wait.

    Attributes:
        clients: the connected engines in order of rank, at least one.
        by_rank: all engines; None for one that is not available.
        queued: this process's requests that have no slot yet, by owner.
        ready_streams: collects the inboxes of this backend's streams that have something to read.
    """

    clients: Sequence[EngineClient]
    by_rank: Sequence[EngineClient | None]
    queued: Waiters
    ready_streams: ReadyStreams

    @property
    @abstractmethod
    def state(self) -> State:
        """The common state: "ready" if any engine is, else "loading" if any is, else "dead"."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many requests run at once in all engines; 0 before any has loaded its model."""

    @property
    @abstractmethod
    def pace(self) -> float:
        """Mean seconds between two requests leaving any queue; 0: unknown."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that the engines hold: this process's, and others' as of the latest stats."""

    @property
    @abstractmethod
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests: this process's, and others' as of the latest stats."""

    @abstractmethod
    async def ready(self, timeout: float | None = None) -> ModelInfo:
        """Wait until an engine has loaded its model, and return the model's info.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            EngineLoading: `timeout` seconds have passed.
            EngineDead: all engines have ended.
            EngineError: a CheckpointError, DeviceError or ConfigError if the model cannot be
                loaded.
        """

    @abstractmethod
    def new_id(self) -> int:
        """Return a request id that is new in this process."""

    @abstractmethod
    def submit(
        self, request: Request, interval: int = 1, inbox: StreamInbox | None = None, which: int = 0
    ) -> RequestStream:
        """Send a request to one of the engines.

        Args:
            request: its id comes from `new_id`.
            interval: wake the stream's reader once for this many tokens, see RequestStream.
            inbox: the inbox through which the stream is read; None: it is read directly.
            which: a number for the stream, chosen by its reader.

        Returns:
            The request's stream. It raises all refusals except those below.

        Raises:
            EngineLoading: no engine is loaded, or the engine that keeps the request's state is not
                available.
            EngineDead: all engines have ended.
            InvalidRequest: the request cannot be encoded.
        """

    @abstractmethod
    def client_of(self, request_id: int) -> EngineClient:
        """Return the engine that has this request in flight, or any engine if none has."""

    @abstractmethod
    def abort(
        self, ids: Iterable[int], reason: FinishReason = "abort", kept: Iterable[int] = ()
    ) -> None:
        """End requests early; their streams still get their `finished`.

        Args:
            ids: request ids; those not in flight are ignored.
            reason: becomes their finish_reason.
            kept: as in Abort: empty, or parallel to `ids`, all of which are then in flight.
        """

    @abstractmethod
    def give_up(self, request_id: int, error: EngineError) -> None:
        """Abort a request in flight; its stream fails with `error` after what it has received."""

    @abstractmethod
    def missing(self, what: str, ranks: Iterable[int] | None = None) -> EngineLoading:
        """Return the error that `what` is not available without the engines of these ranks.

        `ranks` None means all. The error carries the seconds until the engines may be back.
        """

    @abstractmethod
    def most_of_one(self, owner: str, ids: Iterable[str]) -> int:
        """Return the most requests that one engine gets; `ids`: the named state of each request."""

    @abstractmethod
    def keeps_apart(self, owner: str, id: str, other: str) -> bool:
        """Return whether different engines keep the owner's states `id` and `other`.

        If so, no single request can continue from one and replace the other.
        """

    @abstractmethod
    async def ask_state(
        self, action: StateAction, *, timeout: float, owner: str = "", **fields: Any
    ) -> StateReply:
        """Send a StateCall to the engine that keeps the state, and return the reply.

        Args:
            action: what to do with named states, see StateCall.
            timeout: seconds to wait for an engine's reply.
            owner: the owner of the states.
            fields: the other fields of StateCall except `call`.

        Raises:
            StateError: raised by the engine: StateNotFound, StateBusy, StateMismatch,
                StateMalformed, StateQuota or StateNotStored.
            InvalidRequest: a field is wrong.
            EngineLoading: the engine in charge is not available, or is loading its model.
            EngineDead: the engine has ended.
            EngineUnavailable: the engine has not answered within `timeout`.
        """

    @abstractmethod
    async def ping(self, timeout: float) -> None:
        """Wait until any engine has answered; hanging engines are left to the supervisor.

        Raises:
            EngineUnavailable: none has answered within `timeout` seconds.
            EngineDead: all have ended.
        """
