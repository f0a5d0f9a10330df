"""The pages render as intended, and their links and anchors exist."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, anchors, blocks, headings, links, pages, text_of, tokens

PAGES = pages()
LANGUAGES = {"sh", "python", "json", "text", "yaml", "nginx"}
# A page that grows beyond this is no longer read. NOTES and reference guides have no bound.
MOST_LINES = {
    "README.md": 250,
    "engine/README.md": 200,
    "engine/training/README.md": 120,
    **{page: 120 for page in PAGES if re.fullmatch(r"csrc/\w+/README\.md", page)},
}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link.target):
            continue
        path, _, anchor = unquote(link.target).partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}:{link.line}: {link.target} is not there"
        if anchor:
            assert target.suffix == ".md", f"{page}:{link.line}: {link.target} has no headings"
            known = anchors(headings(str(target.resolve().relative_to(ROOT))))
            assert anchor in known, f"{page}:{link.line}: {link.target} is none of {known}"


@pytest.mark.parametrize("page", PAGES)
def test_tables_render(page: str) -> None:
    """Every line that looks like a row is one, with as many cells as its header."""
    lines = text_of(page).splitlines()
    covered: dict[int, int] = {}
    for token in tokens(page):
        if token.map and token.type == "table_open":
            covered |= dict.fromkeys(range(*token.map), token.map[0])
        if token.map and token.type == "fence":
            covered |= dict.fromkeys(range(*token.map), -1)
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("|") and number not in covered:
            continue
        assert number in covered, f"{page}:{number + 1} is no row of a table"
        if (header := covered[number]) >= 0:
            cells, wanted = (len(re.findall(r"(?<!\\)\|", lines[n])) for n in (number, header))
            assert cells == wanted, f"{page}:{number + 1} has {cells - 1} cells, not {wanted - 1}"


@pytest.mark.parametrize("page", PAGES)
def test_no_line_becomes_a_list_by_accident(page: str) -> None:
    """No wrapped line begins with a list mark, such as a number with a full stop or a dash."""
    lines = text_of(page).splitlines()
    inside = 0  # lists around the present token
    number = 0  # of the last item of a numbered list
    for token in tokens(page):
        if token.type == "list_item_open" and token.info:
            number = int(token.info)
        if token.type in ("bullet_list_open", "ordered_list_open"):
            assert token.map is not None
            first = token.map[0]
            # A list whose steps stand around fenced blocks goes on with the next number.
            begin = token.attrGet("start") or 1
            assert begin in (1, number + 1), f"{page}:{first + 1} begins a list with {begin}"
            above = lines[first - 1].strip() if first and not inside else ""
            assert not above, f"{page}:{first + 1}: a list needs an empty line before it"
            inside += 1
        elif token.type in ("bullet_list_close", "ordered_list_close"):
            inside -= 1
        elif token.type == "inline":
            for line in token.content.splitlines()[1:]:
                assert not re.match(r"(\d+[.)]|[-+*>]|#+) ", line), f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language}"
        if block.language == "json":
            rest = block.text.strip()
            while rest:  # one document, or several
                rest = rest[json.JSONDecoder().raw_decode(rest)[1] :].lstrip()


@pytest.mark.parametrize("page", [page for page in PAGES if "Contents" in headings(page, "h2")])
def test_contents_name_every_section(page: str) -> None:
    named = [link.target for link in links(page)]
    sections = anchors([title for title in headings(page, "h2") if title != "Contents"])
    assert [f"#{anchor}" for anchor in sections if f"#{anchor}" not in named] == []


@pytest.mark.parametrize("page", MOST_LINES)
def test_pages_stay_short(page: str) -> None:
    assert len(text_of(page).splitlines()) <= MOST_LINES[page]


@pytest.mark.parametrize("page", ["service/README.md", "docker/README.md", "loadtest/README.md"])
def test_guides_have_contents(page: str) -> None:
    assert "Contents" in headings(page, "h2")


def test_anchors_are_those_of_github() -> None:
    titles = ["HTTPS, sockets and CORS", "config.json", "pinned_copy", "Errors", "A - b", "Errors"]
    assert anchors(titles) == [
        *("https-sockets-and-cors", "configjson", "pinned_copy", "errors", "a---b", "errors-1")
    ]
