"""Chat templates: where they are found, what they may do, and what they may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from service.text.chat_template import Asked, ChatTemplate
from service.text.client_text import MARKS
from service.text.tokenizer import THREAD_CHARACTERS, Tokenizer
from tests.service.chat import END, START, TEMPLATE, VOCABULARY, prompt_ids, save_chat_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def load(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, Tokenizer.load(folder, VOCABULARY))


CONTINUED = Asked(add_generation_prompt=False, continue_final_message=True)


async def text_of(
    folder: Path, template: Any, messages: Any = HELLO, asked: Asked | None = None
) -> str:
    ids = await load(save_chat_tokenizer(folder, template)).encode(messages, asked or Asked())
    tokenizer = Tokenizer.load(folder, VOCABULARY)
    assert tokenizer is not None
    return "".join(map(tokenizer.name, ids))


async def refusal(
    folder: Path, template: Any, messages: Any = HELLO, asked: Asked | None = None
) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await text_of(folder, template, messages, asked)
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


async def test_of_several_in_an_object(tmp_path: Path) -> None:
    assert await text_of(tmp_path, {"tool_use": "x", "default": "y"}) == "y"


async def test_the_file_of_older_processors_goes_last(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.json"
    path.write_text('{"chat_template": "of the processor"}')
    assert await text_of(tmp_path, None) == "of the processor"
    assert await text_of(tmp_path, TEMPLATE) != "of the processor"
    path.write_text('{"chat_template": 5}')
    assert "chat_template.json is not a string" in await refusal(tmp_path, None)
    path.write_text("{}")
    assert "no chat template" in await refusal(tmp_path, None)


NAMES = (
    "{{ bos_token }},{{ eos_token }},{{ pad_token }},{{ image_token }},{{ audio_token }},"
    "{{ additional_special_tokens | join(' ') }}"
)


async def test_names_of_special_tokens(tmp_path: Path) -> None:
    saved = {
        "bos_token": {"content": "B", "lstrip": False}, "eos_token": "E2", "pad_token": "P",
        "additional_special_tokens": ["x", {"content": "y"}],
    }  # fmt: skip
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(saved))
    config = {"extra_special_tokens": {"audio_token": "A"}, "image_token": "I", "pad_token": None}
    (tmp_path / "chat_template.jinja").write_text(NAMES)

    async def text(**config: Any) -> str:
        save_chat_tokenizer(tmp_path, **config)
        tokenizer = Tokenizer.load(tmp_path, VOCABULARY)
        assert tokenizer is not None
        ids = await load(tmp_path).encode(HELLO)
        return b"".join(map(tokenizer.bytes_of, ids)).decode()

    # As transformers reads them: where the configuration lists added tokens, it goes first.
    assert await text(**config, eos_token="E") == "B,E2,P,I,A,x y"
    assert await text(**config, eos_token="E", added_tokens_decoder={}) == "B,E,,I,A,x y"
    (tmp_path / "tokenizer_config.json").unlink()
    library = load(tmp_path)
    assert bytes(list(await library.encode(HELLO))).decode() == "B,E2,P,,,x y"


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
    assert "does not accept" in await refusal(tmp_path, "{{ messages[7].content.x }}")
    assert "division" in await refusal(tmp_path, "{{ 1 / 0 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ range(10 ** 9) | list }}",
        "{{ namespace(_x=1)._x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__mro__.x }}",
        "{{ messages[0].content._knife.mark }}",
        "{{ messages[0].content.split.__func__.x }}",
        "{{ messages[0].content.split.__globals__.x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
async def test_the_sandbox(tmp_path: Path, template: str) -> None:
    assert "does not accept" in await refusal(tmp_path, template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for %}", "cannot be used"),
        ("{% break %}", "cannot be used"),
        (r"{{ 1 | \ud800 }}", "cannot be used"),
        ("{% generation %}", "cannot be used"),
        ("{{ " + "(" * 5000, "cannot be used"),
        (5, "is not a string"),
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


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ c.split('<|end|>') | join(',') }}", "a<|end|>b<|end|>", "a,b,"),
        ("{{ c.rsplit('<|end|>', 1)[0] }}", "a<|end|>b<|end|>c", "a<|end|>b"),
        ("{{ c.partition('<|end|>')[2] }}", "a<|end|>b<|end|>", "b<|end|>"),
        (
            "{{ '<|end|>' in c }}{{ c == '<|end|>' }}{{ c != '<|end|>' }}",
            "<|end|>",
            "TrueTrueFalse",
        ),
        ("{{ '<|' in c }}{{ '|end|>' in c }}{{ 'x' in c }}", "<|end|>", "TrueTrueFalse"),
        ("{{ c.startswith('<|end|>') }}{{ c.endswith('<|end|>') }}", "<|end|>", "TrueTrue"),
        ("{{ c.startswith(('x', '<|end|>')) }}{{ c.count('<|end|>') }}", "<|end|>" * 2, "True2"),
        ("{{ c.replace('<|end|>', '!') }}", "a<|end|>", "a!"),
        ("{{ c | replace('<|end|>', '!') | trim }}", " a<|end|> ", "a!"),
        ("{{ c | trim | replace('b', '<|end|>') }}", " abc", "a[258]c"),
        ("{{ (c + '<|end|>') | trim }}{{ ('<|end|>' + c).strip() }}", " a ", "a [258][258] a"),
        ("{{ ('<|end|>' + c + '<|end|>').upper().lower() }}", "A", "[258]a[258]"),
        ("{{ c | lower }}", "<|END|>", "<|end|>"),
        ("{{ c.replace('x', '') }}", "<|exnxd|>", "<|end|>"),
        ("{{ c.replace('x', '|') }}", "<xend|>", "<|end|>"),
        ("{{ c[:2] + c[3:] }}", "<|xend|>", "<|end|>"),
        ("{{ c.removeprefix('<|end|>') }}{{ c.find('<|end|>') }}", "<|end|>a", "a0"),
        ("{{ c | tojson(true) }}", "é<|end|>", '"\\u00e9<|end|>"'),
        ("{{ c | tojson(true) }}", "\\ufdd0<|end|>", '"\\\\ufdd0<|end|>"'),
        ("{{ messages[0] }}", "<|end|>", "{'role': 'user', 'content': '<|end|>'}"),
        ("{{ '%s' % c }}{{ c.format() }}{{ '{}'.format(c) }}", "<|end|>", "<|end|>" * 3),
        ("{{ {'a': 1}[c] }}{{ {'b': 2}[c[:0] + 'b'] }}", "a", "12"),
    ],
)
async def test_what_templates_make_of_spelled_out_special_tokens(
    tmp_path: Path, template: str, content: str, expected: str
) -> None:
    """[258] stands for the token."""
    template = "{% set c = messages[0].content %}" + template
    folder = save_chat_tokenizer(tmp_path, template)
    tokenizer = Tokenizer.load(folder, VOCABULARY)
    assert tokenizer is not None
    ids = await load(folder).encode([{"role": "user", "content": content}])
    text = b"".join(b"[%d]" % i if i > 256 else tokenizer.bytes_of(i) for i in ids).decode()
    assert text == expected


async def test_names_roles_and_variables_are_text_too(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(
        tmp_path,
        "{% for m in messages %}{{ m.role }}{{ m.name }}{% endfor %}{{ x.y[0] }}"
        "{% for key, value in x.items() %}{{ key }}{% endfor %}{{ x | tojson(true) }}",
    )
    messages = [{"role": "<|start|>", "content": "", "name": "<|end|>"}]
    asked = Asked(variables={"x": {"y": ["<|end|>"], "<|end|>": 1, "n": [None, True, 1.5]}})
    ids = await load(folder).encode(messages, asked)
    assert bytes(list(ids)).decode() == (
        '<|start|><|end|><|end|>y<|end|>n{"y": ["<|end|>"], "<|end|>": 1, "n": [null, true, 1.5]}'
    )


async def test_errors_show_no_marks(tmp_path: Path) -> None:
    template = "{{ raise_exception('no ' + messages[0].content) }}"
    messages = [{"role": "user", "content": "<|end|>"}]
    assert (await refusal(tmp_path, template, messages)).endswith("no <|end|>")
    assert (await refusal(tmp_path, template, messages, CONTINUED)).endswith("no <|end|> ")


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ messages[-1].content }}<|end|>", "abc  ", "abc  "),
        ("{{ messages[-1].content | trim }}<|end|>", " abc  ", "abc"),
        ("{{ messages[-1].content }}<|end|>", "", ""),
        ("<{{ messages[-1].content }}>", "<|end|>x<|end|>", "<<|end|>x<|end|>"),
        ("{{ messages[-1].content }}<|end|>", MARKS[0] + "<|end|>", MARKS[0] + "<|end|>"),
        ("{{ messages[-1].content | tojson(true) }}", "e<|end|>", '"e<|end|>'),
        ("1{{ messages[-1].content }}2{{ messages[-1].content }}3", "a", "1a2a"),
        (
            "{% for p in messages[-1].content %}[{{ p.text }}]{% endfor %}",
            [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}],
            "[a ][b ",
        ),
        ("{% for p in messages[-1].content %}[{{ p.text | trim }}]{% endfor %}", "b ", "[b"),
        ("{{ messages[-1].content }}<|end|>", [{"type": "text", "text": "a"}] * 2, "a\na"),
        ("x{{ add_generation_prompt }}{{ messages[-1].content }}y", "z", "xFalsez"),
    ],
)
async def test_a_message_that_goes_on(
    tmp_path: Path, template: str, content: Any, expected: str
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    ids = await load(save_chat_tokenizer(tmp_path, template)).encode(messages, CONTINUED)
    assert bytes(list(ids)).decode() == expected
    assert messages[1]["content"] is content  # nothing is left in it


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        ("{{ messages[0].content }}", "gone", "does not hold"),
        ("{{ messages[-1].content | upper }}", "abc", "does not hold"),
        ("{{ messages[-1].content[:2] }}", "abc", "does not hold"),
        ("{{ messages[-1].content }}", None, "no content"),
        ("{% for p in messages[-1].content %}{{ p.text }}{% endfor %}", [], "no text"),
        ("{{ messages | tojson }}", "abc", "does not use the messages' content"),
        ("{{ messages[-1].content }}", "".join(MARKS), "U\\+FDD0"),
    ],
)
async def test_a_message_that_cannot_go_on(
    tmp_path: Path, template: str, content: Any, words: str
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    with pytest.raises(InvalidRequest, match=words):
        await load(save_chat_tokenizer(tmp_path, template)).encode(messages, CONTINUED)


async def test_content_without_text(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": None}]
    assert await text_of(tmp_path, "[{{ messages[0].content }}]", messages) == "[]"
    template = "{% for p in messages[0].content %}x{% else %}none{% endfor %}"
    assert await text_of(tmp_path, template, messages) == "none"


async def test_variables_that_are_nested_too_deeply(tmp_path: Path) -> None:
    deep: Any = "<|end|>"
    for _ in range(100_000):
        deep = [deep]
    folder = save_chat_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="recursion"):
        await load(folder).encode(HELLO, Asked(variables={"x": deep}))
