"""Messages between a supervisor and its API processes; plain data.

Every engine that a supervisor starts has a generation, an increasing number, and a rank among the
engines that serve together. Requests and tokens do not go this way: API processes have their own
connections to the engines.

| message | to | answered by |
| --- | --- | --- |
| `Welcome` | API process | nothing; it is the first one |
| `Serve` | API process | `Using`, once new requests go to these engines |
| `Down` | API process | `Left`, once nothing is in flight there |
| `Shutdown` | API process | its end |
| `Using`, `Left` | supervisor | nothing |
| `Call` | either | one `Reply` of the same id |
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import BY_CODE, EngineError
from engine.protocol.events import ModelInfo

Method = Literal["reload", "gather", "collect"]  # described in Call


class EncodedError(msgspec.Struct, frozen=True, array_like=True):
    """An EngineError, encoded for another process."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds

    @classmethod
    def of(cls, error: EngineError) -> EncodedError:
        """Encode an EngineError."""
        return cls(error.code, error.message, error.param, error.retry_after)

    def decode(self) -> EngineError:
        """Return the error again; an unknown code gives EngineError."""
        kind = BY_CODE.get(self.code, EngineError)
        return kind(self.message, param=self.param, retry_after=self.retry_after)


class Call(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A call to the other end, answered by a `Reply` with the same id.

    - reload (to the supervisor): load `model` (None: the present one) in engines that replace the
      serving ones; the reply has `info`.
    - gather (to the supervisor): collect the metrics of all other API processes; `own` are the
      caller's; the reply has one item of `samples` for each process.
    - collect (to an API process): report its metrics, as the only item of `samples`.
    """

    id: int
    method: Method
    model: str | None = None
    own: bytes = b""


class Reply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to the `Call` with this id; if `error` is set, the call failed."""

    id: int
    error: EncodedError | None = None
    info: ModelInfo | None = None
    samples: list[bytes] = []


# Messages to an API process.


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Tells an API process its name, which engines use too."""

    name: str


class EngineEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The ZeroMQ address of an engine that has loaded its model."""

    generation: int
    address: str


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Orders that new requests go to these engines, which all serve one model.

    `endpoints` is in order of rank; None stands for an engine that is not available; at least one
    is.
    """

    endpoints: list[EngineEndpoint | None]
    info: ModelInfo
    restarts: int  # restarts so far of engines that died
    waits: list[float] = []  # by rank, seconds until a missing engine may be back

    @property
    def generations(self) -> list[int]:
        """The generations of all available engines."""
        return [one.generation for one in self.endpoints if one is not None]


class Down(msgspec.Struct, frozen=True, tag=True):
    """Reports that an engine has ended by itself and its requests are lost.

    May be sent again, with a new estimate of when another will serve. If other engines still serve,
    a `Serve` lists them.
    """

    generation: int
    error: EncodedError
    final: bool = False  # no engine is left, and none will be started
    current: bool = True  # no engine serves at the moment


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Tells the process to accept nothing new and to end.

    `now` aborts its requests in flight; otherwise they are finished first.
    """

    now: bool


ToApiProcess = Welcome | Serve | Down | Shutdown | Call | Reply

# Messages from an API process.


class Using(msgspec.Struct, frozen=True, tag=True):
    """Reports that new requests go to engines up to `generation`, and to none that they replaced.

    `generation` is the newest of a `Serve`.
    """

    generation: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """Reports that the process has nothing in flight on this engine, and never will again."""

    generation: int


FromApiProcess = Using | Left | Call | Reply
