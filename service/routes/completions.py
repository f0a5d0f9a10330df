"""POST /v1/completions: OpenAI's completions API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Depends, Request, Response

from engine.protocol.events import ModelInfo
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from service.http.disconnect import unless_client_leaves
from service.http.errors import invalid
from service.http.json_response import TOKENS_AT_ONCE, JSONResponse, event, render
from service.http.scope import REQUEST_ID
from service.inference.generation import GenerationTask, Outcome, choose, gather, stream
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.common import COMMON, fields_of, read_common
from service.inference.inputs.grammar_check import RequestCheck, get_grammars
from service.inference.inputs.sampling import (
    check_count,
    check_model,
    check_same_most,
    end_of_text,
    read_beginning,
)
from service.inference.inputs.states import FIELDS as STATES
from service.inference.inputs.states import check_points, kept_state, read_use
from service.inference.logprobs import LogprobArrays
from service.inference.output_text import OutputText, Piece, Whole, grouped, total_usage, usage
from service.inference.request_size import RequestSize
from service.inference.runtime import Runtime, get_runtime
from service.inference.sse import EventStream, error_body, render_each
from service.routes.base import InferenceRoute, get_inference
from service.routes.openai_format import OpenAIView
from service.schemas.common import statuses
from service.schemas.completions import (
    EXAMPLES,
    CompletionRequest,
    CompletionResponse,
)

router = APIRouter(route_class=InferenceRoute, tags=["inference"])

SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos",
    "logprobs",
)  # fmt: skip


@router.post("/v1/completions", responses=statuses(CompletionResponse, streams=True))
async def completions(
    body: Annotated[CompletionRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    inference: Annotated[InferenceRequest, Depends(get_inference)],
    check: Annotated[RequestCheck, Depends(get_grammars)],
) -> Response:
    """Continue prompts, as OpenAI's API does. Choice `i * n + j` is sample j of prompt i."""
    check_model(body.model, runtime.model_name, runtime.info)
    n = body.n or 1
    draws = body.best_of or n
    body.session_id = runtime.session_header.completed(request.scope, body.session_id, inference)
    _check(body, n, draws, inference.session_field)
    drawn = await _tasks(body, runtime, inference, check, draws)
    tasks = [task for i, task in enumerate(drawn) if i % draws < n]  # one per choice
    answer_id = f"cmpl-{request.scope[REQUEST_ID]}"
    echoed = sum(len(task.prompt) for task in tasks) if body.echo else 0
    view = await render(echoed, lambda: _View(body, runtime, tasks, answer_id))
    if body.stream:
        chunks = stream(
            runtime, inference, tasks, view.render, view.render_error, view.last, view.template
        )
        return EventStream(chunks)
    work = gather(runtime, inference, drawn)
    outcomes = await unless_client_leaves(request.scope, request.receive, work)
    tokens = echoed + sum(len(outcome.tokens) for outcome in outcomes)

    def respond() -> JSONResponse:
        content = view.response(choose(outcomes, draws, n))
        content["usage"] = total_usage([outcome.output for outcome in outcomes], draws)
        return JSONResponse(content)

    return await render(tokens, respond)


def _check(body: CompletionRequest, n: int, draws: int, session: str) -> None:
    """Check fields that depend on each other; `session` is what named the session, if any did."""
    if draws < n:
        raise invalid("best_of", f"is {draws}; allowed: null or at least n ({n})")
    if draws > n and body.stream:
        raise invalid("best_of", f"is {draws}; allowed with stream: null or n ({n})")
    if body.suffix:
        raise invalid("suffix", "is not supported; allowed: null or an empty string")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "allowed with stream: true only")
    check_same_most(body.max_tokens, body.max_completion_tokens)
    if body.session_id is not None:
        if draws > 1 or _is_many(body.prompt):
            raise invalid(session, "allowed with one prompt, n 1 and best_of 1 only")
        if body.echo and body.logprobs is not None:
            raise invalid(session, "not allowed together with both echo and logprobs")
    if body.return_state and draws > n:
        raise invalid("return_state", f"allowed with best_of null or n ({n}) only")


def _is_many(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


async def _tasks(
    body: CompletionRequest,
    runtime: Runtime,
    inference: InferenceRequest,
    check: RequestCheck,
    draws: int,
) -> list[GenerationTask]:
    """Return one task for each sample: `draws` tasks for each prompt."""
    settings, info, tokenizer = runtime.settings, runtime.info, runtime.tokenizer
    n = body.n or 1
    states = {name: getattr(body, name) for name in STATES}
    nothing: Any = [] if body.state or body.session_id else None  # the meaning of a null prompt
    prompts: list[Any] = [nothing if body.prompt is None else body.prompt]
    if prompts == [None]:
        prompts = [end_of_text("prompt", info)]
    names = ["prompt"]
    if _is_many(body.prompt):
        assert isinstance(body.prompt, list)
        prompts = body.prompt
        names = [f"prompt[{i}]" for i in range(len(prompts))]
    check_count("prompt", len(prompts), settings.max_prompts, "prompts")
    check_count("n" if draws == n else "best_of", draws, settings.max_n, "samples of one prompt")
    inference.reserve(len(prompts) * draws)
    fields = fields_of(body, (*COMMON, *SAMPLING))
    if body.max_tokens is None:
        fields["max_tokens"] = [body.max_completion_tokens]
    if draws > n and body.logprobs is None:
        fields["logprobs"] = [0]  # best_of chooses by them
    times = len(prompts) * draws
    [common] = await read_common(fields, 1, runtime, inference, check, times=times)
    params = common.params
    ends: frozenset[int] = frozenset()
    if body.echo and body.logprobs is not None and (params.max_tokens, params.min_tokens) == (1, 0):
        params, ends = _with_ends(params, info)
    size = RequestSize("prompt", settings)
    tasks = []
    for name, prompt in zip(names, prompts, strict=True):
        seed = random.getrandbits(63) if body.seed is None else body.seed % 2**63
        use = await read_use(states, runtime, inference, common.timeout, prompt)
        ids = await read_beginning(
            prompt, name, tokenizer, info, use=use, parse_special=body.parse_special
        )
        check_points(use, len(ids))
        size.add_prompt(len(ids), draws)
        if params.logprobs is not None:
            reported = len(ids) if body.echo and body.logprobs is not None else 0
            reported += 0 if body.stream else params.max_tokens
            size.add_reports(reported, params.logprobs, draws)
        packed = pack_ids(ids)
        for choice in range(draws):
            tasks.append(
                GenerationTask(
                    ids,
                    packed,
                    msgspec.structs.replace(params, seed=seed, choice=choice),
                    common.stop,
                    common.timeout,
                    common.priority,
                    body.stream_interval or settings.stream_interval,
                    score_top=body.logprobs if body.echo else None,
                    shared=draws > 1,
                    ends=ends,
                    use=use,
                    grammar_field=common.grammar_field,
                )
            )
    return tasks


def _with_ends(params: SamplingParams, info: ModelInfo) -> tuple[SamplingParams, frozenset[int]]:
    """Return parameters that deliver even a token that ends the text, and the tokens that end it.

    Clients that score a prompt by its echo rely on exactly one token after it: lm-eval cuts off the
    last entry of the arrays.
    """
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends.update(info.eos_token_ids)
    delivered = msgspec.structs.replace(params, ignore_eos=True, stop_token_ids=())
    return delivered, frozenset(ends)


class _View(OpenAIView):
    """Renders answers in the format of OpenAI's completions API."""

    def __init__(
        self, body: CompletionRequest, runtime: Runtime, tasks: list[GenerationTask], answer_id: str
    ) -> None:
        super().__init__(body, runtime, tasks, answer_id, "text_completion", body.n or 1)
        self._body = body
        # Texts of the prompts, with echo.
        self._echoes: list[str] = []
        if body.echo and self._tokenizer:
            decode = self._tokenizer.decode_open
            texts = [
                decode(task.prompt, begins=not task.use.goes_on) for task in tasks[:: self._draws]
            ]
            self._echoes = [text for text in texts for _ in range(self._draws)]
        self._echoed: set[int] = set()  # choices whose prompt has been streamed

    def response(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, without its usage."""
        choices = render_each(len(outcomes), lambda i: self._whole(i, outcomes[i]), self._failed)
        return {**self._head, "choices": choices}

    def render(
        self, index: int, output: OutputText, pieces: list[Piece]
    ) -> bytes | Coroutine[Any, Any, bytes]:
        """Return the events for one choice's new pieces; with echo, first one for the prompt."""
        prompt = self._tasks[index].prompt
        if not self._body.echo or index in self._echoed:
            return self._frames(index, output, pieces)
        if not (pieces or len(output.scores) == self._tasks[index].scored):
            return b""
        self._echoed.add(index)

        def both() -> bytes:
            return self._chunk(index, output, []) + self._frames(index, output, pieces)

        return asyncio.to_thread(both) if len(prompt) > TOKENS_AT_ONCE else both()

    def _frames(self, index: int, output: OutputText, pieces: list[Piece]) -> bytes:
        groups = grouped(pieces, self._tasks[index].interval)
        return b"".join([self._chunk(index, output, group) for group in groups])

    def _is_plain(self, index: int) -> bool:
        return not self._body.echo or index in self._echoed

    def _plain_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, text, None, None)

    def render_error(self, index: int, error: Exception) -> bytes:
        return event({**self._head, "choices": [self._failed(index, error)]})

    def _whole(self, index: int, outcome: Outcome) -> dict[str, Any]:
        if outcome.error is not None:
            return self._failed(index, outcome.error)
        choice = self._choice(
            index,
            self._echo(index) + outcome.text,
            self._arrays(index, outcome.output, outcome.told, echo=bool(self._body.echo)),
            outcome.output.finish_reason,
        )
        if self._ids:
            choice["prompt_token_ids"] = list(self._tasks[index].prompt)
            choice["token_ids"] = outcome.tokens
        if self._tasks[index].use.keep is not None:
            choice["state"] = kept_state(outcome.output.finished)
        return choice

    def _chunk(self, index: int, output: OutputText, group: list[Piece]) -> bytes:
        """Return one event: a group of pieces, or the echoed prompt if the group is empty."""
        last = group[-1] if group else None
        choice = self._choice(
            index,
            "".join([piece.text for piece in group]) if group else self._echo(index),
            self._arrays(index, output, group, echo=not group),
            last.finish_reason if last else None,
        )
        if self._ids:
            choice["token_ids"] = [piece.token for piece in group if piece.token is not None]
            if index not in self._begun:
                choice["prompt_token_ids"] = list(self._tasks[index].prompt)
        self._begun.add(index)
        if last and last.finish_reason and self._tasks[index].use.keep is not None:
            choice["state"] = kept_state(output.finished)
        content = self._event(choice)
        if self._options.continuous_usage_stats:
            content["usage"] = usage(output.prompt_tokens, last.count if last else 0)
        return event(content)

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text if self._tokenizer else None,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _failed(self, index: int, error: Exception) -> dict[str, Any]:
        return {**self._choice(index, "", None, "error"), **error_body(error)}

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _arrays(
        self, index: int, output: OutputText, told: Whole | list[Piece], *, echo: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        arrays = LogprobArrays(self._tokenizer)
        if echo:
            task = self._tasks[index]
            begins = not task.use.goes_on
            arrays.add_prompt(task.prompt, output.scores, task.use.first_scored, begins=begins)
        arrays.add_told(told, shift=len(self._echo(index)))
        return arrays.to_dict()
