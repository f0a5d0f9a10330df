"""docker/README.md: its table of settings, its entries for alerts, its examples."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from service.settings import Settings
from service.terminal.settings_table import VARIABLES, option_texts, table
from tests.docs.pages import anchors, headings
from tests.service.observability.test_prometheus_files import load, rules

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Of docker/README.md, without its heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_table_is_what_the_code_says() -> None:
    found = PAGE.split("<!-- settings -->\n")[1].strip()
    assert found == table().strip(), "run python -m service.terminal.settings_table"


def test_every_setting_is_described_once() -> None:
    options = set(option_texts())
    assert options | set(VARIABLES) == set(Settings.model_fields)
    assert not options & set(VARIABLES)
    assert all(text.endswith(".") for text in {**VARIABLES, **option_texts()}.values())


def test_every_alert_has_an_entry_and_names_it() -> None:
    runbook = section("Alerts")
    entries = re.findall(r"^### (\w+)$", runbook, re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert sorted(entries) == sorted(rule["alert"] for rule in alerts)
    for rule in alerts:
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"docker/README.md#{anchor}"
        assert anchor in anchors(headings("docker/README.md"))
        severity = rule["labels"]["severity"]
        assert f"| [{rule['alert']}](#{anchor}) | {severity} |" in runbook
    for entry in re.split(r"^### \w+$", runbook, flags=re.MULTILINE)[1:]:
        assert "**Meaning.**" in entry
        assert len(entry.split()) > 20, "an entry says what to do"


def test_build_arguments_are_those_of_the_dockerfile() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    defaults = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    row = re.compile(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \| (.+?) \|", re.MULTILINE)
    rows = row.findall(section("Images").split("\n### Build arguments\n")[1])
    told = {}
    for names, values in rows:
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            told[name.strip("`")] = value.strip("`")
    assert told == defaults


def test_examples_in_yaml_fit_the_files() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    adapter, prometheus = (yaml.safe_load(block) for block in blocks)
    (rule,) = adapter["rules"]
    assert rule["seriesQuery"].partition("{")[0] == "minserve_requests_waiting"
    (job,) = prometheus["scrape_configs"]
    assert job.pop("authorization")
    assert [job] == load("prometheus.yml")["scrape_configs"]
