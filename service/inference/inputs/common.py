"""read_common: reads the fields that all generating endpoints have in common."""

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

# Fields that are read here in addition to those of SamplingParams.
COMMON = ("timeout", "priority", "stop", *FIELDS)

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class CommonInputs:
    """The common inputs of one prompt."""

    timeout: float  # seconds from the request's arrival
    priority: int
    params: SamplingParams  # including the grammar
    stop: StopStrings | None
    grammar_field: str | None  # the field of the client's request that gave the grammar


def fields_of(body: Any, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the given fields of a body with one prompt, as columns with one value each."""
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
    """Read the common inputs of `count` prompts.

    Args:
        columns: A value for each prompt, by field: fields of COMMON and of SamplingParams. None
            stands for a field that is not given.
        count: Number of prompts.
        runtime: The model.
        request: The HTTP request.
        check: Compiles grammars.
        name: Returns the name of a prompt's field for error messages.
        times: Engine requests of each prompt.

    Raises ApiError 400 for values beyond the limits of server, key or model, and for wrong
    grammars.
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
    made: dict[tuple[int, ...], SamplingParams] = {}  # by identity: prompts often share the values
    read: list[CommonInputs] = []
    for i, grammar in enumerate(grammars):
        values = {field: columns[field][i] for field in sampling}
        same = (*map(id, values.values()), id(grammar))
        params = made.get(same)
        if params is None:
            params = constrained(sampling_params(values, settings, info), grammar)
            if values.get("seed") is not None:  # else each prompt gets a random seed of its own
                made[same] = params
        read.append(CommonInputs(timeouts[i], priorities[i], params, stops[i], field_of(grammar)))
    return read
