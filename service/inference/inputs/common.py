"""What every generating endpoint reads of a request in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol.sampling_params import SamplingParams
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.grammar_check import RequestCheck
from service.inference.inputs.guided import FIELDS, Wanted, constrained, field_of, read_grammars
from service.inference.inputs.sampling import (
    read_priority,
    read_stops,
    read_timeout,
    sampling_params,
)
from service.inference.runtime import Runtime
from service.text.stop import StopStrings

# Fields of requests that are read here beside those of SamplingParams.
COMMON = ("timeout", "priority", "stop", *FIELDS)

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class CommonInputs:
    """What one prompt's request of the engine has from fields that all endpoints share."""

    timeout: float  # seconds from the request's arrival
    priority: int
    params: SamplingParams  # with the grammar
    stop: StopStrings | None
    grammar_field: str | None  # by which the client asked for the grammar


def fields_of(body: Any, names: Iterable[str]) -> dict[str, list[Any]]:
    """The fields of these names that a body of one prompt gives, as columns of one value."""
    return {name: [value] for name in names if (value := getattr(body, name)) is not None}


async def read_common(
    columns: Columns,
    count: int,
    runtime: Runtime,
    request: InferenceRequest,
    check: RequestCheck,
    *,
    name: Callable[[int, str], str] = lambda _, field: field,
    times: int = 1,
) -> list[CommonInputs]:
    """The common inputs of `count` prompts.

    `columns` has a value for each prompt, by field: any of COMMON, the others of SamplingParams;
    None stands for a field that is not given. `name` says what errors call a field of a prompt,
    `times` how many requests each prompt makes of the engine. Raises ApiError 400 for values beyond
    the limits of server, key or model, and for wrong grammars.
    """
    settings, info = runtime.settings, runtime.info
    nothing: list[None] = [None] * count
    timeouts = [read_timeout(value, settings) for value in columns.get("timeout", nothing)]
    least = request.least_priority
    priorities = [read_priority(value, least) for value in columns.get("priority", nothing)]
    stops: Sequence[StopStrings | None] = nothing
    if "stop" in columns:
        stops = await read_stops(columns["stop"], settings, runtime.tokenizer)
    grammars: Sequence[Wanted | None] = nothing
    if guided := [field for field in FIELDS if field in columns]:
        asked = [{field: columns[field][i] for field in guided} for i in range(count)]
        grammars = await read_grammars(asked, runtime, check, timeouts, name, times)
    sampling = [field for field in columns if field not in COMMON]
    made: dict[tuple[int, ...], SamplingParams] = {}  # by the very values: they are often the same
    read: list[CommonInputs] = []
    for i, grammar in enumerate(grammars):
        values = {field: columns[field][i] for field in sampling}
        same = (*map(id, values.values()), id(grammar))
        params = made.get(same)
        if params is None:
            params = constrained(sampling_params(values, settings, info), grammar)
            if values.get("seed") is not None:  # else each has one of its own
                made[same] = params
        read.append(CommonInputs(timeouts[i], priorities[i], params, stops[i], field_of(grammar)))
    return read
