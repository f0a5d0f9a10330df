"""Schemas are followed to the letter, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.structured_output.schema_checks import OPTIONS, WHITESPACE, prepared

ODD = 2**53 + 1  # no double


def followed(schema: Any) -> Any:
    """Without what is ours."""
    given = json.loads(prepared(json.dumps(schema)))
    assert given.pop(OPTIONS) == {"whitespace_pattern": WHITESPACE}
    return given


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"const": 2**53, "enum": [2**60, -(2**53), 1.5, "x", None, True]},
        {"properties": {"const": {"type": "string"}, "maximum": {"minimum": 3}}},
        {"default": ODD, "examples": [ODD], "description": "x" * 1000},
        {"example": {"const": ODD}, "x-id": {"enum": [ODD]}},
        {"components": {"schemas": {"enum": {"example": ODD}}}},
        {"items": [{"anyOf": [{"minLength": 3}]}]},
        {"maximum": True, "minimum": 0.1},
    ],
)
def test_what_a_double_holds_stays(schema: Any) -> None:
    assert followed(schema) == schema


@pytest.mark.parametrize("bounds", ["imum", "exclusive"])
@pytest.mark.parametrize("value", [ODD, -ODD, 2**63 - 1, -(2**63) + 1, 1234567890123456789])
def test_bounds_are_doubles_that_lie_within(bounds: str, value: int) -> None:
    upper, lower = (
        ("maximum", "minimum")
        if bounds == "imum"
        else (
            "exclusiveMaximum",
            "exclusiveMinimum",
        )
    )
    given = followed({"items": {upper: value, lower: value}})["items"]
    assert given[upper] < value < given[lower]
    assert all(float(bound) == bound for bound in given.values())
    assert given[lower] - given[upper] <= 2**11, "neighbours"


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": ODD}, f"const: {ODD}"),
        ({"properties": {"a": {"enum": [1, {"b": [ODD]}]}}}, f"enum: {ODD}"),
        ({"$defs": {"const": {"multipleOf": ODD}}}, f"multipleOf: {ODD}"),
        ({"maximum": 10**400}, "maximum: an integer"),
        ({OPTIONS: 5}, OPTIONS),
    ],
)
def test_what_would_be_another_number_is_refused(schema: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        prepared(json.dumps(schema))


def test_the_librarys_own_options_come_first() -> None:
    own = {"whitespace_flexible": False, "key_separator": ":"}
    assert json.loads(prepared(json.dumps({OPTIONS: own})))[OPTIONS] == own
    own = {"whitespace_pattern": " "}
    assert json.loads(prepared(json.dumps({OPTIONS: own})))[OPTIONS] == own
