"""What clients say of their bodies: which types each endpoint reads, and what it says of others."""

from __future__ import annotations

import pytest

from tests.service.harness import Service, error_message
from tests.service.inference.test_operation import scrape, value

TEXT = "/v1/states/text"
FORM = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc\r\n--x--\r\n'
MULTIPART = "multipart/form-data; boundary=x"
JSON = (
    "/v1/generate",
    "/v1/score",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/states",
    "/v1/states/any/fork",
)


def type_of(given: str | None) -> dict[str, str]:
    return {} if given is None else {"content-type": given}


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "text/plain",
        "Text/Plain; Charset=UTF-8",
        'text/plain; charset="utf-8"',
        "text/plain;charset=utf8",
        "text/plain; charset=us-ascii",
        "text/plain; format=flowed",
        "text/markdown",
        "application/octet-stream",
        "application/x-www-form-urlencoded",  # what curl --data-binary sends by itself
    ],
)
async def test_a_text_is_the_body_as_it_is(service: Service, given: str | None) -> None:
    content = "é=b&c\n".encode()
    response = await service.http.post(TEXT, content=content, headers=type_of(given))
    assert response.status_code == 200, response.text
    assert response.json()["tokens"] == len(content)


@pytest.mark.parametrize(
    "given",
    [MULTIPART, "Multipart/Mixed; boundary=x", "application/json", "application/pdf", "image/png"],
)
async def test_other_types_are_no_texts(service: Service, given: str) -> None:
    response = await service.http.post(TEXT, content=FORM, headers=type_of(given))
    assert response.status_code == 415, response.text
    message = error_message(response.json(), None)
    assert message.startswith(f"content-type: {given.partition(';')[0].lower()} is not supported")
    assert "allowed: text/plain" in message and "as the body" in message
    assert response.json()["error"]["code"] == "unsupported_content_type"
    assert (await service.http.get("/v1/states")).json()["data"] == []


@pytest.mark.parametrize(
    "given", ["text/plain; charset=latin-1", 'text/plain; charset="UTF-16"', "text/csv;charset=x'y"]
)
async def test_nor_are_other_charsets(service: Service, given: str) -> None:
    response = await service.http.post(TEXT, content=b"abc", headers=type_of(given))
    assert response.status_code == 415, response.text
    message = error_message(response.json(), None)
    assert "charset" in message and message.endswith("allowed: utf-8")


@pytest.mark.parametrize("path", [*JSON, "/v1/states/import"])
async def test_nobody_reads_forms_of_several_parts(service: Service, path: str) -> None:
    response = await service.http.post(path, content=FORM, headers=type_of(MULTIPART))
    assert response.status_code == 415, response.text
    message = error_message(response.json(), None)
    allowed = "application/octet-stream" if path.endswith("import") else "application/json"
    assert message.startswith("content-type: multipart/form-data is not supported")
    assert f"allowed: {allowed}" in message


@pytest.mark.parametrize("path", JSON[:-1])
async def test_a_form_instead_of_json_is_told_the_type(service: Service, path: str) -> None:
    """Which is all that such a body may lack: curl -d sends JSON so."""
    form = type_of("application/x-www-form-urlencoded")
    response = await service.http.post(path, content=b"prompt=abc", headers=form)
    assert response.status_code == 400
    assert "content-type: application/json" in error_message(response.json(), None)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 200),
        ("application/octet-stream", 200),
        ("application/x-www-form-urlencoded", 200),
        ("application/json", 415),
        ("text/plain", 415),
    ],
)
async def test_types_of_a_file(service: Service, given: str | None, status: int) -> None:
    made = await service.http.post(f"{TEXT}?id=a", content=b"abc")
    assert made.status_code == 200
    file = (await service.http.get("/v1/states/a/content")).content
    response = await service.http.post("/v1/states/import", content=file, headers=type_of(given))
    assert response.status_code == status, response.text


async def test_it_counts_as_the_clients_mistake(service: Service) -> None:
    await service.http.post(TEXT, content=FORM, headers=type_of(MULTIPART))
    families = await scrape(service)
    labels = {"endpoint": "states/text", "outcome": "invalid"}
    assert value(families, "minserve_requests_total", **labels) == 1
    code = "unsupported_content_type"
    assert value(families, "minserve_request_errors_total", code=code) == 1
