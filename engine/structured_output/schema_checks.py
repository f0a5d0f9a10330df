"""JSON schemas as the library of grammars is to read them.

It keeps numbers as doubles. So bounds become doubles that lie within them, and a constant that no
double is equal to is refused, for the answer would be another one. And its own options, which may
stand in a schema under `x-guidance`, come before ours.
"""

from __future__ import annotations

import json
import math
from typing import Any

OPTIONS = "x-guidance"
# Between the parts of JSON, as programs write it. With more freedom a small model writes blanks and
# line breaks to its last token.
WHITESPACE = r"\x20{1,2}|\x09|\x0D?\x0A[\x20\x09]{0,32}"
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_CONSTANTS = "const", "enum", "multipleOf"
_BY_NAME = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "schemas"
_NOT_READ = "default", "example", "examples"  # nor what begins with x-


def prepared(text: str) -> str:
    """The schema of that text, to be followed. Raises ValueError where it cannot be."""
    schema = json.loads(text)
    _bring_in(schema)
    if not isinstance(schema, dict):
        return json.dumps(schema)
    options = schema.get(OPTIONS, {})
    if not isinstance(options, dict):
        raise ValueError(f"{OPTIONS}: has to be an object")
    if options.get("whitespace_flexible", True) is not False:
        schema[OPTIONS] = {"whitespace_pattern": WHITESPACE, **options}
    return json.dumps(schema)


def _bring_in(schema: Any) -> None:
    """Makes numbers such that the library keeps them."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            for key, value in node.items():
                if key in _CONSTANTS:
                    _check(key, value)
                elif key in _BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif key in _UPPER and type(value) is int:
                    node[key] = _double(key, value, -math.inf)
                elif key in _LOWER and type(value) is int:
                    node[key] = _double(key, value, math.inf)
                elif key not in _NOT_READ and not key.startswith("x-"):
                    left.append(value)


def _check(key: str, constant: Any) -> None:
    left = [constant]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif type(value) is int and _double(key, value, 0) != value:
            raise ValueError(
                f"{key}: {value} cannot be followed: of integers beyond 2**53 only those that are "
                "doubles can"
            )


def _double(key: str, value: int, towards: float) -> int:
    """The nearest integer that is a double, none beyond the value."""
    try:
        nearest = float(value)
    except OverflowError as error:
        raise ValueError(f"{key}: an integer of this size cannot be followed") from error
    if (towards < 0 and nearest > value) or (towards > 0 and nearest < value):
        nearest = math.nextafter(nearest, towards)
    return int(nearest) if math.isfinite(nearest) else value
