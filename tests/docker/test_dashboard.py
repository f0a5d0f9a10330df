"""The Grafana dashboard: well formed, as its script makes it, and of series that exist.

That the queries give numbers is seen by `python -m loadtest.watched`, which needs a Prometheus.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

from loadtest.watched.command import FIRE, VARIABLES, queries
from tests.service.observability.test_prometheus_files import (
    KNOWN_VALUES,
    rules,
    samples,
    selectors,
)

GRAFANA = Path(__file__).resolve().parents[2] / "docker" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "minserve.json"
# https://github.com/grafana/grafana, packages/grafana-data/src/valueFormats/categories.ts
UNITS = {"short", "s", "bytes", "percentunit", "reqps", "ops"}
QUESTIONS = ["Is it up?", "How fast?", "How loaded?", "How well used?", "What is wrong?"]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard_script", GRAFANA / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def test_the_json_is_what_the_script_makes() -> None:
    made = script().text()
    assert DASHBOARD.read_text(encoding="utf-8") == made, "run docker/grafana/dashboard.py"


def test_panels_are_well_formed(dashboard: dict[str, Any]) -> None:
    provisioned = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    (source,) = provisioned["datasources"]
    named = {"type": source["type"], "uid": source["uid"]}
    assert dashboard["uid"] == "minserve"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == QUESTIONS
    (variable,) = dashboard["templating"]["list"]
    assert variable["datasource"] == named and "$" + variable["name"] in VARIABLES
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == named
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"] == named
            assert target["instant"] != target["range"]


def test_no_panel_covers_another(dashboard: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken[x, y])
                taken[x, y] = panel["title"]


def test_every_series_and_label_exists(dashboard: dict[str, Any]) -> None:
    known = samples()
    for rule in rules():
        if "record" in rule:
            level = set(rule["record"].split(":")[0].split("_")) - {""}
            known[rule["record"]] = level | {"job", "instance"}
    known["ALERTS"] = {"alertname", "alertstate", "severity", "job", "instance"}
    read = set()
    for title, legend, query in queries(dashboard):
        assert "$" not in query, "a variable that is not known"
        found = list(selectors(promql_parser.parse(query)))
        assert found, query
        for selector in found:
            assert selector.name in known, (title, selector.name)
            read.add(selector.name)
            for matcher in selector.matchers.matchers:
                assert matcher.name in known[selector.name], (title, matcher.name)
                values = KNOWN_VALUES.get(matcher.name)
                if values is not None:
                    assert set(matcher.value.split("|")) <= values, title
        labels = set(re.findall(r"{{(\w+)}}", legend))
        model = {"name", "dtype", "device_name"}  # of the info series
        assert labels <= set.union(*(known[one.name] for one in found)) | model, title
    # What an operator asks for: latencies, load, use, faults.
    assert read > {
        "up",
        "minserve_time_to_first_token_seconds_bucket",
        "minserve_inter_token_latency_seconds_bucket",
        "minserve_e2e_request_latency_seconds_bucket",
        "minserve_requests_running",
        "minserve_requests_waiting",
        "minserve_step_batch_size_bucket",
        "minserve_prefix_cache_misses_total",
        "minserve_state_bytes",
        "minserve_request_errors_total",
        "minserve_engine_restarts_total",
    }


def test_the_alerts_that_a_killed_engine_fires_exist() -> None:
    assert {rule["alert"] for rule in rules() if "alert" in rule} > FIRE


def test_grafana_finds_what_is_mounted() -> None:
    compose = yaml.safe_load((GRAFANA.parent / "compose.yaml").read_text(encoding="utf-8"))
    mounts = dict(volume.split(":")[1::-1] for volume in compose["services"]["grafana"]["volumes"])
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/minserve.yml").read_text())[
        "providers"
    ]
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    environment = compose["services"]["grafana"]["environment"]
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    scraped = yaml.safe_load((GRAFANA.parent / "prometheus/prometheus.yml").read_text())
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
