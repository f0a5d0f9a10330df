"""Failed: an engine error as it crosses the process boundary."""

from __future__ import annotations

import msgspec

from engine.errors import BY_CODE, EngineError


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one terminal event of a request that was not served."""

    request: int
    code: str  # EngineError.code
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds

    @classmethod
    def of(cls, request: int, error: EngineError) -> Failed:
        """The event of `error`, by which the request or state call `request` ended."""
        return cls(request, error.code, error.message, error.param, error.retry_after)

    def error(self) -> EngineError:
        """The exception again; an unknown code gives `EngineError`."""
        kind = BY_CODE.get(self.code, EngineError)
        return kind(self.message, param=self.param, retry_after=self.retry_after)
