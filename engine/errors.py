"""Every error that the engine raises or reports, as one tree.

    EngineError
    ├── ConfigError          a bad value in config.json or in EngineConfig
    ├── CheckpointError      a checkpoint that is missing, truncated or contradicts its config
    ├── DeviceError          the device asked for cannot be used; says the mend
    ├── InvalidRequest       one request's parameters are wrong; names the parameter
    ├── StateError           of a kept state
    │   ├── StateNotFound    there is none of that id, or it is another owner's
    │   ├── StateBusy        a request that will take its place is under way
    │   ├── StateMismatch    a snapshot of another model
    │   ├── StateMalformed   a snapshot that is none, or is damaged
    │   ├── StateQuota       there is no room for another one
    │   └── StateNotStored   it could not be written to the state folder, or removed from it
    ├── ReaderBehind         the client reads a stream more slowly than it is written
    ├── TimedOut             the time that the request was given is over, and what it has is no use
    ├── Refused              the engine will not take the request now; trying again later may work
    │   ├── QueueFull        the waiting queue is at its bound; carries retry_after in seconds
    │   │   └── ShareFull    its owner holds as much of the queue as leaves room for others
    │   ├── ReloadUnderWay   another model is being loaded already
    │   └── Draining         the server is shutting down
    └── EngineUnavailable    no answer can come from the engine
        ├── EngineLoading    the model is still loading
        ├── EngineDead       the engine process has ended
        └── StepFailed       a step raised or gave no numbers; its requests are lost

An error crosses the process boundary as a `Failed` event (engine.protocol.failed): `code` is the
class's code, by which `Failed.error` finds the class again on the other side.
"""

from __future__ import annotations

from typing import ClassVar


class DeviceLost(RuntimeError):
    """The device is lost to this process: every later call of its driver would fail too.

    A runner raises it from a step. It never crosses the process boundary: the engine makes an
    EngineDead of it. Running out of device memory is not one.
    """


class EngineError(Exception):
    """Base of the tree. `code` is stable and machine-readable; `param` names what was wrong."""

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
    """The device asked for is absent, or the extension holds no code for it."""

    code = "device_error"


class InvalidRequest(EngineError, ValueError):
    """A request's parameter is wrong; `param` names it and the message says what is allowed."""

    code = "invalid_request"


class StateError(EngineError):
    """Something about a kept state is wrong; `param` names the field that asked for it."""

    code = "state_error"


class StateNotFound(StateError):
    """No state of this owner has that id: it never had, was deleted, or its time is over."""

    code = "state_not_found"


class StateBusy(StateError):
    """Another request will take this state's place when it ends; one at a time."""

    code = "state_busy"


class StateMismatch(StateError):
    """A snapshot that another model made."""

    code = "state_mismatch"


class StateMalformed(StateError, ValueError):
    """A snapshot that cannot be one of this model's: the message says what is wrong with it."""

    code = "state_malformed"


class StateQuota(StateError):
    """The owner has as many states as it may, or memory for them is used up by others in use."""

    code = "state_quota"


class StateNotStored(StateError):
    """A state that is to last could not be written to the state folder, and is not kept; or one
    that is deleted could not be removed from it."""

    code = "state_not_stored"


class ReaderBehind(EngineError):
    """The client reads its stream more slowly than it is written, and too much waits for it."""

    code = "reader_behind"


class TimedOut(EngineError):
    """The request's time was over before it was done; a part of its answer is not an answer."""

    code = "timeout"


class Refused(EngineError):
    """The request was not taken; nothing of it was done."""

    code = "refused"


class QueueFull(Refused):
    """The waiting queue is at its bound; `retry_after` seconds from now there may be room."""

    code = "queue_full"


class ShareFull(QueueFull):
    """The queue has room, but not for more of this owner: others are to find some."""

    code = "share_full"


class ReloadUnderWay(Refused):
    """A model is being loaded to take the present one's place; one at a time."""

    code = "reload_under_way"


class Draining(Refused):
    """The server finishes what it has and takes nothing new."""

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
    """A step of the engine raised, and the requests that took part in it have failed; or the
    model gave logits that are not finite for this one."""

    code = "step_failed"


def _tree(root: type[EngineError]) -> dict[str, type[EngineError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[EngineError]] = _tree(EngineError)
