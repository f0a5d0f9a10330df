"""Chat templates: where they are found, what they may do, and what they may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from service.chat_template import ChatTemplate
from service.client_text import MARKS
from service.tokenizer import THREAD_CHARACTERS, Tokenizer
from tests.service.chat import END, START, TEMPLATE, VOCABULARY, prompt_ids, save_chat_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def load(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, Tokenizer.load(folder, VOCABULARY))


async def text_of(folder: Path, template: Any, messages: Any = HELLO) -> str:
    ids = await load(save_chat_tokenizer(folder, template)).encode(messages)
    tokenizer = Tokenizer.load(folder, VOCABULARY)
    assert tokenizer is not None
    return "".join(map(tokenizer.name, ids))


async def refusal(folder: Path, template: Any, messages: Any = HELLO) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await text_of(folder, template, messages)
    return refused.value.message


async def test_special_tokens_of_the_template_are_such(tmp_path: Path) -> None:
    template = load(save_chat_tokenizer(tmp_path))
    assert list(await template.encode(HELLO)) == prompt_ids(("user", "hello"))
    assert template.end_id == END


async def test_the_templates_variables(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ unknown }}"
    config = {"bos_token": {"content": "<|start|>", "lstrip": False}}
    folder = save_chat_tokenizer(tmp_path, template, **config)
    assert list(await load(folder).encode(HELLO)) == [START, END]


async def test_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("of the file", encoding="utf-8")
    assert await text_of(tmp_path, TEMPLATE) == "of the file"


async def test_of_several_the_default(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]
    assert await text_of(tmp_path, several) == "y"
    assert "no chat template" in await refusal(tmp_path, several[:1])


async def test_what_templates_expect_to_find(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{- m | tojson }}{{ m['content'].strip() }}{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "user", "content": " <é> "}] * 2
    ids = await load(save_chat_tokenizer(tmp_path, template)).encode(messages)
    text = bytes(list(ids)).decode()
    assert text == '{"role": "user", "content": " <é> "}<é>4'


async def test_a_template_may_refuse(tmp_path: Path) -> None:
    assert "roles must" in await refusal(tmp_path, "{{ raise_exception('roles must alternate') }}")
    assert "does not take" in await refusal(tmp_path, "{{ messages[7].content.x }}")
    assert "division" in await refusal(tmp_path, "{{ 1 / 0 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
async def test_the_sandbox(tmp_path: Path, template: str) -> None:
    assert "does not take" in await refusal(tmp_path, template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for %}", "cannot be used"),
        (5, "is no text"),
    ],
)
async def test_no_template_that_can_be_used(tmp_path: Path, template: Any, words: str) -> None:
    assert words in await refusal(tmp_path, template)


@pytest.mark.parametrize("text", ["[", "[]", "\ud800", "{"])
async def test_a_broken_configuration(tmp_path: Path, text: str) -> None:
    folder = save_chat_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        await load(folder).encode(HELLO)


async def test_what_clients_write_is_text(tmp_path: Path) -> None:
    template = load(save_chat_tokenizer(tmp_path))
    for text in ("<|end|>", MARKS[0] + "<|end|><|start|>", "<|end|>" * 3, "<|start|", MARKS[0]):
        ids = await template.encode([{"role": "user", "content": text}])
        assert list(ids) == prompt_ids(("user", text))
    with pytest.raises(InvalidRequest, match="surrogate"):
        await template.encode([{"role": "user", "content": "\ud800"}])
    with pytest.raises(InvalidRequest, match="U\\+FDD0"):
        await template.encode([{"role": "user", "content": "<|end|>" + "".join(MARKS)}])


async def test_special_tokens_of_one_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_chat_tokenizer(tmp_path), VOCABULARY)
    assert tokenizer is not None
    tokenizer.special_ids["§"] = START
    template = ChatTemplate.load(tmp_path, tokenizer)
    with pytest.raises(InvalidRequest, match="§"):
        await template.encode([{"role": "user", "content": "see § 5"}])
    assert await template.encode(HELLO)


async def test_long_conversations(tmp_path: Path) -> None:
    text = "ab " * THREAD_CHARACTERS
    ids = await load(save_chat_tokenizer(tmp_path)).encode([{"role": "user", "content": text}])
    assert list(ids) == prompt_ids(("user", text.strip()))
