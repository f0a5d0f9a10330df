"""The playground as plain HTTP: what is served at / and below, to whom, and with which headers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from service.playground import FOLDER_PATH, PAGE, TYPES, assets, paths
from service.settings import Settings
from tests.service.app.test_access import KEYS
from tests.service.harness import Service, error_message, fake_runner, running

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "service/playground"
SERVED = sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)
# That say what a vocabulary is, and are never fetched.
NAMESPACES = {"http://www.w3.org/2000/svg"}


def directives(policy: str) -> dict[str, str]:
    return dict(part.strip().partition(" ")[::2] for part in policy.split(";"))


@pytest.mark.parametrize("path", sorted(paths()))
async def test_every_file_and_its_headers(service: Service, path: str) -> None:
    answer = await service.http.get(path)
    assert answer.status_code == 200
    name = PAGE if path == "/" else path.removeprefix(FOLDER_PATH)
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == TYPES[Path(name).suffix]
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = directives(answer.headers["content-security-policy"])
    for nothing in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy.pop(nothing) == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy == dict.fromkeys(("script-src", "style-src", "connect-src", "img-src"), "'self'")

    head = await service.http.head(path)
    assert head.status_code == 200 and head.content == b""
    for header in ("content-type", "etag", "content-length", "content-security-policy"):
        assert head.headers[header] == answer.headers[header]


async def test_what_a_browser_has_is_not_sent_again(service: Service) -> None:
    etag = (await service.http.get("/")).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await service.http.get("/", headers={"if-none-match": known})
        assert again.status_code == 304 and again.content == b""
        assert again.headers["etag"] == etag and "content-type" not in again.headers
        assert "content-security-policy" in again.headers
    for other in ('"other"', etag.strip('"'), ""):
        assert (await service.http.get("/", headers={"if-none-match": other})).status_code == 200
    tags = {asset.etag for asset in assets().values()}
    assert len(tags) == len(assets())


@pytest.mark.parametrize(
    "path",
    [
        "/playground/",
        "/playground/none.js",
        "/playground/index.html",
        "/playground/__init__.py",
        "/playground/screenshot.png",
        "/playground/..%2fapp.py",
        "/playground/%2e%2e/app.py",
        "/playground/main.js/x",
    ],
)
async def test_nothing_else_is_there(service: Service, path: str) -> None:
    answer = await service.http.get(path)
    assert answer.status_code == 404
    error_message(answer.json(), None)


async def test_it_is_only_read(service: Service) -> None:
    for path in ("/", "/playground/main.js"):
        assert (await service.http.post(path)).status_code == 405


async def test_it_is_no_part_of_the_api(service: Service) -> None:
    described = (await service.http.get("/openapi.json")).json()["paths"]
    assert not [path for path in described if path == "/" or "playground" in path]


async def test_it_can_be_left_out(byte_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(fake_runner(byte_folder), playground=False) as service:
        for path in paths():
            assert (await service.http.get(path)).status_code == 404
    # Then it is open no more than any other path that there is not.
    async with running(fake_runner(byte_folder), playground=False, api_keys=KEYS) as service:
        assert (await service.http.get("/")).status_code == 401
    assert Settings().playground is True
    monkeypatch.setenv("MINSERVE_PLAYGROUND", "false")
    assert Settings().playground is False


async def test_it_loads_without_a_key(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), api_keys=KEYS) as service:
        for path in paths():
            assert (await service.http.get(path)).status_code == 200
        for path in ("/playground/none.js", "/playground/", "/v1/models"):
            assert (await service.http.get(path)).status_code == 401


class Page(HTMLParser):
    """What the page refers to, and what a strict policy would not let it do."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.inline: list[str] = []
        self._in: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.references += [given[name] for name in ("src", "href") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        for name in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
            self.named += given.get(name, "").split()
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


@pytest.fixture(scope="module")
def page() -> Page:
    parsed = Page()
    parsed.feed((FOLDER / PAGE).read_text(encoding="utf-8"))
    return parsed


def test_every_file_that_is_named_is_served_and_every_served_one_named(page: Page) -> None:
    """Relative to the page, which may lie below a proxy's own path; modules to each other."""
    local = [name for name in page.references if not name.startswith("#") and name != "docs"]
    assert all(f"/{name}" in paths() for name in local), local
    found = {name.removeprefix("playground/") for name in local}
    left = set(found)
    while left:
        name = left.pop()
        if not name.endswith(".js"):
            continue
        text = (FOLDER / name).read_text(encoding="utf-8")
        imported = set(re.findall(r'(?:from|import) "\./([\w.]+)"', text))
        assert imported <= set(assets()), (name, imported)
        left |= imported - found
        found |= imported
    assert found == set(SERVED) - {PAGE}


def test_ids_are_there_and_nothing_is_inline(page: Page) -> None:
    assert page.inline == []
    assert len(page.ids) == len(set(page.ids))
    assert set(page.named) <= set(page.ids)
    for name in SERVED:
        if name.endswith(".js"):
            text = (FOLDER / name).read_text(encoding="utf-8")
            assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= set(page.ids), name


def sources() -> Iterator[tuple[str, str]]:
    for name in SERVED:
        yield name, (FOLDER / name).read_text(encoding="utf-8")


def test_nothing_refers_to_another_origin() -> None:
    for name, text in sources():
        assert set(re.findall(r"(?:https?|wss?)://[^\s\"')]*", text)) <= NAMESPACES, name
        assert not re.search(r"@import|url\(|blob:|[\"'(]//", text), name


def test_no_script_parses_markup_or_code() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for name, text in sources():
        assert not re.search(forbidden, text), name
        if name.endswith(".js"):
            assert text.startswith("/** "), f"{name} does not state its idea"
            assert len(text.splitlines()) <= 400


def test_the_wheel_holds_every_file() -> None:
    build: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = build["tool"]["scikit-build"]["wheel"]
    assert "service" in wheel["packages"]
    for name in SERVED:
        path = f"service/playground/{name}"
        assert not [pattern for pattern in wheel["exclude"] if fnmatch(path, pattern)], name
