"""POST /v1/chat/completions: OpenAI's chat API, for models whose tokenizer has a chat template."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Depends, Request, Response

from engine.protocol.events import ModelInfo
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.token_ids import pack_ids
from service.http.disconnect import unless_client_leaves
from service.http.errors import invalid
from service.http.json_response import JSONResponse, event, render
from service.http.scope import REQUEST_ID
from service.inference.generation import GenerationTask, Outcome, gather, stream
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.common import COMMON, fields_of, read_common
from service.inference.inputs.grammar_check import RequestCheck, get_grammars
from service.inference.inputs.sampling import (
    check_count,
    check_model,
    check_same_most,
    check_top,
    read_messages,
)
from service.inference.inputs.states import check_points, read_use
from service.inference.logprobs import LEAST_LOGPROB
from service.inference.output_text import OutputText, Piece, grouped, total_usage, usage
from service.inference.request_size import RequestSize
from service.inference.runtime import Runtime, get_runtime
from service.inference.sse import EventStream, error_body, render_each
from service.routes.base import InferenceRoute, get_inference
from service.routes.openai_format import OpenAIView
from service.schemas.chat import ChatRequest, ChatResponse
from service.schemas.common import statuses
from service.settings import Settings

router = APIRouter(route_class=InferenceRoute, tags=["inference"])

# The default of max_tokens. A recurrent model has no context limit, so nothing else would end the
# answer of a model that never ends its turn.
DEFAULT_TOKENS = 1024
SAMPLING = (
    "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "seed",
)  # fmt: skip


@router.post("/v1/chat/completions", responses=statuses(ChatResponse, streams=True))
async def chat_completions(
    body: Annotated[ChatRequest, Body()],
    request: Request,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    inference: Annotated[InferenceRequest, Depends(get_inference)],
    check: Annotated[RequestCheck, Depends(get_grammars)],
) -> Response:
    """Answer a conversation, as OpenAI's API does. 400 for a model without a chat template."""
    check_model(body.model, runtime.model_name, runtime.info)
    _check(body)
    runtime.session_header.check_none(
        request.scope, "/v1/chat/completions", "messages hold the whole conversation"
    )
    tasks = await _tasks(body, runtime, inference, check)
    view = _View(body, runtime, tasks, f"chatcmpl-{request.scope[REQUEST_ID]}")
    if body.stream:
        chunks = stream(
            runtime, inference, tasks, view.render, view.render_error, view.last, view.template
        )
        return EventStream(chunks)
    work = gather(runtime, inference, tasks)
    outcomes = await unless_client_leaves(request.scope, request.receive, work)
    tokens = sum(len(outcome.tokens) for outcome in outcomes)
    return await render(tokens, lambda: JSONResponse(view.response(outcomes)))


def _check(body: ChatRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "allowed with logprobs: true only")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "allowed with stream: true only")
    check_same_most(body.max_tokens, body.max_completion_tokens)


async def _tasks(
    body: ChatRequest, runtime: Runtime, inference: InferenceRequest, check: RequestCheck
) -> list[GenerationTask]:
    """Return one task for each choice."""
    settings, info = runtime.settings, runtime.info
    n = body.n or 1
    check_count("n", n, settings.max_n, "samples of one conversation")
    inference.reserve(n)
    fields = _fields(body, settings, info)
    [common] = await read_common(fields, 1, runtime, inference, check, times=n)
    params, end_id = common.params, runtime.chat.end_id  # the token that ends a turn
    if not (end_id is None or end_id in info.eos_token_ids or body.ignore_eos):
        params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, end_id))
    ids = await read_messages(body, body.messages, runtime.chat, info)
    cache = {name: getattr(body, name) for name in ("cache_salt", "cache_points", "no_cache")}
    use = await read_use(cache, runtime, inference, common.timeout, "")
    check_points(use, len(ids))
    size = RequestSize("messages", settings)
    size.add_prompt(len(ids), n)
    if params.logprobs is not None and not body.stream:
        size.add_reports(params.max_tokens, params.logprobs, n)
    packed = pack_ids(ids)
    return [
        GenerationTask(
            ids,
            packed,
            msgspec.structs.replace(params, choice=choice),
            common.stop,
            common.timeout,
            common.priority,
            body.stream_interval or settings.stream_interval,
            shared=n > 1,
            use=use,
            grammar_field=common.grammar_field,
        )
        for choice in range(n)
    ]


def _fields(body: ChatRequest, settings: Settings, info: ModelInfo) -> dict[str, list[Any]]:
    """Return the columns for `read_common`, from chat's field names and with chat's defaults."""
    fields = fields_of(body, (*COMMON, *SAMPLING))
    most = body.max_completion_tokens or body.max_tokens
    fields["max_tokens"] = [min(DEFAULT_TOKENS, settings.max_tokens) if most is None else most]
    if body.logprobs:
        fields["logprobs"] = [body.top_logprobs or 0]
        check_top("top_logprobs", body.top_logprobs or 0, settings, info)
    return fields


class _View(OpenAIView):
    """Renders answers in the format of OpenAI's chat API."""

    def __init__(
        self, body: ChatRequest, runtime: Runtime, tasks: list[GenerationTask], answer_id: str
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, runtime, tasks, answer_id, kind, len(tasks))
        self._body = body

    def response(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        outputs = [outcome.output for outcome in outcomes]
        return {
            **self._head,
            "choices": render_each(
                len(outcomes), lambda i: self._whole(i, outcomes[i]), self._failed
            ),
            "usage": total_usage(outputs, self._draws),
        }

    def _whole(self, index: int, outcome: Outcome) -> dict[str, Any]:
        if outcome.error is not None:
            return self._failed(index, outcome.error, outcome.text)
        message = {"role": "assistant", "content": outcome.text, "refusal": None}
        choice: dict[str, Any] = {"index": index, "message": message}
        choice["logprobs"] = self._logprobs(outcome.pieces)
        choice["finish_reason"] = outcome.output.finish_reason
        if self._ids:
            choice["prompt_token_ids"] = list(self._tasks[index].prompt)
            choice["token_ids"] = outcome.tokens
        return choice

    def _failed(self, index: int, error: Exception, text: str = "") -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": "error"}
        return {**choice, **error_body(error)}

    def render(self, index: int, output: OutputText, pieces: list[Piece]) -> bytes:
        """Return the events for one choice's new pieces."""
        groups = grouped(pieces, self._tasks[index].interval)
        return b"".join([self._chunk(index, output, group) for group in groups])

    def _is_plain(self, index: int) -> bool:
        return index in self._begun  # the first event differs: it tells the role

    def _plain_choice(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None,
        }  # fmt: skip

    def _chunk(self, index: int, output: OutputText, group: list[Piece]) -> bytes:
        choice = self._plain_choice(index, "".join([piece.text for piece in group]))
        choice["logprobs"] = self._logprobs(group)
        choice["finish_reason"] = group[-1].finish_reason
        if self._ids:
            choice["token_ids"] = [piece.token for piece in group if piece.token is not None]
        if index not in self._begun:
            self._begun.add(index)
            choice["delta"]["role"] = "assistant"
            if self._ids:
                choice["prompt_token_ids"] = list(self._tasks[index].prompt)
        content = self._event(choice)
        if self._options.continuous_usage_stats:
            content["usage"] = usage(output.prompt_tokens, group[-1].count)
        return event(content)

    def render_error(self, index: int, error: Exception) -> bytes:
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": "error"}
        return event({**self._head, "choices": [{**choice, **error_body(error)}]})

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            self._token_logprobs(piece.token, piece.logprobs)
            for piece in pieces
            if piece.token is not None and piece.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _token_logprobs(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        best = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return {
            **self._named(token, logprobs.logprob),
            "top_logprobs": [self._named(other, value) for other, value in best],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._tokenizer is not None  # messages cannot be read without one
        return {
            "token": self._tokenizer.name(token),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._tokenizer.bytes_of(token)),
        }
