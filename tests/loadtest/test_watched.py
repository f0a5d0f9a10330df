"""loadtest.watched: what it takes for an answer. The whole needs a Prometheus and a minute."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from loadtest.watched.command import FIRE, VARIABLES, judge, queries, shown
from loadtest.watched.prometheus import Prometheus

DASHBOARD = {
    "panels": [
        {"type": "row", "title": "Is it up?"},
        {
            "title": "Tokens",
            "targets": [
                {
                    "expr": 'rate(tokens{instance=~"$instance"}[$__rate_interval])',
                    "legendFormat": "t",
                }
            ],
        },
    ]
}
QUERY = 'rate(tokens{instance=~".+"}[1m])'


class Told:
    """A Prometheus that gives these values and rules."""

    def __init__(self, values: dict[str, list[float]], *rules: dict[str, Any]) -> None:
        self._values, self._rules = values, rules

    def values(self, query: str) -> list[float]:
        return self._values[query]

    def rules(self) -> list[dict[str, Any]]:
        return list(self._rules)


def rule(kind: str, name: str, **more: str) -> dict[str, Any]:
    return {"type": kind, "name": name, "health": "ok", **more}


def verdicts(values: dict[str, list[float]], *rules: dict[str, Any]) -> list[str]:
    told = cast(Prometheus, Told({QUERY: [1.0], **values}, *rules))
    return [row[-1] for row in judge(told, DASHBOARD)]


def test_variables_are_put_in_as_grafana_does() -> None:
    assert queries(DASHBOARD) == [("Tokens", "t", QUERY)]
    assert VARIABLES["$instance"] == ".+"


def test_nothing_and_no_number_fail() -> None:
    assert shown([0.0]) == ("0", "pass")
    assert shown([math.nan, 2.0]) == ("2", "pass")
    assert shown([math.nan, math.inf])[1] == "FAIL"
    assert shown([]) == ("nothing", "FAIL")
    assert shown([1.0] * 9)[0].endswith("(9)")


def test_panels_and_recorded_series_need_a_number() -> None:
    recorded = rule("recording", "tokens:rate1m")
    assert verdicts({"tokens:rate1m": [3.0]}, recorded) == ["pass", "pass"]
    assert verdicts({"tokens:rate1m": []}, recorded) == ["pass", "FAIL"]
    assert verdicts({QUERY: [math.nan]}) == ["FAIL"]


def test_a_rule_that_does_not_compute_fails() -> None:
    broken = {**rule("recording", "x"), "health": "err", "lastError": "many-to-many"}
    assert verdicts({}, broken) == ["pass", "FAIL"]


def test_alerts_of_a_killed_engine_have_to_fire() -> None:
    for name in FIRE:
        assert verdicts({}, rule("alerting", name, state="inactive")) == ["pass", "FAIL"]
        assert verdicts({}, rule("alerting", name, state="firing")) == ["pass", "pass"]
    assert verdicts({}, rule("alerting", "MinserveDown", state="inactive")) == ["pass", "pass"]


def test_without_a_prometheus_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="no-such-program is not installed"):
        Prometheus("127.0.0.1:1", "no-such-program")
