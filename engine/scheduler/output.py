"""StepOutput: collects the events of a round, one message per API process."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.protocol.events import Finished, Run, Scores, Stats, StepEvents
from engine.protocol.failed import Failed
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.token_ids import pack_ids


@dataclass(slots=True)
class _Events:
    requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


class StepOutput:
    """Events by client, until `drain`."""

    def __init__(self) -> None:
        self._events: dict[Hashable, _Events] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    def _of(self, client: Hashable) -> _Events:
        events = self._events.get(client)
        if events is None:
            events = self._events[client] = _Events()
        return events

    def token(
        self, client: Hashable, request: int, token: int, report: PackedLogprobs | None
    ) -> None:
        """Add one token of a streamed request."""
        events = self._of(client)
        # runs come after single tokens, so the order must be kept
        if events.runs or report is not None:
            events.runs.append(Run([request], 1, pack_ids([token]), report))
            return
        events.requests.append(request)
        events.tokens.append(token)

    def run(self, client: Hashable, run: Run) -> None:
        """Add tokens of streamed requests from several steps."""
        self._of(client).runs.append(run)

    def started(self, client: Hashable, request: int) -> None:
        """Report that a request has left the queue."""
        self._of(client).started.append(request)

    def scores(self, client: Hashable, scores: Scores) -> None:
        """Add the next run of scored prompt tokens."""
        self._of(client).scores.append(scores)

    def finished(self, client: Hashable, finished: Finished) -> None:
        """Add the terminal event of a request that was served."""
        self._of(client).finished.append(finished)

    def failed(self, client: Hashable, request: int, error: EngineError) -> None:
        """Add the terminal event of a request that was not served."""
        self._of(client).failed.append(Failed.of(request, error))

    def drain(self, stats: Stats, listeners: Iterable[Hashable]) -> dict[Hashable, StepEvents]:
        """Return all events since the last call; every listener gets at least `stats`."""
        for client in listeners:
            self._of(client)
        taken, self._events = self._events, {}
        return {
            client: StepEvents(
                requests=events.requests,
                tokens=events.tokens,
                runs=events.runs,
                started=events.started,
                scores=events.scores,
                finished=events.finished,
                failed=events.failed,
                stats=stats,
            )
            for client, events in taken.items()
        }
