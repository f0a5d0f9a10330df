"""Failed: the event that carries an engine error across the process boundary."""

from __future__ import annotations

import msgspec

from engine.errors import BY_CODE, EngineError


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The terminal event of a request that was not served."""

    request: int
    code: str  # EngineError.code
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds

    @classmethod
    def of(cls, request: int, error: EngineError) -> Failed:
        """Return the event that ends request or state call `request` with `error`."""
        return cls(request, error.code, error.message, error.param, error.retry_after)

    def error(self) -> EngineError:
        """Return the exception again; an unknown code gives a plain `EngineError`."""
        kind = BY_CODE.get(self.code, EngineError)
        return kind(self.message, param=self.param, retry_after=self.retry_after)
