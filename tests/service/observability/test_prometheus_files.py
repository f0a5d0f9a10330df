"""The files in docker/prometheus: what they say is what Prometheus takes and what the service has.

`promtool` itself runs where it is installed; the rest needs nothing but Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from service.observability.metrics import CUTS, ENDPOINTS, FETCHES, MISSES
from service.observability.outcomes import OUTCOMES
from tests.service.observability.test_metrics import described

FOLDER = Path(__file__).resolve().parents[3] / "docker" / "prometheus"
RULE_FILES = ("rules.yml", "alerts.yml")
# The fields that Prometheus knows: it refuses a file with any other.
GROUP_FIELDS = {"name", "interval", "limit", "query_offset", "labels", "rules"}
RECORD_FIELDS = {"record", "expr", "labels"}
ALERT_FIELDS = {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
DURATION = re.compile(r"(\d+(ms|[smhdwy]))+")
KNOWN_VALUES = {
    "outcome": set(OUTCOMES),
    "endpoint": set(ENDPOINTS),
    "reason": {*CUTS, *MISSES},
    "result": set(FETCHES),
}
TARGET_LABELS = {"job", "instance"}


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key stands twice"
        return super().construct_mapping(node, deep)


def load(name: str) -> Any:
    return yaml.load((FOLDER / name).read_text(encoding="utf-8"), StrictLoader)


def rules() -> list[dict[str, Any]]:
    return [
        rule for name in RULE_FILES for group in load(name)["groups"] for rule in group["rules"]
    ]


def samples() -> dict[str, set[str]]:
    """The labels of every sample that a scrape brings, or a rule makes, by its name."""
    found: dict[str, set[str]] = {"up": set()}
    for series in described():
        labels = set(series.labels)
        if series.type == "histogram":
            found[f"{series.name}_bucket"] = labels | {"le"}
            found[f"{series.name}_sum"] = found[f"{series.name}_count"] = labels
        else:
            suffix = {"counter": "_total", "info": "_info"}.get(series.type, "")
            found[series.name + suffix] = labels
    return {name: labels | TARGET_LABELS for name, labels in found.items()}


def selectors(expression: Any) -> Iterator[Any]:
    """Every vector selector of a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
        return
    for field in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(expression, field, None)
        if inner is not None:
            yield from selectors(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from selectors(argument)


def test_rules_have_the_fields_that_prometheus_knows() -> None:
    names = []
    for file in RULE_FILES:
        content = load(file)
        assert set(content) == {"groups"}
        for group in content["groups"]:
            assert {"name", "rules"} <= set(group) <= GROUP_FIELDS
            for rule in group["rules"]:
                kind = RECORD_FIELDS if "record" in rule else ALERT_FIELDS
                assert set(rule) <= kind, rule
                assert isinstance(rule["expr"], str)
                names.append(rule.get("record") or rule["alert"])
                if "record" in rule:
                    assert re.fullmatch(r"[a-z_]+:minserve_[a-z0-9_]+:[a-z0-9_]+", rule["record"])
                else:
                    assert re.fullmatch(r"Minserve[A-Za-z]+", rule["alert"])
                    assert DURATION.fullmatch(rule.get("for", "0s"))
                    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
                    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len(names) == len(set(names))


def test_every_name_and_label_in_an_expression_exists() -> None:
    known = samples()
    read = set()
    for rule in rules():
        expression = promql_parser.parse(rule["expr"])
        found = list(selectors(expression))
        named = set(re.findall(r"[\w:]*minserve_[\w:]+|\bup\b", rule["expr"]))
        assert named == {selector.name for selector in found}, rule
        for selector in found:
            assert selector.name in known, (selector.name, rule)
            read.add(selector.name)
            for matcher in selector.matchers.matchers:
                assert matcher.name in known[selector.name], (matcher.name, rule)
                values = KNOWN_VALUES.get(matcher.name)
                if values is not None:
                    assert set(matcher.value.split("|")) <= values, rule
        if "record" in rule:
            # What a recorded series is labelled with stands in its name's first part.
            level = set(rule["record"].split(":")[0].split("_")) - {""}
            known[rule["record"]] = level | TARGET_LABELS
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert read - recorded > {"minserve_generation_tokens_total", "minserve_requests_waiting"}


def test_every_alert_and_every_recorded_series_of_an_alert_is_tested() -> None:
    tests = load("rules_test.yml")
    assert tests["rule_files"] == list(RULE_FILES)
    fired = {
        case["alertname"]
        for test in tests["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}
    known = samples()
    for test in tests["tests"]:
        for series in test["input_series"]:
            (selector,) = selectors(promql_parser.parse(series["series"]))
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels == known[selector.name], series


def test_prometheus_reads_the_rules_and_compose_gives_them() -> None:
    config = load("prometheus.yml")
    assert config["rule_files"] == list(RULE_FILES)
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "minserve", "alerts name it"
    compose = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text(encoding="utf-8"))
    assert "./prometheus:/etc/prometheus:ro" in compose["services"]["prometheus"]["volumes"]


def test_promtool_agrees() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for arguments in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", *RULE_FILES),
        ("test", "rules", "rules_test.yml"),
    ):
        done = subprocess.run(
            [promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
