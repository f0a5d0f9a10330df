"""What a supervisor and its API processes tell each other over one pipe; plain data.

Every engine that a supervisor starts has a generation, a number that grows, and a rank among those
that serve together. Requests and tokens do not pass here: API processes talk to engines themselves.

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

Method = Literal["reload", "gather", "collect"]  # see Call


class EncodedError(msgspec.Struct, frozen=True, array_like=True):
    """An EngineError on its way to another process."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds

    @classmethod
    def of(cls, error: EngineError) -> EncodedError:
        """The error, to be sent."""
        return cls(error.code, error.message, error.param, error.retry_after)

    def decode(self) -> EngineError:
        """The error again; an unknown code gives EngineError."""
        kind = BY_CODE.get(self.code, EngineError)
        return kind(self.message, param=self.param, retry_after=self.retry_after)


class Call(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A question to the other end.

    reload (to the supervisor): loads `model` (None: the present one) in engines that take the place
    of those that serve; the reply has `info`. gather (to the supervisor): the metrics of all other
    API processes; `own` are the caller's; the reply has `samples`, one a process. collect (to an
    API process): its metrics; the reply has them as the one of `samples`.
    """

    id: int
    method: Method
    model: str | None = None
    own: bytes = b""


class Reply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to the `Call` of this id; where `error` is set, it was not done."""

    id: int
    error: EncodedError | None = None
    info: ModelInfo | None = None
    samples: list[bytes] = []


# To an API process.


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The process's name, by which engines know it too."""

    name: str


class EngineEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """An engine that has loaded its model, and its ZeroMQ address."""

    generation: int
    address: str


class Serve(msgspec.Struct, frozen=True, tag=True):
    """From now on new requests go to these engines, of one model; by rank, None for one that is
    missing just now. There is at least one."""

    endpoints: list[EngineEndpoint | None]
    info: ModelInfo
    restarts: int  # so far, of engines that died
    waits: list[float] = []  # by rank, seconds until one that is missing may be back

    @property
    def generations(self) -> list[int]:
        """Those of all engines that are there."""
        return [one.generation for one in self.endpoints if one is not None]


class Down(msgspec.Struct, frozen=True, tag=True):
    """An engine has ended by itself; what is in flight there is lost. May be said again, with news
    of when there is to be another. Where others serve on, a `Serve` says which."""

    generation: int
    error: EncodedError
    final: bool = False  # there is none any more, and will be none
    current: bool = True  # none is left that serves


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The process is to take nothing new and to end: after what it has in flight or, `now`, with
    it."""

    now: bool


ToApiProcess = Welcome | Serve | Down | Shutdown | Call | Reply

# From an API process.


class Using(msgspec.Struct, frozen=True, tag=True):
    """New requests go to engines up to this one, the youngest of a `Serve`, and to none of those
    that they have replaced."""

    generation: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """The process has nothing in flight on this engine, and never will again."""

    generation: int


FromApiProcess = Using | Left | Call | Reply
