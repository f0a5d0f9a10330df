"""Structured output: reads the grammar that a request asks for from its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from pydantic_core import to_json

from engine.protocol.sampling_params import Grammar, GrammarKind, SamplingParams
from service.http.errors import invalid
from service.inference.inputs.grammar_check import RequestCheck
from service.inference.runtime import Runtime

KINDS: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar")
FIELDS = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in KINDS))
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar that a prompt asks for."""

    param: str  # the field that asks for it, for error messages
    grammar: Grammar
    late: bool = False  # its prompts timed out before it had been compiled


async def read_grammars(
    requests: Sequence[Mapping[str, Any]],
    runtime: Runtime,
    check: RequestCheck,
    timeouts: Sequence[float],
    name: Callable[[int, str], str] = lambda _, field: field,
    times: int = 1,
) -> list[Wanted | None]:
    """Read and compile the grammar of each prompt; None for prompts without one.

    Args:
        requests: The given fields of FIELDS of each prompt.
        runtime: The model.
        check: Compiles grammars.
        timeouts: The prompts' timeouts, in seconds from the request's arrival.
        name: Returns the name of a prompt's field for error messages.
        times: Engine requests of each prompt.

    Returns: the grammars. One that was not compiled within the timeouts of all its prompts is late.

    Raises ApiError 400 for fields that contradict each other; for grammars that are wrong, too
    large or too many; and if the model has no tokenizer.
    """
    made: dict[tuple[int, ...], Wanted | None] = {}  # by identity: prompts often share the values
    wanted = []
    for i, fields in enumerate(requests):
        values = tuple(map(id, fields.values()))
        if values not in made:
            made[values] = _wanted(fields, partial(name, i))
        wanted.append(made[values])
    distinct = {one.grammar: one for one in wanted if one is not None}
    if not distinct:
        return [None] * len(wanted)
    settings, first = runtime.settings, next(iter(distinct.values()))
    if len(distinct) > settings.max_grammars:
        raise invalid(
            first.param,
            f"{len(distinct)} different grammars in one request; "
            f"allowed: up to {settings.max_grammars}",
        )
    for one in distinct.values():
        _check_text(one, settings.max_grammar_bytes)
        if runtime.tokenizer is None:
            raise invalid(
                one.param,
                "is not supported, because the model has no tokenizer.json or tokenizer.model and "
                "so no text",
            )
    total = sum(len(one.grammar.text) for one in wanted if one is not None) * times
    if total > settings.max_body_bytes:  # the engine request of each sample has its own copy
        raise invalid(
            first.param,
            f"{total} characters of grammars over all prompts and samples; "
            f"allowed: up to {settings.max_body_bytes}",
        )
    until = {one.grammar: 0.0 for one in distinct.values()}
    for asked, timeout in zip(wanted, timeouts, strict=True):
        if asked is not None:
            until[asked.grammar] = max(until[asked.grammar], timeout)
    late: set[Grammar] = set()
    for one in distinct.values():
        try:
            wrong = await check.check(one.grammar, runtime.info, until[one.grammar])
        except TimeoutError:
            late.add(one.grammar)
            continue
        if wrong is not None:
            raise invalid(one.param, wrong)
    return [
        replace(one, late=True) if one is not None and one.grammar in late else one
        for one in wanted
    ]


def constrained(params: SamplingParams, wanted: Wanted | None) -> SamplingParams:
    """Return sampling parameters with the grammar that the text has to match.

    With a late grammar nothing is sampled: the engine must not compile a grammar that has not been
    checked, and it will end the request because of its timeout.
    """
    if wanted is None:
        return params
    if wanted.late:
        return msgspec.structs.replace(params, max_tokens=0, min_tokens=0)
    return msgspec.structs.replace(params, grammar=wanted.grammar)


def field_of(wanted: Wanted | None) -> str | None:
    """Return the name of the field that asks for a grammar, or None."""
    return None if wanted is None else wanted.param


def _wanted(fields: Mapping[str, Any], name: Callable[[str], str]) -> Wanted | None:
    found: list[Wanted] = []
    if (value := fields.get("response_format")) is not None:
        found += _of_format(value, name("response_format"))
    if (value := fields.get("structured_outputs")) is not None:
        found += _of_outputs(value, name("structured_outputs"))
    for kind in KINDS:
        if (value := fields.get(f"guided_{kind}")) is not None:
            found.append(_one(name(f"guided_{kind}"), kind, value))
    if len(found) > 1:
        raise invalid(found[1].param, f"cannot be given together with {found[0].param}")
    return found[0] if found else None


def _of_format(value: Mapping[str, Any], param: str) -> list[Wanted]:
    match value["type"]:
        case "json_object":
            return [Wanted(param, Grammar("json", _ANY_OBJECT))]
        case "json_schema":
            return [_one(f"{param}.json_schema.schema", "json", value["json_schema"]["schema"])]
    return []


def _of_outputs(value: Mapping[str, Any], param: str) -> list[Wanted]:
    found = [
        _one(f"{param}.{kind}", kind, value[kind]) for kind in KINDS if value.get(kind) is not None
    ]
    if value.get("json_object"):
        found.append(Wanted(f"{param}.json_object", Grammar("json", _ANY_OBJECT)))
    if not found:
        raise invalid(param, f"allowed: exactly one of {', '.join([*KINDS, 'json_object'])}")
    return found


def _one(param: str, kind: GrammarKind, value: Any) -> Wanted:
    try:
        text = value if isinstance(value, str) else to_json(value).decode()
    except ValueError as error:
        raise invalid(param, f"cannot be read: {error}") from error
    return Wanted(param, Grammar(kind, text))


def _check_text(wanted: Wanted, most: int) -> None:
    size = len(wanted.grammar.text.encode())
    if size > most:
        raise invalid(wanted.param, f"has {size} bytes; allowed: up to {most}")
