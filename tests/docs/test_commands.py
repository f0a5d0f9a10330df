"""Quick commands of the pages run as they stand; the options of all others are parsed."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from service.cli import app
from tests.docs.commands import RULES, Command, commands, cut, quick
from tests.docs.pages import ROOT, pages, text_of
from tests.docs.running import ADDRESS, prepare, run
from tests.e2e.conftest import Server

KEY = "0123456789abcdef0123456789abcdef"
FOLLOWED = [page for page in pages() if quick(page)]
ALWAYS = ("README.md", "service/README.md")  # the other pages take longer


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(page, marks=[] if page in ALWAYS else pytest.mark.slow) for page in FOLLOWED
    ],
)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(page: str) -> Iterator[str]:
    """Run a server for one page, with the admin key KEY."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINSERVE_ADMIN_KEY", KEY)
        server = Server("--device", "cpu", "--threads", "1", model=None)
    yield server.url
    server.process.terminate()
    server.process.wait(60)


@pytest.fixture(scope="module")
def folder(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("reader")
    prepare(found)
    return found


def test_every_command_has_a_rule_and_every_rule_a_command() -> None:
    used = {command.rule for command in commands()}
    assert used == set(RULES)
    for rule in RULES:
        assert bool(rule.why) == (rule.how in ("options", "apart")), rule


def test_blocks_are_cut_as_a_shell_cuts_them() -> None:
    block = "a 1 \\\n  2\n\nb '{\n}'  # c\nd && e | f\n"
    assert list(cut(block)) == [(0, "a 1 \\\n  2"), (3, "b '{\n}'  # c"), (5, "d && e | f")]
    with pytest.raises(ValueError, match="no whole command"):
        list(cut("a 'b\n"))


def test_what_is_quick_runs(page: str, url: str, folder: Path) -> None:
    """Blocks run in the page's order, since later ones build on earlier ones."""
    for block in quick(page):
        where = f"{page}:{block.line}"
        if block.language == "python":
            program = block.text.replace(ADDRESS, url)
            assert "127.0.0.1" not in program.replace(url, ""), f"{where} asks another server"
            (folder / "example.py").write_text(program, encoding="utf-8")
            assert run("python example.py", folder, url, 60).strip(), where
            continue
        # The page makes an admin key up; the server was started before it.
        text = re.sub(r"ADMIN_KEY=\$\(.*\)", f"ADMIN_KEY={KEY}", block.text)
        printed = run(text, folder, url, 120, ADMIN_KEY=KEY)
        if "curl" in text and "-X DELETE" not in text and "-o " not in text:
            assert printed.strip(), where


def test_the_dashboard_is_what_its_command_makes(tmp_path: Path) -> None:
    prepare(tmp_path)
    run("python docker/grafana/dashboard.py", tmp_path, ADDRESS, 60)
    made = tmp_path / "docker/grafana/dashboards/minserve.json"
    assert made.read_bytes() == (ROOT / "docker/grafana/dashboards/minserve.json").read_bytes()


class Parsed(Exception):
    """The options were parsed; nothing else should run."""


def parse_module(module: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    """Parse a module's options: raises Parsed, or SystemExit for a wrong option."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise Parsed

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    patch.setattr(sys, "argv", [module, *arguments])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def parse_command(arguments: list[str]) -> None:
    """Parse a command's options. Raises typer's UsageError for a wrong option."""
    group: Any = typer.main.get_command(app)
    group.commands[arguments[0]].make_context(arguments[0], arguments[1:])


PARSED = [one for one in commands() if one.rule.how in ("options", "whole")]


@pytest.mark.parametrize("command", PARSED, ids=lambda one: f"{one.page}:{one.line}")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a module that is imported and run
def test_options_are_taken(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    text = command.text.replace("\\\n", " ").removesuffix(" &")  # in the background
    words = shlex.split(text, comments=True)
    if words[0] == "minserve":
        parse_command(words[1:])
        return
    assert words[:2] == ["python", "-m"]
    with pytest.raises(Parsed):
        parse_module(words[2], words[3:], monkeypatch)


def test_an_option_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse_module("loadtest.cache", ["--no-such-option"], monkeypatch)
    with pytest.raises(Exception, match="No such option"):
        parse_command(["train", "--no-such-option", "1"])


@pytest.mark.parametrize("page", pages())
def test_pages_name_files_that_exist(page: str) -> None:
    """Paths of the checkout in pages and their commands exist."""
    for path in set(
        re.findall(r"(?<![\w/.-])(?:docker|loadtest|tests|engine)/[\w./-]+\w", text_of(page))
    ):
        if not path.startswith(("docker/secrets", "docker/.env")):  # readers make these
            assert (ROOT / path).exists(), (page, path)
