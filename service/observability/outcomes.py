"""What came of a request for the model, in a word: the label of `minserve_requests_total`, and a
field of the access log."""

from __future__ import annotations

from engine.errors import BY_CODE, EngineLoading, ReaderBehind, Refused, TimedOut

OUTCOMES = (
    "ok",  # also what a generation had when its time was over
    "invalid",  # the client was wrong
    "refused",  # not done for now: no room, no model yet, shutting down
    "cancelled",  # the client left, or did not read what it had asked for
    "timeout",  # the time that the request was given was over, and a part is no answer
    "error",  # the server failed; what an engine lost by dying, too
)
CLIENT_CLOSED = 499  # nginx's status for a client that left before its answer

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
    """One of OUTCOMES, by an answer's status and the code of the error that it told, if any; of a
    stream that failed, by the status that the error would have had."""
    if status < 400:
        return "ok"
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status == CLIENT_CLOSED:
        return "cancelled"
    if status == 429:
        return "refused"
    return "invalid" if status < 500 else "error"
