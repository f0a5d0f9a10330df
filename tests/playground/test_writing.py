"""Writing: text streams in, can be stopped, shows how likely it was, and says what went wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import PROMPT, Opened, answer, until, wait_for_end, write


def frames(*contents: Any, done: bool = True) -> str:
    """A stream as the server sends it."""
    text = "".join(f"data: {json.dumps(content)}\n\n" for content in contents)
    return text + ("data: [DONE]\n\n" if done else "")


def piece(text: str, token: int = 1, **more: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": [token], "finish_reason": None, **more}


def answering(body: str) -> Any:
    """Puts `body` in the place of every stream."""

    def fulfill(route: Any) -> None:
        route.fulfill(body=body, headers={"content-type": "text/event-stream"})

    return "**/v1/generate", fulfill


def test_the_text_is_what_the_service_says(page: Any, server: Server) -> None:
    write(page)
    wait_for_end(page)
    body = {"prompts": [PROMPT], "max_tokens": 40, "seed": 7, "temperature": 0.8}
    expected = httpx.post(f"{server.url}/v1/generate", json=body, timeout=60).json()
    assert answer(page) == expected["results"][0]["text"]
    assert page.inner_text("#pace-tokens") == "40"
    assert re.fullmatch(r"[\d.,]+", page.inner_text("#pace-rate"))
    assert re.fullmatch(r"[\d.,]+ m?s", page.inner_text("#pace-first"))
    assert page.inner_text("#pace-end") == "max tokens"


def test_the_text_grows_and_stops(page: Any, server: Server) -> None:
    write(page, max_tokens=500_000)
    lengths = []
    for _ in range(3):
        least = lengths[-1] if lengths else 0
        until(page, f"document.querySelector('#answer').textContent.length > {least + 20}")
        lengths.append(len(answer(page)))
    assert page.get_attribute("#answer", "aria-busy") == "true"
    page.click("#stop")
    wait_for_end(page)
    stopped = answer(page)
    assert page.inner_text("#pace-end") == "you"
    assert page.is_visible("#generate") and not page.is_visible("#write-error")
    # The service has ended the request as well.
    until(
        page,
        "fetch('metrics').then((said) => said.text())"
        ".then((text) => /minserve_requests_running 0/.test(text))",
    )
    assert answer(page) == stopped


def test_a_double_click_asks_once(page: Any) -> None:
    asked = []
    page.on("request", lambda one: asked.append(one) if "generate" in one.url else None)
    page.fill("#prompt", PROMPT)
    page.fill("#sampling-max_tokens", "500000")
    page.evaluate(
        "const button = document.querySelector('#generate'); button.click(); button.click()"
    )
    page.wait_for_selector("#answer .token")
    assert len(asked) == 1
    page.keyboard.press("Escape")
    wait_for_end(page)


def test_tokens_show_how_likely_they_were(page: Any) -> None:
    write(page, max_tokens=120)
    wait_for_end(page)
    tokens = page.locator("#answer .token")
    assert tokens.count() == 120
    looks = page.evaluate(
        "[...new Set([...document.querySelectorAll('#answer .token')]"
        ".map((token) => token.className.match(/p\\d/)[0]))].sort()"
    )
    assert len(looks) >= 3
    thickness = {
        look: page.evaluate(
            f"getComputedStyle(document.querySelector('#answer .{look}')).borderBottomWidth"
        )
        for look in looks
    }
    assert len(set(thickness.values())) == len(looks)  # colour is not all that tells them apart
    assert page.is_visible("#legend")
    tokens.nth(10).hover()
    card = page.inner_text("#token-card")
    assert re.search(r"[\d.]+ % · -?[\d.e-]+ nats", card)
    assert page.locator("#token-card li").count() >= 5
    shares = page.evaluate(
        "[...document.querySelectorAll('#token-card li > span:last-child')]"
        ".map((span) => parseFloat(span.textContent.replace('<', '')))"
    )
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 100.5


def test_without_colours_the_text_is_plain(page: Any) -> None:
    page.uncheck("#marks")
    with page.expect_request("**/v1/generate") as asked:
        write(page)
    wait_for_end(page)
    assert "logprobs" not in asked.value.post_data_json
    assert page.locator("#answer .token").count() == 0 and len(answer(page)) > 20
    assert not page.is_visible("#legend")


def test_parameters_are_sent_as_they_are_set(page: Any) -> None:
    page.click("text=Stop strings and penalties")
    page.fill("#stop-strings", "\\n\\n\nKING")
    values = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_tokens": 30, "seed": 3,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    with page.expect_request("**/v1/generate") as asked:
        write(page, **values)
    wait_for_end(page)
    sent = asked.value.post_data_json
    assert {name: sent[name] for name in values} == values
    assert sent["stop"] == ["\n\n", "KING"] and sent["model"] == "shakespeare-mingru"
    page.click("#sampling-reset")
    with page.expect_request("**/v1/generate") as asked:
        page.click("#generate")
    wait_for_end(page)
    assert set(asked.value.post_data_json) == {
        "prompts", "model", "stream", "temperature", "max_tokens", "logprobs",
    }  # fmt: skip


def test_going_on_takes_the_answer_along(page: Any) -> None:
    write(page)
    wait_for_end(page)
    first = answer(page)
    with page.expect_request("**/v1/generate") as asked:
        page.click("#continue")
    assert asked.value.post_data_json["prompts"] == [PROMPT + first]
    wait_for_end(page)
    assert page.input_value("#prompt") == PROMPT + first
    page.click("#clear")
    assert page.input_value("#prompt") == answer(page) == ""


def test_an_error_stands_in_the_services_words(page: Any) -> None:
    write(page, top_p=7)
    page.wait_for_selector("#write-error [role=alert]")
    assert "top_p" in page.inner_text("#write-error")
    assert page.get_attribute("#sampling-top_p", "aria-invalid") == "true"
    assert not page.is_visible("#pace")
    write(page, prompt="", top_p=1)
    page.wait_for_selector("text=at least one token is needed")
    assert page.get_attribute("#sampling-top_p", "aria-invalid") is None
    write(page)
    wait_for_end(page)
    assert not page.is_visible("#write-error") and answer(page)


def test_a_full_server_is_given_its_time(open_page: Opened, server: Server) -> None:
    refusals = [0]

    def refuse(route: Any) -> None:
        refusals[0] += 1
        if refusals[0] > 1:
            return route.continue_()
        error = {"message": "the queue is full", "type": "t", "param": None, "code": "queue_full"}
        headers = {"retry-after": "2", "content-type": "application/json"}
        route.fulfill(status=429, headers=headers, body=json.dumps({"error": error}))

    page = open_page(server.url, route=("**/v1/generate", refuse))
    write(page)
    page.wait_for_selector("text=the queue is full")
    again = page.locator("#write-error button")
    assert re.fullmatch(r"Again in [12] s", again.inner_text())
    for early in (page.locator("#generate"), again):
        early.click(force=True)
    assert refusals == [1]
    page.wait_for_selector("#write-error button:text-is('Try again')")
    again.click()
    page.wait_for_selector("#answer .token")
    wait_for_end(page)
    assert refusals == [2] and not page.is_visible("#write-error")


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (
            {"index": 0, "error": {"message": "the engine died", "code": "engine_dead"}},
            "the engine",
        ),
        (None, "The connection ended before the answer did."),
    ],
)
def test_what_came_before_an_error_stays(
    open_page: Opened, server: Server, tail: Any, message: str
) -> None:
    body = frames(piece("half an "), piece("answer"), *([tail] if tail else []), done=False)
    page = open_page(server.url, route=answering(body))
    write(page)
    page.wait_for_selector("#write-error [role=alert]")
    assert message in page.inner_text("#write-error")
    assert answer(page) == "half an answer"
    assert page.inner_text("#pace-end") == "an error"
    assert page.is_visible("#generate") and page.is_visible("#continue")


def test_a_server_that_has_gone(open_page: Opened, server: Server) -> None:
    page = open_page(server.url, route=("**/v1/generate", lambda route: route.abort()))
    write(page)
    page.wait_for_selector("text=The server cannot be reached.")


def test_markup_is_text(open_page: Opened, server: Server) -> None:
    evil = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
    logprobs = {
        "tokens": [evil], "token_logprobs": [-1.0], "text_offset": [0],
        "top_logprobs": [{evil: -1.0, "__proto__": -2.0, "1": -3.0}],
    }  # fmt: skip
    body = frames(piece(evil, logprobs=logprobs), piece("", finish_reason="length"))
    page = open_page(server.url, route=answering(body))
    write(page, prompt=evil)
    wait_for_end(page)
    assert answer(page) == evil
    page.hover("#answer .token")
    assert evil.replace(" ", "␣") in page.inner_text("#token-card")
    assert page.locator("#token-card li").count() == 3
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.title() == "minserve"


def test_a_long_answer_is_whole_and_does_not_fill_the_document(
    open_page: Opened, server: Server
) -> None:
    def word(i: int) -> dict[str, Any]:
        text = f"w{i}" + ("\n" if i % 10 == 9 else " ")
        logprobs = {
            "tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [None], "text_offset": [0],
        }  # fmt: skip
        return piece(text, logprobs=logprobs)

    many = 20_000
    body = frames(*map(word, range(many)), piece("", finish_reason="length"))
    page = open_page(server.url, route=answering(body))
    write(page)
    wait_for_end(page)
    expected = "".join(word(i)["text"] for i in range(many))
    assert answer(page) == expected
    assert page.locator("#answer .token").count() == 5000
    assert page.evaluate("document.querySelectorAll('#answer *').length") < 5200
    assert "5,000" in page.inner_text("#write-note")


def test_emoji_and_tokens_without_text(open_page: Opened, server: Server) -> None:
    def logprobs(*names: str) -> dict[str, Any]:
        return {
            "tokens": list(names), "token_logprobs": [-1.0] * len(names),
            "top_logprobs": [{name: -1.0} for name in names], "text_offset": [0] * len(names),
        }  # fmt: skip

    parts = [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
    body = frames(
        *(piece("", logprobs=logprobs(name)) for name in parts[:2]),
        piece("😀", logprobs=logprobs(parts[2])),
        piece("", finish_reason="stop", logprobs=logprobs("<|endoftext|>")),
    )
    page = open_page(server.url, route=answering(body))
    write(page)
    wait_for_end(page)
    tokens = page.locator("#answer .token")
    assert tokens.all_inner_texts() == ["😀", "<|endoftext|>"]
    assert "p2" not in (tokens.nth(0).get_attribute("class") or "")  # e**-3 of all three
    tokens.nth(0).hover()
    assert all(name in page.inner_text("#token-card") for name in parts)
    with page.expect_request("**/v1/generate") as asked:
        page.click("#continue")
    assert asked.value.post_data_json["prompts"] == [PROMPT + "😀"]


def test_what_a_stop_string_cut_off_is_not_in_the_text(page: Any) -> None:
    page.click("text=Stop strings and penalties")
    page.fill("#stop-strings", "\\n\\n")
    write(page, prompt="First Citizen:\n", max_tokens=2000)
    wait_for_end(page)
    assert page.inner_text("#pace-end") == "end of text or stop string"
    with page.expect_request("**/v1/generate") as asked:
        page.click("#continue")
    (prompt,) = asked.value.post_data_json["prompts"]
    assert len(prompt) > 20 and not prompt.endswith("\n\n")


def test_a_model_that_was_replaced_is_named_again(open_page: Opened, server: Server) -> None:
    page = open_page(server.url)
    page.evaluate("document.querySelector('#model option').value = 'former'")
    write(page)
    page.wait_for_selector("#write-error [role=alert]:has-text('former')")
    until(page, "document.querySelector('#model').value === 'shakespeare-mingru'")
    write(page)
    wait_for_end(page)
    assert answer(page) and not page.is_visible("#write-error")


def test_the_end_is_followed_until_somebody_reads_back(page: Any) -> None:
    end = "document.querySelector('#answer').getBoundingClientRect().bottom"
    bar = "document.querySelector('#write .bar').getBoundingClientRect().top"
    write(page, max_tokens=500_000)
    until(page, "scrollY > 300", seconds=60)
    for _ in range(5):
        assert page.evaluate(f"{end} <= {bar} + 1")
        page.wait_for_timeout(100)
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(300)  # until it has scrolled
    read, length = page.evaluate("scrollY"), len(answer(page))
    until(page, f"document.querySelector('#answer').textContent.length > {length + 200}")
    assert page.evaluate("scrollY") == read
    page.keyboard.press("Escape")
    wait_for_end(page)
