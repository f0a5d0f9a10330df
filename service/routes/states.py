"""/v1/states: create, read, list, fork, delete, download and import kept states.

Requests see the states of their own API key's name only.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from msgspec import structs

from engine.protocol.requests import KeepState
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateReply
from engine.protocol.token_ids import pack_ids
from service.http.disconnect import unless_client_leaves
from service.http.errors import invalid
from service.http.json_response import JSONResponse
from service.http.upload import Upload
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.sampling import check_model, read_priority, read_prompt, read_timeout
from service.inference.inputs.state_upload import read_text, read_whole
from service.inference.inputs.states import check_points, kept_state, read_use, state_object
from service.inference.output_text import usage
from service.inference.request_size import RequestSize
from service.inference.runtime import Runtime, get_runtime
from service.routes.base import TEXT as TEXT_TYPES
from service.routes.base import InferenceRoute, RequestRoute, StrictRequest, get_inference
from service.schemas.common import statuses
from service.schemas.states import (
    CREATE_EXAMPLES,
    DeletedState,
    ForkRequest,
    KeptState,
    ListQuery,
    StateList,
    StateQuery,
    StateRequest,
    StateResponse,
    TextQuery,
)

making = APIRouter(route_class=InferenceRoute, tags=["states"])
router = APIRouter(route_class=RequestRoute, tags=["states"])

CurrentFlight = Annotated[InferenceRequest, Depends(get_inference)]
StatePath = Annotated[str, Path(description="The state's id.")]
BINARY = {"schema": {"type": "string", "format": "binary"}}
FILE: dict[str, Any] = {"content": {"application/octet-stream": BINARY}}
ERRORS = {status: told for status, told in statuses(KeptState).items() if status != 200}
TEXT: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@making.post("/v1/states", responses=statuses(StateResponse))
async def create(
    body: Annotated[StateRequest, Body(openapi_examples=CREATE_EXAMPLES)],
    request: Request,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    inference: CurrentFlight,
) -> Response:
    """Read a prompt and keep the state after it.

    With `state` the prompt continues that state. The new state is kept under `id`, where it
    replaces what was there, or under a new id.
    """
    check_model(body.model, runtime.model_name, runtime.info)
    inference.reserve(1)
    timeout = read_timeout(body.timeout, runtime.settings)
    priority = read_priority(body.priority, inference.least_priority)
    size = RequestSize("prompt", runtime.settings)
    if body.turn is not None and body.state is None:
        raise invalid("turn", "allowed with state only: without one a new text begins")
    fields = ("state", "turn", "cache_salt", "cache_points", "no_cache")
    values = {name: getattr(body, name) for name in fields}
    use = await read_use(values, runtime, inference, timeout, body.prompt)
    ids = await read_prompt(
        body.prompt,
        "prompt",
        runtime.tokenizer,
        runtime.info,
        begins=use.begins,
        may_be_empty=use.goes_on,
    )
    check_points(use, len(ids))
    size.add_prompt(len(ids))
    inference.check_tokens(len(ids), 1)
    export = body.return_state == "snapshot"
    if export and body.ttl is not None and body.id is None:
        raise invalid("ttl", "allowed with an id only, where return_state is snapshot")
    # If the id belongs to another engine than the source state, the new state moves there at the
    # end.
    apart = bool(body.id and use.source) and inference.keeps_apart(use.source, body.id or "")
    id = "" if apart else body.id or ""
    store = bool(body.id) or not export
    keep = KeepState(
        id=id, ttl=body.ttl, export=export, store=store, must_last=not apart, brief=apart
    )
    inference.keep_field = "id"
    inference.submit(
        pack_ids(ids),
        sampling=SamplingParams(max_tokens=0),
        stream=False,
        timeout=timeout,
        priority=priority,
        **{**use.fields(), "keep": keep},
    )
    finished = await unless_client_leaves(request.scope, request.receive, read_whole(inference))
    if apart and finished.state is not None:
        inference.borrow(finished.state.id)  # deletes it if the move fails
        moved = await inference.ask_state(
            "move", id=finished.state.id, target=body.id, ttl=body.ttl
        )
        finished = structs.replace(finished, state=moved.states[0])
    told = {**(kept_state(finished) or {}), "model": runtime.model_name}
    return JSONResponse({**told, "usage": usage(len(ids), 0, finished.cached_tokens)})


@making.post("/v1/states/text", responses=statuses(StateResponse), openapi_extra=TEXT)
async def create_of_text(
    query: Annotated[TextQuery, Query()],
    request: StrictRequest,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    inference: CurrentFlight,
) -> Response:
    """Read a long text, which is the request's body, into a kept state.

    The body is UTF-8 text of up to `max_text_bytes`. It is read piece by piece while it arrives.
    Other content types (forms, JSON) and charsets are answered with 415. A state that was kept
    under `id` before stays until the whole text has been read.
    """
    request.check_type(TEXT_TYPES)
    priority = read_priority(query.priority, inference.least_priority)
    body = Upload(request.scope, request.receive, runtime.settings.max_body_bytes)
    work = read_text(body, runtime, inference, query, priority)
    info, tokens, cached = await body.work(work)
    told = {**state_object(info), "snapshot": None, "model": runtime.model_name}
    return JSONResponse({**told, "usage": usage(tokens, 0, cached)})


@router.post("/v1/states/import", responses=statuses(KeptState))
async def import_state(
    content: Annotated[bytes, Body(media_type="application/octet-stream")],
    query: Annotated[StateQuery, Query()],
    inference: CurrentFlight,
) -> Response:
    """Keep a state that was downloaded.

    The body is the file; 400 if it is not a state of this model.
    """
    reply = await inference.ask_state(
        "import", content=content, target=query.id or "", ttl=query.ttl
    )
    return _one(reply)


@router.get("/v1/states", responses=statuses(StateList))
async def list_states(query: Annotated[ListQuery, Query()], inference: CurrentFlight) -> Response:
    """List the states of the API key's name in the order of their ids, a page at a time.

    Listing does not count as a use: it does not extend a state's lifetime.
    """
    reply = await inference.ask_state("list", id=query.after or "", limit=query.limit)
    ids = [info.id for info in reply.states]
    return JSONResponse(
        {
            "object": "list",
            "data": [state_object(info) for info in reply.states],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": reply.more,
        }
    )


@router.get("/v1/states/{id}", responses=statuses(KeptState))
async def get_state(id: StatePath, inference: CurrentFlight) -> Response:
    """Describe one state."""
    return _one(await inference.ask_state("get", id=id))


@router.delete("/v1/states/{id}", responses=statuses(DeletedState))
async def delete_state(id: StatePath, inference: CurrentFlight) -> Response:
    """Delete a state; 409 while a running request is going to replace it."""
    await inference.ask_state("delete", id=id)
    return JSONResponse({"id": id, "object": "state", "deleted": True})


@router.post("/v1/states/{id}/fork", responses=statuses(KeptState))
async def fork_state(
    id: StatePath,
    inference: CurrentFlight,
    body: Annotated[ForkRequest, Body()] = ForkRequest(),  # noqa: B008
) -> Response:
    """Keep the same state under another id, independent of the first one.

    It costs no computation and no memory for the state itself.
    """
    return _one(await inference.ask_state("fork", id=id, target=body.id or "", ttl=body.ttl))


@router.get(
    "/v1/states/{id}/content",
    response_class=Response,
    responses={**ERRORS, 200: {**FILE, "description": "The file."}},
)
async def get_content(id: StatePath, inference: CurrentFlight) -> Response:
    """Download a state as a safetensors file, which any server of the same model can import."""
    reply = await inference.ask_state("export", id=id)
    name = f'attachment; filename="{reply.states[0].id.replace(":", "_")}.safetensors"'
    headers = {"content-disposition": name}
    return Response(reply.content, media_type="application/octet-stream", headers=headers)


def _one(reply: StateReply) -> JSONResponse:
    (info,) = reply.states
    return JSONResponse(state_object(info))
