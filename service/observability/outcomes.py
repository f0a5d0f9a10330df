"""Outcomes of inference requests, for `minserve_requests_total` and the access log."""

from __future__ import annotations

from engine.errors import BY_CODE, EngineLoading, ReaderBehind, Refused, TimedOut

OUTCOMES = (
    "ok",  # includes generations that ended at their timeout with what they had
    "invalid",  # the request was wrong
    "refused",  # not served now: queue full, model loading, shutting down
    "cancelled",  # the client disconnected, or read its stream too slowly
    "timeout",  # the request timed out, and a partial result is of no use
    "error",  # the server failed; includes requests that were lost with an engine
)
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before its answer's end

_BY_ERROR = {
    Refused: "refused",
    EngineLoading: "refused",
    TimedOut: "timeout",
    ReaderBehind: "cancelled",
}
_BY_CODE = {
    code: outcome
    for code, kind in BY_CODE.items()
    for base, outcome in _BY_ERROR.items()
    if issubclass(kind, base)
}


def outcome_of(status: int, code: str | None) -> str:
    """Return one of OUTCOMES.

    Args:
        status: The answer's status; for a stream that failed, the status of its error.
        code: The code of the error in the answer, if any.
    """
    if status < 400:
        return "ok"
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status == CLIENT_CLOSED:
        return "cancelled"
    if status == 429:
        return "refused"
    return "invalid" if status < 500 else "error"
