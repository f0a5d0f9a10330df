"""States as chips in a tree: saved, gone on from, forked, deleted, as the service has them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import PROMPT, Opened, answer, until, wait_for_end, write


@pytest.fixture(autouse=True)
def no_states(server: Server) -> None:
    """Nothing is left of other tests."""
    for state in listed(server):
        httpx.delete(f"{server.url}/v1/states/{state['id']}")


def listed(server: Server) -> list[Any]:
    return list(httpx.get(f"{server.url}/v1/states").json()["data"])


def save(page: Any) -> str:
    """The id of the state that is saved now."""
    with page.expect_response("**/v1/states") as made:
        page.click("#save")
    id = str(made.value.json()["id"])
    page.wait_for_selector(chip(id))
    return id


def chip(id: str) -> str:
    return f"[data-state='{id}']"


def tree(page: Any) -> Any:
    """Ids, nested as the chips are."""
    return page.evaluate(
        "(function branch(list) { return Object.fromEntries([...list.children].map((item) => ["
        "item.querySelector('button').dataset.state,"
        "item.querySelector(':scope > ul') ? branch(item.querySelector(':scope > ul')) : {}"
        "])); })(document.querySelector('#tree > ul'))"
    )


def test_going_on_from_a_saved_state_is_as_one_text(page: Any, server: Server) -> None:
    write(page, temperature=0)
    wait_for_end(page)
    first = answer(page)
    id = save(page)
    (state,) = listed(server)
    assert state["id"] == id and state["tokens"] == len(PROMPT + first)
    page.click(chip(id))
    assert page.get_attribute(chip(id), "aria-pressed") == "true"
    assert page.inner_text("#write-before") == PROMPT + first
    assert page.input_value("#prompt") == answer(page) == ""
    card = page.inner_text("#state-card")
    assert id in card and f"{state['tokens']} tokens" in card and "22.5 KiB" in card
    assert "in 23 hours" in card
    page.click("text=Continue from here")
    assert page.evaluate("document.activeElement.id") == "prompt"
    with page.expect_request("**/v1/generate") as asked:
        page.keyboard.press("Control+Enter")
    assert asked.value.post_data_json["state"] == id
    wait_for_end(page)
    body = {"prompts": [PROMPT], "max_tokens": 80, "temperature": 0}
    whole = httpx.post(f"{server.url}/v1/generate", json=body, timeout=60).json()
    assert first + answer(page) == whole["results"][0]["text"]


def test_branches_stand_where_they_came_from(page: Any, server: Server) -> None:
    page.fill("#prompt", "KING:\n")
    parent = save(page)
    page.click(chip(parent))
    children = []
    for line in ("Go.", "Stay."):
        page.fill("#prompt", line)
        children.append(save(page))
    page.fill("#fork-name", "a-copy")
    page.press("#fork-name", "Enter")
    page.wait_for_selector(chip("a-copy"))
    expected: Any = {"": {parent: {children[0]: {}, children[1]: {}, "a-copy": {}}}}
    assert tree(page) == expected
    assert "…" not in page.inner_text(chip(children[0]))
    assert "KING: Go." in page.inner_text(chip(children[0]))
    # They are the service's, and outlast the page, which remembers what came from what.
    page.reload()
    page.wait_for_selector(chip("a-copy"))
    assert tree(page) == expected
    page.click(chip(children[1]))
    assert page.inner_text("#write-before") == "KING:\nStay."


def test_deleting_leaves_what_came_after(page: Any, server: Server) -> None:
    page.fill("#prompt", "KING:\n")
    parent = save(page)
    page.click(chip(parent))
    page.fill("#prompt", "Go.")
    child = save(page)
    remove = page.locator("#state-card button.danger")
    remove.click()
    assert {state["id"] for state in listed(server)} == {parent, child}  # asked first
    remove.click()
    page.wait_for_selector(chip(parent), state="detached")
    assert [state["id"] for state in listed(server)] == [child]
    assert tree(page) == {"": {child: {}}}
    assert page.get_attribute(chip(""), "aria-pressed") == "true"
    assert not page.is_visible("#state-card") and not page.is_visible("#write-before")


def test_a_prompt_is_kept_for_another_state(page: Any) -> None:
    page.fill("#prompt", "KING:\n")
    id = save(page)
    page.fill("#prompt", "Something else.")
    page.click(chip(id))
    assert page.input_value("#prompt") == "Something else."


def test_states_of_others_and_lost_ones(open_page: Opened, server: Server) -> None:
    httpx.post(f"{server.url}/v1/states", json={"prompt": "Not of this page.", "id": "other"})
    page = open_page(server.url)
    page.wait_for_selector(chip("other"))
    page.click(chip("other"))
    assert "other" in page.inner_text("#write-before")
    httpx.delete(f"{server.url}/v1/states/other")
    page.fill("#prompt", "And")
    page.click("#generate")
    page.wait_for_selector("#write-error [role=alert]:has-text('other')")
    page.wait_for_selector(chip("other"), state="detached")
    assert page.get_attribute(chip(""), "aria-pressed") == "true"
    assert page.input_value("#prompt") == "And"


def test_names_are_the_services_to_refuse(page: Any, server: Server) -> None:
    page.fill("#prompt", "KING:\n")
    page.click(chip(save(page)))
    page.fill("#fork-name", "no blanks/<b>")
    page.click("#state-card >> text=Fork")
    page.wait_for_selector("#states-error [role=alert]")
    assert page.inner_text("#states-error").startswith("id:")
    assert len(listed(server)) == 1


def test_choosing_a_state_ends_what_is_under_way(page: Any) -> None:
    page.fill("#prompt", "KING:\n")
    id = save(page)
    write(page, max_tokens=500_000)
    page.wait_for_selector("#answer .token")
    page.click(chip(id))
    wait_for_end(page)
    until(page, "document.querySelector('#answer').textContent === ''")
    page.wait_for_timeout(200)
    assert answer(page) == "" and not page.is_visible("#write-error")
