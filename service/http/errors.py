"""Error answers: the status of every engine error, and one format for all errors.

The format is OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from engine.errors import (
    Draining,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    ReaderBehind,
    Refused,
    ReloadUnderWay,
    StateBusy,
    StateConflict,
    StateError,
    StateNotFound,
    StateNotStored,
    StateQuota,
    StepFailed,
    StoreUnavailable,
    TimedOut,
    TurnAhead,
    TurnDone,
)
from service.http.connection import Connection, begin
from service.http.json_response import JSONResponse
from service.http.scope import CONNECTION, ERROR_CODE, REQUEST_ID, discard

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"
TIMEOUT = "timeout_error"

# Status and type by error class; the most derived class of an error that is listed counts.
ENGINE_ERRORS: dict[type[EngineError], tuple[int, str]] = {
    InvalidRequest: (400, INVALID),
    StateNotFound: (404, INVALID),
    StateBusy: (409, INVALID),
    StateConflict: (409, INVALID),
    TurnAhead: (409, INVALID),
    TurnDone: (409, INVALID),
    StateQuota: (429, RATE_LIMIT),
    StateNotStored: (507, SERVER),
    StateError: (400, INVALID),
    ReaderBehind: (408, TIMEOUT),  # occurs only in streams, whose status has been sent before
    TimedOut: (504, TIMEOUT),
    QueueFull: (429, RATE_LIMIT),
    ReloadUnderWay: (409, INVALID),
    Draining: (503, UNAVAILABLE),
    Refused: (503, UNAVAILABLE),
    StepFailed: (500, SERVER),
    StoreUnavailable: (503, UNAVAILABLE),
    EngineUnavailable: (503, UNAVAILABLE),  # EngineLoading and EngineDead, too
    EngineError: (500, SERVER),
}


METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")

# Longest texts in errors, in characters.
MOST_MESSAGE, MOST_PARAM = 2000, 200

T = TypeVar("T", str, str | None)


class ApiError(HTTPException):
    """An error with its HTTP status and the body that the client gets.

    `code` defaults to `type`. Long messages are cut.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message, param = _clip(message, MOST_MESSAGE), _clip(param, MOST_PARAM)
        super().__init__(status, message, headers)
        self.body = {
            "error": {"message": message, "type": type, "param": param, "code": code or type}
        }


def _clip(text: T, length: int) -> T:
    """Cut a text that may quote the request, which can be as long as its body."""
    return text[:length] + "..." if text is not None and len(text) > length else text


def invalid(param: str, message: str) -> ApiError:
    """Return an ApiError 400 (`invalid_value`) about one parameter, which the message names."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def from_engine(error: EngineError) -> ApiError:
    """Return the ApiError for an engine error.

    It has Retry-After for 429 and 503, and wherever the error says when to retry.
    """
    status, kind = next(
        ENGINE_ERRORS[base] for base in type(error).__mro__ if base in ENGINE_ERRORS
    )
    headers = None
    if status in (429, 503) or error.retry_after is not None:
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after or 1.0)))}
    return ApiError(
        status, error.message, type=kind, param=error.param, code=error.code, headers=headers
    )


def parameter_path(location: Sequence[int | str]) -> str:
    """Return the name of a parameter for a location of pydantic's, without tags of unions.

    For example `prompts[3]` for ("body", "prompts", 3, "<ids>").
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "body" and not re.fullmatch(r"<.*>|\[key\]", part):
            path += f".{part}" if path else part
    return path


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Return an ApiError 400 with the first of pydantic's errors and the number of others."""
    first = errors[0]
    param = parameter_path(first["loc"]) or None
    message = first["msg"]
    if first["type"] == "unknown_field":
        field = first["ctx"]["field"]
        param = f"{param}.{field}" if param else field
    elif param is None and first["type"] in ("missing", "model_type", "dict_type"):
        message = "the body must be a JSON object"
        if isinstance(first.get("input"), bytes):
            message += ", sent with the header content-type: application/json"
    if param:
        message = f"{param}: {message}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    return ApiError(400, message, param=param, code="invalid_value")


def install(app: FastAPI) -> None:
    """Install exception handlers that render every error of the application in one format."""

    async def engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return respond(request.scope, from_engine(error))

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(request.scope, from_validation(error.errors()))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return respond(request.scope, error)
        message, code = str(error.detail), None
        headers = dict(error.headers) if error.headers else None
        if error.status_code == 404:
            message, code = f"no such path: {request.url.path}", "not_found"
        elif error.status_code == 405:
            # The exception knows one route, but a path can have several with different methods.
            allowed = ", ".join(sorted(methods_of(request)))
            message = f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}"
            code, headers = "method_not_allowed", {"Allow": allowed}
        told = ApiError(error.status_code, message, code=code, headers=headers)
        return respond(request.scope, told)

    app.add_exception_handler(EngineError, engine_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


def unexpected(scope: Scope, error: Exception) -> Response:
    """Log an unexpected exception and return the answer: 500, without details."""
    logger.error("unexpected error in request %s", scope[REQUEST_ID], exc_info=error)
    return respond(scope, ApiError(500, "internal error", type=SERVER))


def methods_of(request: Request) -> set[str]:
    """Return the methods that the path of a request allows."""
    found: set[str] = set()
    for method in METHODS:
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes):
            found.add(method)
    return found


def forget(error: BaseException) -> None:
    """Drop the tracebacks of a handled error and of the errors that caused it.

    Frames in a traceback often refer to the error: a reference cycle, which would keep all their
    objects until a garbage collection.
    """
    met: set[int] = set()
    reasons: list[BaseException | None] = [error]
    while reasons:
        reason = reasons.pop()
        if reason is not None and id(reason) not in met:
            met.add(id(reason))
            reason.__traceback__ = None
            reasons += [reason.__cause__, reason.__context__]


def respond(scope: Scope, error: ApiError) -> Response:
    """Return the answer for an error, and store the error's code in the request's scope."""
    code = scope[ERROR_CODE] = error.body["error"]["code"]
    headers = dict(error.headers) if error.headers else {}
    if code != Draining.code:
        return JSONResponse(error.body, error.status_code, headers)
    # While draining, close the connection: a retry then reaches another server.
    return _LastResponse(error.body, error.status_code, {**headers, "Connection": "close"})


class _LastResponse(JSONResponse):
    """A JSON answer after which the connection is closed; the request's body is read before."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get(CONNECTION)
        if connection is None or connection.has_body:
            return await super().__call__(scope, receive, send)
        await begin(scope, send, self.status_code, self.raw_headers, bytes(self.body), more=True)
        with suppress(ApiError):  # the rest of the body is too large or broken
            await discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
