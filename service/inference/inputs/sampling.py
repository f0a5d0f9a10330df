"""Reads prompts as token ids, sampling parameters, timeouts, priorities and stop strings.

The checks here need the model (its tokenizer and vocabulary) or the server's limits. All other
checks are in service.schemas.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from engine.errors import InvalidRequest
from engine.protocol.events import ModelInfo
from engine.protocol.requests import MOST_PRIORITY
from engine.protocol.sampling_params import SamplingParams
from service.http.errors import ApiError, invalid
from service.inference.inputs.states import StateUse
from service.schemas.chat import ChatMessage, TemplateFields
from service.settings import Settings
from service.text.chat_template import Asked, ChatTemplate
from service.text.stop import StopStrings
from service.text.tokenizer import THREAD_CHARACTERS, Tokenizer

KEPT_CHARACTERS = 256  # of stop strings whose tables are cached for later requests


def check_count(param: str, count: int, limit: int, unit: str) -> None:
    """Raise ApiError 400 for a `count` of more than `limit`."""
    if count > limit:
        raise invalid(param, f"{count} {unit}, but at most {limit} are allowed")


def check_model(asked: str | None, served: str, info: ModelInfo) -> None:
    """Raise ApiError 404 if a request names a model that is not served."""
    if asked not in (None, served, info.name):
        raise ApiError(
            404,
            f"model: {asked!r} is not served; allowed: {served!r}",
            param="model",
            code="model_not_found",
        )


def check_same_most(most: int | None, completion: int | None) -> None:
    """Raise ApiError 400 if max_tokens and max_completion_tokens, its other name, differ."""
    if None not in (most, completion) and most != completion:
        raise invalid(
            "max_tokens", f"is {most}; allowed: null or max_completion_tokens ({completion})"
        )


async def read_prompt(
    prompt: str | list[int],
    param: str,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    *,
    may_be_empty: bool = False,
    begins: bool = True,
    ends: bool = False,
    marks: bool = True,
    parse_special: bool = False,
) -> array[int]:
    """Return the token ids of a prompt, which is a text or a list of ids.

    `begins`, `ends`, `marks` and `parse_special` are those of `Tokenizer.encode`. Raises ApiError
    400, which names `param`: for an empty prompt unless `may_be_empty`, for ids that do not exist,
    and for text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise invalid(
                param,
                "text cannot be read, because the model has no tokenizer.json or tokenizer.model; "
                "give token ids",
            )
        try:
            ids = await tokenizer.encode_async(
                prompt, begins=begins, ends=ends, marks=marks, parse_special=parse_special
            )
        except InvalidRequest as error:
            raise invalid(param, error.message) from error
    else:
        ids = array("i", prompt)
        if ids and max(ids) >= info.vocab_size:
            wrong = next(i for i, token in enumerate(ids) if token >= info.vocab_size)
            raise invalid(
                f"{param}[{wrong}]",
                f"token id {ids[wrong]} does not exist; allowed: 0 to {info.vocab_size - 1}",
            )
    if not ids and not may_be_empty:
        raise invalid(param, "is empty; at least one token is needed")
    return ids


async def read_messages(
    body: TemplateFields, messages: Sequence[ChatMessage], template: ChatTemplate, info: ModelInfo
) -> array[int]:
    """Return the token ids of a conversation, rendered by the chat template as `body` asks.

    Raises ApiError 400, also if the template renders no token.
    """
    add = body.add_generation_prompt is not False
    if add and body.continue_final_message:
        raise invalid(
            "continue_final_message",
            "not allowed with add_generation_prompt, which is true by default; set it to false",
        )
    variables = body.chat_template_kwargs or {}
    reserved = template.reserved
    wrong = next((name for name in variables if name in reserved), None)
    if wrong is not None:
        raise invalid(
            f"chat_template_kwargs.{wrong}", "not allowed: the server sets this variable itself"
        )
    asked = Asked(add, bool(body.continue_final_message), variables)
    plain = [_plain_message(message) for message in messages]
    try:
        ids = await template.encode(plain, asked)
    except InvalidRequest as error:
        raise invalid("messages", error.message) from error
    if not ids:
        raise invalid("messages", "the chat template renders an empty text from them")
    check_ids("messages", ids, info)
    return ids


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message for the template, which knows no developer role: it becomes system."""
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": message.content}
    return plain if message.name is None else {**plain, "name": message.name}


async def read_beginning(
    prompt: str | list[int],
    param: str,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    *,
    use: StateUse,
    parse_special: bool | None,
) -> array[int]:
    """Return the token ids of a prompt to continue, as `read_prompt` does.

    Without a state or session, an empty text stands for the end-of-text token, unless the tokenizer
    puts a token before each text.
    """
    after_nothing = not use.source
    ids = await read_prompt(
        prompt,
        param,
        tokenizer,
        info,
        may_be_empty=use.goes_on or (after_nothing and prompt == ""),
        begins=use.begins,
        parse_special=bool(parse_special),
    )
    if after_nothing and not ids:
        return array("i", end_of_text(param, info))
    return ids


def end_of_text(param: str, info: ModelInfo) -> list[int]:
    """Return the end-of-text token, after which a model generates the beginning of a text.

    It is the first one if there are several. Raises ApiError 400 if the model has none.
    """
    if info.eos_token_id is None:
        raise invalid(param, "is empty, and the model has no end-of-text token to use instead")
    return [info.eos_token_id]


def sampling_params(
    values: Mapping[str, Any], settings: Settings, info: ModelInfo
) -> SamplingParams:
    """Return the SamplingParams of a request's fields.

    `values`: fields of SamplingParams; None means the default, and a random `seed`. Raises ApiError
    400 for values beyond the server's limits or the model's vocabulary.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if "max_tokens" in given:
        _check_most("max_tokens", given["max_tokens"], settings.max_tokens)
    if "logprobs" in given:
        check_top("logprobs", given["logprobs"], settings, info)
    if "stop_token_ids" in given:
        ids = given["stop_token_ids"] = tuple(given["stop_token_ids"])
        check_count("stop_token_ids", len(ids), settings.max_stop_token_ids, "token ids")
        check_ids("stop_token_ids", ids, info)
    if "logit_bias" in given:
        bias = given["logit_bias"]
        check_count("logit_bias", len(bias), settings.max_logit_bias, "entries")
        check_ids("logit_bias", bias, info)
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    given["seed"] = given.get("seed", random.getrandbits(63)) % 2**63
    params = SamplingParams(**given)
    if params.min_tokens > params.max_tokens:
        raise invalid(
            "min_tokens", f"is {params.min_tokens}; allowed: up to max_tokens ({params.max_tokens})"
        )
    return params


def read_timeout(value: float | None, settings: Settings) -> float:
    """Return a request's timeout in seconds. Raises ApiError 400 beyond max_request_timeout."""
    if value is None:
        return min(settings.request_timeout, settings.max_request_timeout)
    if value > settings.max_request_timeout:
        raise invalid(
            "timeout", f"is {value:g} seconds; allowed: up to {settings.max_request_timeout:g}"
        )
    return value


def read_priority(value: int | None, least: int) -> int:
    """Return a request's priority. Raises ApiError 400 below `least`, the key's limit."""
    if value is None:
        return max(least, 0)
    if value < least:
        raise invalid("priority", f"is {value}; allowed with this key: {least} to {MOST_PRIORITY}")
    return value


async def read_stops(
    stops: Sequence[str | list[str] | None], settings: Settings, tokenizer: Tokenizer | None
) -> list[StopStrings | None]:
    """Return the stop strings of each prompt; equal ones share their tables.

    Raises ApiError 400 beyond the server's limits, and if the model has no tokenizer.
    """
    lists = [(stop,) if isinstance(stop, str) else tuple(stop or ()) for stop in stops]
    distinct = set(lists) - {()}
    for texts in distinct:
        check_count("stop", len(texts), settings.max_stop, "stop strings")
        for text in texts:
            check_count("stop", len(text), settings.max_stop_length, "characters in a stop string")
    if distinct and tokenizer is None:
        raise invalid(
            "stop",
            "is not supported, because the model has no tokenizer.json or tokenizer.model and so "
            "no text; use "
            "stop_token_ids",
        )
    size = sum(len(text) for texts in distinct for text in texts)
    special = {} if tokenizer is None else tokenizer.special_ids

    def build() -> dict[tuple[str, ...], StopStrings]:
        if size <= KEPT_CHARACTERS:
            return {texts: _stop_strings(texts, _named(texts, special)) for texts in distinct}
        return {texts: StopStrings(texts, special) for texts in distinct}

    tables = await asyncio.to_thread(build) if size > THREAD_CHARACTERS else build()
    return [tables.get(texts) for texts in lists]


def _named(texts: tuple[str, ...], special: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the special tokens whose names occur in texts."""
    return tuple(one for one in special.items() if any(one[0] in text for text in texts))


@lru_cache(maxsize=64)
def _stop_strings(texts: tuple[str, ...], special: tuple[tuple[str, int], ...]) -> StopStrings:
    """Return the tables of short stop strings, cached: clients often use the same ones."""
    return StopStrings(texts, dict(special))


def check_top(param: str, top: int, settings: Settings, info: ModelInfo) -> None:
    """Raise ApiError 400 for more alternatives than max_logprobs or the model's vocabulary."""
    _check_most(param, top, min(settings.max_logprobs, info.vocab_size))


def _check_most(param: str, value: int, limit: int) -> None:
    if value > limit:
        raise invalid(param, f"{value} is too large; allowed: up to {limit}")


def check_ids(param: str, ids: Iterable[int], info: ModelInfo) -> None:
    """Raise ApiError 400 for a token id beyond the model's vocabulary."""
    for token in ids:
        if token >= info.vocab_size:
            raise invalid(
                param,
                f"token id {token} does not exist; allowed: 0 to {info.vocab_size - 1}",
            )
