"""POST /v1/generate: continue a batch of prompts, each with its own parameters."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response

from engine.protocol.token_ids import pack_ids
from service.http.disconnect import unless_client_leaves
from service.http.errors import invalid
from service.http.json_response import JSONResponse, event, render
from service.http.scope import REQUEST_ID
from service.inference.event_template import HOLE, Template
from service.inference.generation import GenerationTask, Outcome, gather, stream
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.common import read_common
from service.inference.inputs.grammar_check import RequestCheck, get_grammars
from service.inference.inputs.sampling import check_count, check_model, read_prompt
from service.inference.inputs.states import FIELDS as STATES
from service.inference.inputs.states import NO_STATES, check_points, kept_state, read_use
from service.inference.logprobs import LogprobArrays
from service.inference.output_text import OutputText, Piece, Whole, grouped, total_usage
from service.inference.request_size import RequestSize
from service.inference.runtime import Runtime, get_runtime
from service.inference.sse import EventStream, error_body, render_each
from service.routes.base import InferenceRoute, get_inference
from service.schemas.common import statuses
from service.schemas.generate import EXAMPLES, GenerateRequest, GenerateResponse

router = APIRouter(route_class=InferenceRoute, tags=["inference"])

ONE_FOR_ALL = {"prompts", "model", "parse_special", "stream", "stream_interval"}
PER_PROMPT = GenerateRequest.model_fields.keys() - ONE_FOR_ALL
LISTS = ("stop", "stop_token_ids", "cache_points")  # parameters that are lists (PerPromptList)


@router.post("/v1/generate", responses=statuses(GenerateResponse, streams=True))
async def generate(
    body: Annotated[GenerateRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    inference: Annotated[InferenceRequest, Depends(get_inference)],
    check: Annotated[RequestCheck, Depends(get_grammars)],
) -> Response:
    """Continue a batch of prompts, each with its own parameters.

    With `stream` the answer is server-sent events, each with the `index` of its prompt; the last
    event of a prompt has its `finish_reason` and `usage`.
    """
    check_model(body.model, runtime.model_name, runtime.info)
    check_count("prompts", len(body.prompts), runtime.settings.max_prompts, "prompts")
    body.session_id = runtime.session_header.completed(request.scope, body.session_id, inference)
    inference.reserve(len(body.prompts))
    tasks = await _tasks(body, runtime, inference, check)
    answer_id = f"gen-{request.scope[REQUEST_ID]}"
    if body.stream:
        return _stream(runtime, inference, tasks, answer_id)
    work = gather(runtime, inference, tasks)
    outcomes = await unless_client_leaves(request.scope, request.receive, work)
    tokens = sum(len(outcome.tokens) for outcome in outcomes)
    return await render(tokens, lambda: _response(runtime, tasks, outcomes, answer_id))


def _response(
    runtime: Runtime, tasks: list[GenerationTask], outcomes: list[Outcome], answer_id: str
) -> JSONResponse:
    total = total_usage([outcome.output for outcome in outcomes])
    results = render_each(
        len(outcomes), lambda i: _result(i, outcomes[i], tasks[i], runtime), _failed
    )
    return JSONResponse(
        {"id": answer_id, "model": runtime.model_name, "results": results, "usage": total}
    )


async def _tasks(
    body: GenerateRequest, runtime: Runtime, inference: InferenceRequest, check: RequestCheck
) -> list[GenerationTask]:
    settings, info, tokenizer = runtime.settings, runtime.info, runtime.tokenizer
    count = len(body.prompts)
    given = sorted(PER_PROMPT & body.model_fields_set)
    columns = {
        name: _column(value, name, count)
        for name in given
        if (value := getattr(body, name)) is not None
    }
    states = {name: columns.pop(name) for name in STATES if name in columns}
    if states:
        sessions = [one for one in states.get("session_id", ()) if one is not None]
        if len(set(sessions)) < len(sessions):
            raise invalid(
                inference.session_field,
                "several prompts name the same session; allowed: one prompt for each session",
            )
    common = await read_common(
        columns, count, runtime, inference, check, name=lambda i, field: _path(body, field, i)
    )
    interval = body.stream_interval or settings.stream_interval
    size = RequestSize("prompts", settings)
    use = NO_STATES
    tasks = []
    for i, prompt in enumerate(body.prompts):
        asked = common[i]
        params = asked.params
        if states:
            wanted = {name: values[i] for name, values in states.items()}
            path = partial(_path, body, i=i)
            use = await read_use(wanted, runtime, inference, asked.timeout, prompt, path)
        ids = await read_prompt(
            prompt,
            f"prompts[{i}]",
            tokenizer,
            info,
            may_be_empty=use.goes_on,
            begins=use.begins,
            parse_special=bool(body.parse_special),
        )
        if states:
            check_points(use, len(ids), path)
        size.add_prompt(len(ids))
        if params.logprobs is not None and not body.stream:
            size.add_reports(params.max_tokens, params.logprobs)
        tasks.append(
            GenerationTask(
                ids,
                pack_ids(ids),
                params,
                asked.stop,
                asked.timeout,
                asked.priority,
                interval,
                use=use,
                grammar_field=asked.grammar_field,
            )
        )
    return tasks


def _path(body: GenerateRequest, field: str, i: int) -> str:
    """Return the name of a field of prompt `i` for error messages, such as `seed[3]`."""
    value = getattr(body, field)
    each = isinstance(value, list) and len(value) == len(body.prompts)
    if field in LISTS:
        each = each and isinstance(value[i], list)
    return f"{field}[{i}]" if each else field


def _column(value: Any, name: str, prompts: int) -> list[Any]:
    """Return a parameter's value for each prompt. Raises ApiError 400 for a wrong number."""
    if not isinstance(value, list):
        return [value] * prompts
    if name in LISTS and not any(item is None or isinstance(item, list) for item in value):
        return [value] * prompts
    if len(value) != prompts:
        raise invalid(
            name,
            f"has {len(value)} values for {prompts} prompts; allowed: one value, or one per prompt",
        )
    return list(value)


def _failed(index: int, error: Exception) -> dict[str, Any]:
    return {"index": index, **error_body(error)}


def _result(index: int, outcome: Outcome, task: GenerationTask, runtime: Runtime) -> dict[str, Any]:
    if outcome.error is not None:
        return _failed(index, outcome.error)
    result = {
        "index": index,
        "text": outcome.text if runtime.tokenizer else None,
        "token_ids": outcome.tokens,
        "finish_reason": outcome.output.finish_reason,
        "logprobs": _logprobs(outcome.told, task, runtime),
        "usage": outcome.output.usage(),
    }
    if task.use.keep is not None:
        result["state"] = kept_state(outcome.output.finished)
    return result


def _logprobs(
    told: Whole | list[Piece], task: GenerationTask, runtime: Runtime
) -> dict[str, Any] | None:
    if task.params.logprobs is None:
        return None
    arrays = LogprobArrays(runtime.tokenizer)
    arrays.add_told(told)
    return arrays.to_dict()


def _stream(
    runtime: Runtime, inference: InferenceRequest, tasks: list[GenerationTask], answer_id: str
) -> EventStream:
    def frames(index: int, output: OutputText, pieces: list[Piece]) -> bytes:
        groups = grouped(pieces, tasks[index].interval)
        return b"".join([frame(index, output, group) for group in groups])

    def content_of(index: int, text: str | None) -> dict[str, Any]:
        return {"id": answer_id, "index": index, "text": text}

    def frame(index: int, output: OutputText, group: list[Piece]) -> bytes:
        text = "".join([piece.text for piece in group]) if runtime.tokenizer else None
        finish_reason = group[-1].finish_reason
        content = {
            **content_of(index, text),
            "token_ids": [piece.token for piece in group if piece.token is not None],
            "finish_reason": finish_reason,
            "logprobs": _logprobs(group, tasks[index], runtime),
        }
        if finish_reason is not None:
            content["usage"] = output.usage()
            if tasks[index].use.keep is not None:
                content["state"] = kept_state(output.finished)
        return event(content)

    def render_error(index: int, error: Exception) -> bytes:
        return event({"id": answer_id, **_failed(index, error)})

    parts = None if runtime.parts is None else runtime.parts.with_ids

    def template_of(index: int) -> Template | None:
        if parts is None:
            return None
        return Template(content_of(index, HOLE) | {"finish_reason": None, "logprobs": None}, parts)

    chunks = stream(runtime, inference, tasks, frames, render_error, lambda _: b"", template_of)
    return EventStream(chunks)
