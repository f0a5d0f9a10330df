"""EngineBackend: what an API process sends requests to: the engines of one model, as one."""

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
    """The engines of one model. All methods are called on one event loop; none but the coroutines
    waits.

    Attributes:
        clients: the connected engines by rank, without those that are missing; at least one.
        by_rank: all engines; None for one that is missing.
        queued: this process's requests that have no slot yet, by owner.
        ready_streams: where inboxes of this backend's streams are told that they have news.
    """

    clients: Sequence[EngineClient]
    by_rank: Sequence[EngineClient | None]
    queued: Waiters
    ready_streams: ReadyStreams

    @property
    @abstractmethod
    def state(self) -> State:
        """ "ready" where any engine is, else "loading" where any may be."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many requests run at once in all engines; 0 before any has loaded its model."""

    @property
    @abstractmethod
    def pace(self) -> float:
        """Mean seconds from one request's leaving any queue to the next's; 0: unknown."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that the engines hold: this process's own, and others' as of the latest
        stats."""

    @property
    @abstractmethod
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a slot; counted as `in_flight`."""

    @abstractmethod
    async def ready(self, timeout: float | None = None) -> ModelInfo:
        """Waits until an engine has loaded its model.

        Args:
            timeout: seconds; None: without end.

        Raises:
            EngineLoading: `timeout` seconds have passed.
            EngineDead: all engines have ended.
            EngineError: a CheckpointError, DeviceError or ConfigError where the model cannot be
                loaded.
        """

    @abstractmethod
    def new_id(self) -> int:
        """A request id that no request of this process has had."""

    @abstractmethod
    def submit(
        self, request: Request, interval: int = 1, inbox: StreamInbox | None = None, which: int = 0
    ) -> RequestStream:
        """Sends a request to one of the engines.

        Args:
            request: its id comes from `new_id`.
            interval: tokens for which the reader of the stream is woken once, see RequestStream.
            inbox: through which the stream is read; None: by itself.
            which: the reader's own number for the stream.

        Returns:
            What has come of it. It raises every refusal but these.

        Raises:
            EngineLoading: no engine is loaded, or the one is missing that keeps the request's
                state.
            EngineDead: all engines have ended.
            InvalidRequest: the request cannot be encoded.
        """

    @abstractmethod
    def client_of(self, request_id: int) -> EngineClient:
        """The engine that has this request in flight; where none has, any."""

    @abstractmethod
    def abort(
        self, ids: Iterable[int], reason: FinishReason = "abort", kept: Iterable[int] = ()
    ) -> None:
        """Ends requests early; their streams still get their `finished`.

        Args:
            ids: requests; those that are not in flight are ignored.
            reason: becomes their finish_reason.
            kept: as in Abort, in parallel to `ids`, all of which are then in flight; or nothing.
        """

    @abstractmethod
    def give_up(self, request_id: int, error: EngineError) -> None:
        """Ends a request, if it is in flight, whose stream then fails with `error` after all that
        has come."""

    @abstractmethod
    def missing(self, what: str, ranks: Iterable[int] | None = None) -> EngineLoading:
        """The error that says that `what` cannot be had without the engines of these ranks (None:
        all), with the seconds until they may be back."""

    @abstractmethod
    def most_of_one(self, owner: str, ids: Iterable[str]) -> int:
        """Of requests that go on from these named states of the owner, how many one engine gets at
        most."""

    @abstractmethod
    def keeps_apart(self, owner: str, id: str, other: str) -> bool:
        """Whether the owner's states of these ids are kept by different engines, so that no one
        request can go on from one and leave the other."""

    @abstractmethod
    async def ask_state(
        self, action: StateAction, *, timeout: float, owner: str = "", **fields: Any
    ) -> StateReply:
        """The reply to a StateCall.

        Args:
            action: what to do with named states, see StateCall.
            timeout: seconds to wait for an engine's reply.
            owner: whose states.
            fields: the others of StateCall, but `call`.

        Raises:
            StateError: as the engine does: StateNotFound, StateBusy, StateMismatch,
                StateMalformed, StateQuota, StateNotStored.
            InvalidRequest: a field is wrong.
            EngineLoading: the engine that is to be asked is missing, or loads its model.
            EngineDead: it has ended.
            EngineUnavailable: it has not answered within `timeout`.
        """

    @abstractmethod
    async def ping(self, timeout: float) -> None:
        """Returns when any engine has answered; one that does not is its supervisor's to see to.

        Raises:
            EngineUnavailable: none has within `timeout` seconds.
            EngineDead: all have ended.
        """
