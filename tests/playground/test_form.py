"""For whom the page is: keyboards, phones, dark rooms, screen readers, those who want no motion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import PROMPT, Opened, answer, until, wait_for_end, write
from tests.playground.offering import AUSTEN, offering

PHONE = {"viewport": {"width": 320, "height": 640}, "has_touch": True, "is_mobile": True}


def fill_up(page: Any) -> None:
    """Brings everything about that the page can show."""
    page.click("text=Stop strings and penalties")
    write(page, max_tokens=120)
    wait_for_end(page)
    with page.expect_response("**/v1/states") as made:
        page.click("#save")
    id = made.value.json()["id"]
    page.click(f"[data-state={id}]")
    page.click("#state-card >> text=Fork")
    page.wait_for_selector(f"[data-state={id}] + ul .chip")
    write(page, PROMPT, max_tokens=120)
    wait_for_end(page)
    page.fill("#fork-name", "no blanks")
    page.click("#state-card >> text=Fork")
    page.wait_for_selector("#states-error [role=alert]")


def violations(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("form", [{}, PHONE], ids=["desktop", "phone"])
def test_contrast_names_and_roles(
    open_page: Opened, server: Server, scheme: str, form: dict[str, Any]
) -> None:
    page = open_page(server.url, color_scheme=scheme, **form)
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 3 * 64) == (scheme == "dark")
    assert violations(page) == []
    fill_up(page)
    assert violations(page) == []
    page.focus("#answer")
    page.keyboard.press("End")
    page.wait_for_selector("#token-card", state="visible")
    assert violations(page) == []
    write(page, max_tokens=500_000)
    page.wait_for_selector("#answer .token")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.click("#tab-score")
    page.fill("#own", PROMPT)
    page.click("#run-score")
    page.wait_for_selector("#totals", state="visible")
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("form", [{}, PHONE], ids=["desktop", "phone"])
def test_starts_forks_and_long_texts(
    open_page: Opened, tmp_path: Path, scheme: str, form: dict[str, Any]
) -> None:
    with offering(tmp_path) as url:
        page = open_page(url, color_scheme=scheme, **form)
        page.click(f"[data-start='{AUSTEN}']")
        page.wait_for_selector(f"[data-start='{AUSTEN}'][aria-pressed=true]")
        for tab, act in (("fork", fill_columns), ("read", fill_reading)):
            page.click(f"#tab-{tab}")
            assert violations(page) == []
            act(page)
            assert violations(page) == []
            assert wide_ones(page) == []


def fill_columns(page: Any) -> None:
    """Three columns, the first of which says that something was refused."""
    page.locator("#fork-columns select").first.select_option("")
    page.fill("#sentence", "")
    page.click("#run-fork")
    page.wait_for_selector("#fork-columns [role=alert]")
    page.wait_for_selector("#stop-fork", state="hidden")


def fill_reading(page: Any) -> None:
    """A text that was read, then one that is refused."""
    book = {"name": "a" * 60 + ".txt", "mimeType": "text/plain", "buffer": b"A tale."}
    page.set_input_files("#read-file", files=[book])
    page.click("#run-read")
    page.wait_for_selector("#ask-on")
    assert violations(page) == []
    page.click("#run-read")  # the name is taken
    page.wait_for_selector("#read-error [role=alert]")


def wide_ones(page: Any) -> Any:
    """What is wider than the window."""
    return page.evaluate(
        "[...document.querySelectorAll('body *')].filter((one) => one.checkVisibility()"
        " && !one.closest('.hidden, .skip')"
        " && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"
    )


@pytest.mark.parametrize("width", [320, 390, 768, 1024])
def test_nothing_is_wider_than_the_window(open_page: Opened, server: Server, width: int) -> None:
    page = open_page(server.url, **{**PHONE, "viewport": {"width": width, "height": 700}})
    fill_up(page)
    page.fill("#prompt", "x" * 300)
    for tab in ("#tab-write", "#tab-fork", "#tab-read", "#tab-score"):
        page.click(tab)
        assert wide_ones(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.evaluate(
        "[...document.querySelectorAll('button')].filter((one) => one.checkVisibility())"
        ".filter((one) => one.offsetHeight < 32).map((one) => one.textContent)"
    )
    assert small == []


def test_with_the_keyboard_alone(page: Any) -> None:
    def focused() -> Any:
        return page.evaluate("document.activeElement.id || document.activeElement.textContent")

    page.keyboard.press("Tab")
    assert "prompt" in focused()
    page.keyboard.press("Enter")  # past the header
    page.keyboard.press("Tab") if focused() != "prompt" else None
    assert focused() == "prompt"
    page.keyboard.type("ROMEO:")
    page.fill("#sampling-max_tokens", "30")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#answer .token")
    wait_for_end(page)
    assert focused() == "prompt" and len(answer(page)) > 10
    page.keyboard.press("Tab")
    assert focused() == "answer"
    for key, unit in (("ArrowRight", "0"), ("ArrowRight", "1"), ("End", "29"), ("ArrowLeft", "28")):
        page.keyboard.press(key)
        assert page.get_attribute("#answer .current", "data-unit") == unit
    until(page, "document.querySelector('#status').textContent.includes('%')")
    page.keyboard.press("Escape")
    assert not page.is_visible("#token-card")
    order = []
    while not order or order[-1] != "states-again":
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", focused()  # the focus is to be seen
        order.append(focused())
        assert len(order) < 10
    assert order == ["generate", "continue", "save", "copy", "clear", "states-again"]
    page.focus("#tab-write")
    for tab in ("tab-fork", "tab-read", "tab-score"):
        page.keyboard.press("ArrowRight")
        assert focused() == tab
    assert page.is_visible("#own")
    page.focus("#own")
    page.keyboard.type("ROMEO:")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#totals", state="visible")


def test_the_buttons_that_change_places_keep_the_focus(page: Any) -> None:
    page.fill("#prompt", PROMPT)
    page.fill("#sampling-max_tokens", "500000")
    page.focus("#generate")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer .token")
    assert page.evaluate("document.activeElement.id") == "stop"
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert page.evaluate("document.activeElement.id") == "generate"


def test_screen_readers_hear_of_beginnings_and_ends(page: Any) -> None:
    page.evaluate(
        "const status = document.querySelector('#status'); window.heard = [];"
        "new MutationObserver(() => { if (status.textContent) heard.push(status.textContent); })"
        ".observe(status, {childList: true})"
    )
    write(page, max_tokens=200)
    wait_for_end(page)
    until(page, "heard.some((text) => text.startsWith('Ended after 200 tokens'))")
    assert page.evaluate("heard.length") == 2
    live = page.evaluate(
        "[...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')]"
        ".filter((one) => one.querySelector('.token')).length"
    )
    assert live == 0


def test_no_motion_where_none_is_wanted(open_page: Opened, server: Server) -> None:
    for motion, name in (("reduce", "none"), ("no-preference", "blink")):
        page = open_page(server.url, reduced_motion=motion)
        write(page, max_tokens=500_000)
        page.wait_for_selector("#answer .token")
        caret = "getComputedStyle(document.querySelector('#answer .block:last-child'), '::after')"
        assert page.evaluate(f"{caret}.animationName") == name
        page.keyboard.press("Escape")


def test_the_servers_figures_move(page: Any) -> None:
    write(page, max_tokens=500_000)
    until(page, "document.querySelector('#load b').textContent === '1'")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#load b').textContent === '0'")
    labels = page.evaluate(
        "[...document.querySelectorAll('#load svg')].map((one) => one.getAttribute('aria-label'))"
    )
    assert [label.split(":")[0] for label in labels] == [
        "Running", "Waiting", "Tokens/s", "First token",
    ]  # fmt: skip
    assert labels[0] == "Running: now 0, at most 1 lately"
    assert page.evaluate("document.querySelector('#load .line').getAttribute('d').length") > 10
