"""What a supervisor of engines and its members, the API processes, tell each other; plain data.

Every engine that a supervisor starts has a generation, a number that grows, and a rank among those
that serve together. A member is told which ones serve (`Serve`), of the end of one (`Down`), and
says when it has nothing more in flight there (`Left`). Requests and tokens do not pass here:
members talk to engines themselves.
"""

from __future__ import annotations

import msgspec

from engine.errors import BY_CODE, EngineError
from engine.protocol.events import ModelInfo


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An EngineError on its way to another process."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: EngineError) -> Problem:
        return cls(error.code, error.message, error.param, error.retry_after)

    def error(self) -> EngineError:
        """The error again; an unknown code gives EngineError."""
        kind = BY_CODE.get(self.code, EngineError)
        return kind(self.message, param=self.param, retry_after=self.retry_after)


# To a member.


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The first message: the member's name, by which engines know it too."""

    name: str


class EngineEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """An engine that has loaded its model."""

    generation: int
    address: str


class Serve(msgspec.Struct, frozen=True, tag=True):
    """From now on new requests go to these engines, of one model; by rank, None for one that is
    missing just now. There is at least one."""

    seats: list[EngineEndpoint | None]
    info: ModelInfo
    restarts: int  # so far, of engines that died
    waits: list[float] = []  # by rank, seconds until one that is missing may be back

    @property
    def generations(self) -> list[int]:
        """Those of all that are there."""
        return [seat.generation for seat in self.seats if seat is not None]


class Down(msgspec.Struct, frozen=True, tag=True):
    """An engine has ended by itself; what is in flight there is lost. May be said again, with news
    of when there is to be another. Where others serve on, a `Serve` says which."""

    generation: int
    problem: Problem
    final: bool = False  # there is none any more, and will be none
    current: bool = True  # none is left that serves


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Asks for `Samples` of the member's metrics."""

    nonce: int


class ControlReply(msgspec.Struct, frozen=True, tag=True):
    """To a `Reload` or `Gather` of this nonce."""

    nonce: int
    problem: Problem | None = None
    info: ModelInfo | None = None
    samples: list[bytes] = []


class Drain(msgspec.Struct, frozen=True, tag=True):
    """The member is to take nothing new, finish what it has and end."""


class Cut(msgspec.Struct, frozen=True, tag=True):
    """The member is to end at once, with what it has."""


ToMember = Welcome | Serve | Down | Collect | ControlReply | Drain | Cut

# From a member.


class Using(msgspec.Struct, frozen=True, tag=True):
    """New requests go to engines up to this one, the youngest of a `Serve`, and to none of those
    that they have replaced."""

    generation: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """The member has nothing in flight on this engine, and never will again."""

    generation: int


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Asks for engines with a freshly loaded model in place of those that serve."""

    nonce: int
    model: str | None = None  # None = the present one


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Asks for the metrics of all other members, and gives this one's own."""

    nonce: int
    own: bytes


class Samples(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Collect`."""

    nonce: int
    samples: bytes


FromMember = Using | Left | Reload | Gather | Samples
