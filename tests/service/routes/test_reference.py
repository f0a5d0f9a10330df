"""The API's reference at /docs as plain HTTP: all of it is served from here, without a key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urljoin

import pytest

from service.playground import HEADERS
from service.reference import OWN, PATH, SCRIPT, STYLE, assets, paths
from tests.service.app.test_access import KEYS
from tests.service.harness import Service, error_message, fake_runner, running
from tests.service.routes.test_playground import NAMESPACES, Page

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "service/reference"


async def test_all_that_the_page_names_is_served_from_here(service: Service) -> None:
    """Relative to the page, which may lie below a proxy's own path. A style sheet names images."""
    answer = await service.http.get(PATH)
    assert answer.status_code == 200
    page = Page()
    page.feed(answer.text)
    assert page.inline == []
    assert "swagger" in answer.text and not re.search(r"//|https?:", answer.text)
    wanted = {urljoin(PATH, name) for name in page.references}
    assert not [name for name in page.references if name.startswith(("/", "http"))]
    style = (await service.http.get(urljoin(PATH, f"docs/{STYLE}"))).text
    images = re.findall(r"""url\(["']?([^"')]*)""", style)
    assert images and all(re.fullmatch(r"image-\d+\.\w+", name) for name in images)
    wanted |= {urljoin(f"{PATH}/", name) for name in images}
    assert wanted | {PATH} == paths() | {"/openapi.json"}
    for path in wanted:
        assert (await service.http.get(path)).status_code == 200, path


@pytest.mark.parametrize("path", sorted(paths()))
async def test_each_has_the_headers_of_the_playground(service: Service, path: str) -> None:
    answer = await service.http.get(path)
    assert answer.status_code == 200 and answer.content
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    head = await service.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))
    known = {"if-none-match": answer.headers["etag"]}
    assert (await service.http.get(path, headers=known)).status_code == 304
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    kinds |= {"png": "image/png", "jpg": "image/jpeg", PATH: "text/html"}
    assert answer.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])


def sources() -> Iterator[tuple[str, str]]:
    for name, asset in assets().items():
        if name.endswith((".html", ".js", ".css", ".svg")) and name != SCRIPT:
            yield name, asset.content.decode()


def test_nothing_of_it_refers_to_another_host() -> None:
    """The bundle has names of hosts in it; that it asks none is seen in a browser."""
    for name, text in sources():
        assert set(re.findall(r"(?:https?|wss?)://[\w./-]+", text)) <= NAMESPACES, name
        assert "@import" not in text and "data:" not in text, name
    for name, magic in ((".png", b"\x89PNG"), (".jpg", b"\xff\xd8"), (".svg", b"<svg")):
        found = [asset for file, asset in assets().items() if file.endswith(name)]
        assert found and all(asset.content.startswith(magic) for asset in found)


def test_our_scripts_write_no_markup_from_strings() -> None:
    for name in OWN:
        if name.endswith(".js"):
            text = (FOLDER / name).read_text(encoding="utf-8")
            assert text.startswith("/** "), f"{name} does not state its idea"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\.write\(|eval\(", text)


@pytest.mark.parametrize(
    "path",
    ["/docs/index.html", "/docs/none.js", "/docs/__init__.py", "/docs/..%2fapp.py",
     "/docs/redoc.standalone.js", "/docs/oauth2-redirect", "/redoc"],
)  # fmt: skip
async def test_nothing_else_is_there(service: Service, path: str) -> None:
    answer = await service.http.get(path)
    assert answer.status_code == 404
    error_message(answer.json(), None)


async def test_it_loads_without_a_key_and_is_no_part_of_the_api(byte_folder: Path) -> None:
    for playground in (True, False):
        options = {"api_keys": KEYS, "playground": playground}
        async with running(fake_runner(byte_folder), **options) as service:
            for path in paths():
                assert (await service.http.get(path)).status_code == 200
            assert (await service.http.get("/docs/none.js")).status_code == 401
            described = (await service.http.get("/openapi.json")).json()["paths"]
            assert not [path for path in described if "docs" in path]
            assert (await service.http.post(PATH)).status_code == 405


def test_the_wheel_holds_every_file() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    excluded = build["tool"]["scikit-build"]["wheel"]["exclude"]
    for name in OWN:
        assert (FOLDER / name).is_file()
        assert not [
            pattern for pattern in excluded if fnmatch(f"service/reference/{name}", pattern)
        ]
