"""Route classes of the API endpoints, which refuse requests before they cost anything.

Refusals (loading, draining, queue full) come before the body is read. Then the body must be strict
JSON, or of the type that the endpoint takes. A request is in flight from its arrival on: a drain
waits for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from service.http.body import too_large
from service.http.connection import Connection
from service.http.disconnect import ClientGone, unless_client_leaves
from service.http.errors import ApiError, from_validation
from service.http.scope import (
    ARRIVED,
    CONNECTION,
    INFERENCE,
    KEY_NAME,
    LEAST_PRIORITY,
    RUNTIME,
    TRACE,
    header,
)
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.grammar_check import get_grammars
from service.inference.lifecycle import get_lifecycle
from service.inference.runtime import Runtime, get_runtime

Model = TypeVar("Model", bound=BaseModel)

SNAPSHOT = b'"snapshot"'  # the field that has a state
LARGE = 2**16  # bytes; reading the fields of a larger body takes a while


class StrictRequest(Request):
    """A request whose body must be valid JSON: UTF-8, and no NaN or Infinity."""

    def check_encoding(self) -> None:
        """Raise ApiError 415 if the body has a content-encoding, such as gzip."""
        given = header(self.scope, b"content-encoding")
        if given is not None and given.strip().lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"content-encoding: {given} is not supported; allowed: an uncompressed body, "
                "without this header",
                code="unsupported_content_encoding",
                headers={"Accept-Encoding": "identity"},  # RFC 9110, 15.5.16
            )

    def check_type(self, types: BodyTypes) -> None:
        """Raise ApiError 415 for a content-type or charset that the endpoint does not read."""
        given = header(self.scope, b"content-type")
        if given is None:
            return
        kind = given.partition(";")[0].strip().lower()
        if kind and not types.takes(kind):
            raise _unsupported_type(
                f"content-type: {kind} is not supported; allowed: {types.allowed}"
            )
        charset = CHARSET.search(given) if types.is_text else None
        if charset is not None and charset[1].lower() not in UTF_8:
            raise _unsupported_type(
                f"content-type: charset {charset[1]} is not supported; allowed: utf-8"
            )

    async def read_body(self, seconds: float) -> None:
        """Read the whole body and keep it.

        Raises ClientGone, and ApiError 408 if the body does not arrive within `seconds`.
        """
        connection: Connection | None = self.scope.get(CONNECTION)
        if connection is not None and connection.has_body:
            self._body = await self._read()
            return
        try:
            async with asyncio.timeout(seconds):
                self._body = await self._read()
        except TimeoutError as error:
            raise ApiError(
                408,
                f"the body did not arrive within {seconds:g} s (receive_timeout)",
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from error

    async def _read(self) -> bytes:
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body: bytes = message.get("body", b"")
            if not message.get("more_body", False):
                return b"".join([*parts, body]) if parts else body
            parts.append(body)

    def check_size(self, most: int) -> None:
        """Raise ApiError 413 if the body is over `most` bytes and has no state in it.

        BodyLimit lets larger bodies pass where a state may be in them.
        """
        if len(self._body) > most and SNAPSHOT not in self._body:
            raise too_large(most, get_lifecycle(self).most_inline_bytes())

    def validated(self, validate: Callable[[Any], Model]) -> Model:
        """Return the body's JSON, validated; the body must have been read.

        `validate`: a method of pydantic's, which raises ValidationError. Raises ApiError 400.
        """
        body = self._body
        # A body without a content-type is taken for JSON.
        data = _parsed(body) if body and self._is_json() else body or None
        try:
            return validate(data)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from error

    def queried(self, model: type[Model]) -> Model:
        """Return the query string's parameters as `model`. Raises ApiError 400."""
        try:
            return model.model_validate_strings(dict(self.query_params))
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from error

    def _is_json(self) -> bool:
        kind = (header(self.scope, b"content-type") or "application/json").partition(";")[0]
        return _is_json(kind.strip().lower())


def _is_json(kind: str) -> bool:
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


# Charset names that stand for UTF-8. ASCII is a subset of it.
UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")
CHARSET = re.compile(r""";\s*charset\s*=\s*["']?([^;"'\s]+)""", re.IGNORECASE)
CURLS = "application/x-www-form-urlencoded"  # curl's default for any body


@dataclass(frozen=True)
class BodyTypes:
    """The content types that an endpoint reads. A request without a content-type is always read."""

    allowed: str  # for error messages
    takes: Callable[[str], bool]  # takes the content type in lower case, without parameters
    is_text: bool = False  # whether to check the charset


# Other wrong types are answered with 400 after the body has been read: it is often JSON that was
# sent with the wrong type, such as curl's default, and the error says so.
JSON = BodyTypes("application/json", lambda kind: not kind.startswith("multipart/"))
BYTES = BodyTypes(
    "application/octet-stream or no content-type, and the bytes themselves as the body",
    lambda kind: not kind.startswith(("multipart/", "text/")) and not _is_json(kind),
)
TEXT = BodyTypes(
    "text/plain (or another text/*), application/octet-stream or no content-type, and the text "
    "itself in UTF-8 as the body",
    lambda kind: kind.startswith("text/") or kind in ("application/octet-stream", CURLS),
    is_text=True,
)


def _unsupported_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_content_type")


def _parsed(body: bytes) -> Any:
    """Return the value of a JSON text. Raises ApiError 400 if it is not valid."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def get_inference(request: Request) -> InferenceRequest:
    """Return the HTTP request's InferenceRequest; a FastAPI dependency."""
    inference: InferenceRequest = request.scope[INFERENCE]
    return inference


# Arguments that endpoints of the routes below may have beside their body and query.
ARGUMENTS: dict[str, Callable[[Request], Any]] = {
    "id": lambda request: request.path_params["id"],
    "request": lambda request: request,
    "runtime": get_runtime,
    "inference": get_inference,
    "check": get_grammars,
}


class JsonRoute(APIRoute):
    """A route that takes strict JSON and refuses requests while the server is not ready.

    FastAPI routes to it and describes it in the API reference. The endpoint's arguments are filled
    in here, because FastAPI's dependencies take longer than all the rest of a request:

    - `body`: JSON, one validation; with a default value the body may be missing.
    - `query`: the query string, one validation.
    - `content`: the body's bytes.
    - the names in ARGUMENTS.
    """

    ends_early = False  # whether to cancel the endpoint's work when the client disconnects

    @cached_property
    def takes_state(self) -> bool:
        """Whether a request's body may have a state in it, so that it may be larger."""
        model: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
        return model is not None and "state" in model.model_fields

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        parameters, hints = signature(endpoint).parameters, get_type_hints(endpoint)
        names = set(parameters) - {"body", "query", "content"}
        model: type[BaseModel] | None = hints.get("body")
        query: type[BaseModel] | None = hints.get("query")
        optional = model is not None and parameters["body"].default is not Parameter.empty
        unknown = names - ARGUMENTS.keys()
        assert not unknown, f"{self.path}: nothing is known of the arguments {unknown}"
        takes_body = "POST" in (self.methods or ())
        # The fastest of pydantic's methods: none written in Python is around it.
        validate = None if model is None else TypeAdapter(model).validator.validate_python
        types = JSON if model is not None else BYTES if "content" in parameters else None
        providers = [(name, ARGUMENTS[name]) for name in sorted(names)]

        async def admitted(request: Request) -> Response:
            get_lifecycle(request).check_ready()
            runtime = get_runtime(request)
            self.check_room(request)
            strict = request
            if not isinstance(strict, StrictRequest):
                strict = StrictRequest(request.scope, request.receive)
            if takes_body:
                strict.check_encoding()
            if types is not None:
                strict.check_type(types)
            given: dict[str, Any] = {}
            if query is not None:
                given["query"] = strict.queried(query)
            if validate is not None or "content" in parameters:
                await strict.read_body(runtime.settings.receive_timeout)
            if validate is not None:
                strict.check_size(runtime.settings.max_body_bytes)
            if validate is not None and not (optional and not await strict.body()):
                given["body"] = strict.validated(validate)
            if "content" in parameters:
                given["content"] = await strict.body()
            for name, provide in providers:
                given[name] = provide(strict)
            work: Coroutine[Any, Any, Response] = endpoint(**given)
            if self.ends_early and len(getattr(strict, "_body", b"")) > LARGE:
                # Watch the client from here on, because tokenising a large body takes seconds.
                return await unless_client_leaves(strict.scope, strict.receive, work)
            return await work

        return admitted

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.entered(scope):
            await super().handle(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has this route's method; `handle` without FastAPI's part."""
        with self.entered(scope):
            response = await self._admitted(StrictRequest(scope, receive))
            await response(scope, receive, send)

    @cached_property
    def _admitted(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.get_route_handler()

    def entered(self, scope: Scope) -> AbstractContextManager[object]:
        """Return a context manager that lasts as long as the request is served."""
        # The model that is current now answers the request, even if a reload replaces it meanwhile.
        scope[RUNTIME] = scope["app"].state.lifecycle.current
        return nullcontext()

    def check_room(self, request: Request) -> None:
        """Raise an EngineError if the queue has no room for the request. By default: never."""


class RequestRoute(JsonRoute):
    """A route whose requests use the engine; they are in flight until their last byte."""

    ends_early = True

    def entered(self, scope: Scope) -> AbstractContextManager[object]:
        within = super().entered(scope)
        runtime: Runtime | None = scope[RUNTIME]
        if runtime is None:  # no model is loaded: the request will be refused
            return within
        owner, least_priority = scope[KEY_NAME] or "", scope[LEAST_PRIORITY]
        inference = scope[INFERENCE] = runtime.begin(scope[ARRIVED], owner, least_priority)
        inference.placement = runtime.session_header.placement(scope)
        inference.trace = scope.get(TRACE)
        if inference.trace is not None:
            inference.trace.model = runtime.model_name
        return inference


class InferenceRoute(RequestRoute):
    """A route whose requests run the model, and so need room in the request queue."""

    def check_room(self, request: Request) -> None:
        get_inference(request).check_room()
