"""The exceptions that the engine raises or reports, as one class tree.

    EngineError
    ├── ConfigError          a bad value in config.json or in EngineConfig
    ├── CheckpointError      a checkpoint that is missing, truncated or contradicts its config
    ├── DeviceError          the requested device cannot be used; the message says what to do
    ├── InvalidRequest       a wrong request parameter; `param` names it
    ├── StateError           an error about a kept state
    │   ├── StateNotFound    no state of this owner has that id
    │   ├── StateBusy        a running request is going to replace the state
    │   ├── StateMismatch    the snapshot belongs to another model
    │   ├── StateMalformed   the snapshot is damaged, or is no snapshot
    │   ├── StateQuota       no room for another state
    │   ├── StateNotStored   the state could not be written to where it lasts
    │   ├── StateConflict    another server has continued the text in the meantime
    │   ├── TurnDone         the request's turn has been carried out before
    │   └── TurnAhead        turns before the request's own have not been carried out
    ├── ReaderBehind         the client reads its stream too slowly
    ├── TimedOut             the request's timeout passed before it had a usable result
    ├── Refused              not accepted now; a later try may succeed
    │   ├── QueueFull        the request queue is full; carries retry_after in seconds
    │   │   └── ShareFull    this owner has used up its share of the queue
    │   ├── ReloadUnderWay   another reload is running
    │   └── Draining         the server is shutting down
    ├── StoreUnavailable     the shared store of states does not answer
    └── EngineUnavailable    the engine cannot answer
        ├── EngineLoading    the model is still loading
        ├── EngineDead       the engine process has ended
        └── StepFailed       a step raised or produced non-finite logits; its requests are lost

An error crosses the process boundary as a `Failed` event (engine.protocol.failed). Its `code` is
the class's code; `Failed.error` uses it to find the class again.
"""

from __future__ import annotations

from typing import ClassVar


class DeviceLost(RuntimeError):
    """The GPU is lost to this process: every later driver call would fail too.

    A runner raises it from a step. It never crosses the process boundary: the engine turns it into
    an EngineDead. Running out of device memory is not a DeviceLost.
    """


class EngineError(Exception):
    """Base class of all engine errors.

    Attributes:
        code: a stable, machine-readable name of the class.
        message: what was wrong, for people.
        param: the request or config field that was wrong; None if no single field was.
        retry_after: seconds after which a retry may succeed; None if unknown.
    """

    code: ClassVar[str] = "engine_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ConfigError(EngineError, ValueError):
    """A configuration value is out of range, of the wrong type or contradicts another one."""

    code = "config_error"


class CheckpointError(EngineError):
    """A checkpoint cannot be found, read or matched to its configuration."""

    code = "checkpoint_error"


class DeviceError(EngineError):
    """The requested device is absent, or the compiled extension has no code for it."""

    code = "device_error"


class InvalidRequest(EngineError, ValueError):
    """A request's parameter is wrong; `param` names it and the message says what is allowed."""

    code = "invalid_request"


class StateError(EngineError):
    """An error about a kept state; `param` names the request field that referred to it."""

    code = "state_error"


class StateNotFound(StateError):
    """No state of this owner has that id: it never existed, was deleted, or has expired."""

    code = "state_not_found"


class StateBusy(StateError):
    """A running request is going to replace this state; only one may at a time."""

    code = "state_busy"


class StateMismatch(StateError):
    """The snapshot was made by another model."""

    code = "state_mismatch"


class StateMalformed(StateError, ValueError):
    """The snapshot cannot be one of this model's; the message says what is wrong with it."""

    code = "state_malformed"


class StateQuota(StateError):
    """The owner has reached its quota of states, or memory is full of states that are in use."""

    code = "state_quota"


class StateNotStored(StateError):
    """A state could not be written to the state folder, or could not be removed from it.

    A state that must last and cannot be written is not kept.
    """

    code = "state_not_stored"


class StateConflict(StateError):
    """The state was not stored, because another server has continued the text in the meantime."""

    code = "state_conflict"


class TurnDone(StateError):
    """The request's turn is in the state already; nothing was done."""

    code = "turn_done"


class TurnAhead(StateError):
    """The request's turn is not the state's next one: turns between them are missing."""

    code = "turn_ahead"


class StoreUnavailable(EngineError):
    """The shared store of states does not answer, or answers nonsense; nothing was done."""

    code = "state_store_unavailable"


class ReaderBehind(EngineError):
    """The client reads its stream too slowly, and too much output is waiting for it."""

    code = "reader_behind"


class TimedOut(EngineError):
    """The request's timeout passed first; its partial result cannot serve as an answer."""

    code = "timeout"


class Refused(EngineError):
    """The request was not accepted, and none of it was done."""

    code = "refused"


class QueueFull(Refused):
    """The request queue is full; there may be room after `retry_after` seconds."""

    code = "queue_full"


class ShareFull(QueueFull):
    """This owner has used up its share of the queue; the places left are for other owners."""

    code = "share_full"


class ReloadUnderWay(Refused):
    """Another model reload is running; only one may at a time."""

    code = "reload_under_way"


class Draining(Refused):
    """The server is shutting down: it finishes running requests and accepts no new ones."""

    code = "draining"


class EngineUnavailable(EngineError):
    """The engine cannot answer."""

    code = "engine_unavailable"


class EngineLoading(EngineUnavailable):
    """The model is still being loaded."""

    code = "engine_loading"


class EngineDead(EngineUnavailable):
    """The engine process has ended; every request that was in flight has failed."""

    code = "engine_dead"


class StepFailed(EngineUnavailable):
    """A step raised, or the model's logits for this request were not finite.

    When a step raises, all requests that took part in it fail.
    """

    code = "step_failed"


def _tree(root: type[EngineError]) -> dict[str, type[EngineError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[EngineError]] = _tree(EngineError)
