"""docker/README.md: its table of settings, its runbook; the links of all pages."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from service.settings import Settings
from service.terminal.settings_table import VARIABLES, option_texts, table
from tests.docs.commands import PAGES
from tests.service.observability.test_prometheus_files import load, rules

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ROOT / "docker" / "README.md"
PAGE = OPERATORS.read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of every heading, as GitHub makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def test_the_table_is_what_the_code_says() -> None:
    found = PAGE.split("<!-- settings -->\n")[1].strip()
    assert found == table().strip(), "run python -m service.terminal.settings_table"


def test_every_setting_is_described_once() -> None:
    options = set(option_texts())
    assert options | set(VARIABLES) == set(Settings.model_fields)
    assert not options & set(VARIABLES)
    assert all(text.endswith(".") for text in {**VARIABLES, **option_texts()}.values())


def test_every_alert_has_an_entry_and_names_it() -> None:
    runbook = PAGE.split("\n## Runbook\n")[1].split("\n## ")[0]
    entries = re.findall(r"^### (\w+)$", runbook, re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert sorted(entries) == sorted(rule["alert"] for rule in alerts)
    for rule in alerts:
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"docker/README.md#{anchor}"
        assert anchor in anchors(OPERATORS)
    for entry in re.split(r"^### \w+$", runbook, flags=re.MULTILINE)[1:]:
        assert len(entry.split()) > 20, "an entry says what to do"


def test_links_lead_somewhere() -> None:
    for page in (ROOT / name for name in PAGES):
        for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, link)
            if anchor:
                assert anchor in anchors(target), (page.name, link)


def test_build_arguments_are_those_of_the_dockerfile() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    defaults = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    rows = re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \| (.+?) \|", PAGE, re.MULTILINE)
    told = {}
    for names, values in rows:
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            told[name.strip("`")] = value.strip("`")
    assert {name: value for name, value in told.items() if name in defaults} == defaults


def test_the_adapters_rule_is_yaml_of_a_series_that_exists() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (rule,) = yaml.safe_load(block)["rules"]
    assert rule["seriesQuery"].partition("{")[0] == "minserve_requests_waiting"
    assert load("prometheus.yml")["scrape_configs"][0]["job_name"] == "minserve"
