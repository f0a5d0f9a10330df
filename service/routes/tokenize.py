"""POST /tokenize and POST /detokenize: the model's tokenizer alone.

An answer holds at most `max_reports` tokens, because it is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from engine.errors import InvalidRequest
from service.http.errors import invalid
from service.http.json_response import JSONResponse, render
from service.inference.inputs.sampling import check_count, check_ids, check_model, read_messages
from service.inference.runtime import Runtime, get_runtime
from service.routes.base import JsonRoute
from service.schemas.common import statuses
from service.schemas.tokenize import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from service.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute, tags=["tokenizer"])
CurrentRuntime = Annotated[Runtime, Depends(get_runtime)]


@router.post("/tokenize", responses=statuses(TokenizeResponse))
async def tokenize(
    body: Annotated[TokenizeRequest, Body(openapi_examples=TOKENIZE)], runtime: CurrentRuntime
) -> Response:
    """Return the token ids of a text, or of a conversation."""
    check_model(body.model, runtime.model_name, runtime.info)
    param = "messages" if body.prompt is None else "prompt"
    tokenizer = _tokenizer(runtime, param)
    if body.prompt is None:
        assert body.messages is not None
        ids = await read_messages(body, body.messages, runtime.chat, runtime.info)
    else:
        special = body.add_special_tokens is not False
        try:
            ids = await tokenizer.encode_async(body.prompt, marks=special, ends=True)
        except InvalidRequest as error:
            raise invalid(param, error.message) from error
    check_count(param, len(ids), runtime.settings.max_reports, "tokens")

    def answer() -> JSONResponse:
        names = [tokenizer.name(token) for token in ids] if body.return_token_strs else None
        return JSONResponse({"count": len(ids), "tokens": list(ids), "token_strs": names})

    return await render(len(ids), answer)


@router.post("/detokenize", responses=statuses(DetokenizeResponse))
async def detokenize(
    body: Annotated[DetokenizeRequest, Body(openapi_examples=DETOKENIZE)], runtime: CurrentRuntime
) -> Response:
    """Return the text of token ids."""
    check_model(body.model, runtime.model_name, runtime.info)
    tokenizer, tokens = _tokenizer(runtime, "tokens"), body.tokens
    check_count("tokens", len(tokens), runtime.settings.max_reports, "tokens")
    check_ids("tokens", tokens, runtime.info)
    return await render(len(tokens), lambda: _text(tokenizer, tokens))


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> JSONResponse:
    return JSONResponse({"prompt": tokenizer.decode(tokens)})


def _tokenizer(runtime: Runtime, param: str) -> Tokenizer:
    if runtime.tokenizer is None:
        raise invalid(param, "the model has no tokenizer.json or tokenizer.model")
    return runtime.tokenizer
