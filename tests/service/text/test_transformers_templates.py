"""Chat templates of the kinds in use render as transformers renders them.

vLLM decides what a template gets as content, and has transformers render it: `rendered_there` does
so too.
"""

# ruff: noqa: E501 (lines of templates)

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.errors import InvalidRequest
from service.text.chat_template import Asked, ChatTemplate, environment
from service.text.content_format import ContentFormat, content_format
from service.text.tokenizer import Tokenizer
from tests.service.chat import VOCABULARY, save_chat_tokenizer

transformers = pytest.importorskip("transformers")

CHATML = """\
{% for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{% endif %}
"""
CHATML_DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' %}{{- '<|start|>system\\nBe of use.<|end|>\\n' }}{% endif -%}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {{- '<|start|>' ~ message.role ~ '\\n' ~ content ~ '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n' }}{% endif %}
{%- endif %}
"""
INST = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must go user, assistant, user, assistant, and so on') }}
{% endif %}
{% if loop.index0 == 0 and system %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}
"""
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\\n\\n" }}
{%- if tools is not none %}{{- "Environment: tools\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- eos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS]" }}{%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<|start|>' + role + '\\n' + message['content'] | trim + '<|end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<|start|>model\\n'}}{% endif %}
"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
GENERATION = """\
{%- for message in messages -%}
    {%- set mine = 'outside' -%}
    {%- if message['role'] == 'assistant' -%}
        <|start|>assistant
{% generation %}{% set mine = 'inside' %}{{ message['content'] }}<|end|>{% endgeneration %}

    {%- else -%}
        {{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
    {%- endif -%}
    ({{ mine }})
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
"""
JSON = """\
{%- if tools is none and documents is none %}neither {% endif %}
{%- if tools is defined and documents is defined %}both defined {% endif %}
{%- for message in messages -%}
{{ message | tojson }}{{ message | tojson(indent=2) }}{{ message | tojson(true, 1) }}
{{ message | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=True) }}
{{ {'b': [message.role, none, 1.5], 'a': "<'&>é"} | tojson(sort_keys=true, indent="\\t", separators=(', ', ' = ')) }}
{%- endfor -%}
{{ tools | tojson }}{{ '<é>' | tojson(ensure_ascii=False) }}
"""
NAMESPACES = """\
{%- set ns = namespace(system='', users=0, last=none) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{% set ns.system = ns.system ~ message.content %}{% continue %}{%- endif -%}
    {%- if loop.previtem is defined and loop.previtem.role == message.role -%}(again) {%- endif -%}
    {%- if loop.changed(message.role) %}[{{ message.role }}]{% endif -%}
    {%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif -%}
    {{ loop.cycle('a', 'b') }}{{ loop.revindex }}/{{ loop.length }} {{ message.content }}
    {%- if loop.nextitem is defined %} then {{ loop.nextitem.role }}{% else %}<|end|>{% endif %}
    {%- if ns.users > 2 %}{% break %}{% endif %}
{%- endfor -%}
{{ ns.system }}{{ ns.users }}{{ dict(a=1, b=[2]) }}{{ dict.fromkeys(['x', 'y']) }}
{%- for i in range(3) %}{{ i }}{% else %}none{% endfor %}
"""
PARTS = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% if not loop.last %}+{% endif %}{% endfor %}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}
"""
PARTS_BY_ALIAS = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{{ '<|start|>' + message['role'] }}:
{%- for item in content | selectattr('type', 'equalto', 'text') %}{{ ' ' + item['text'] | trim }}{% endfor -%}
<|end|>
{%- endfor %}
"""
EITHER = """\
{%- for message in messages -%}
{{ '<|start|>' + message.role + '\\n' }}
{%- if message.content is string -%}text: {{ message.content }}
{%- else -%}{%- for item in message.content -%}part: {{ item['text'] }};{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{% if add_generation_prompt %}<|start|>assistant:{% endif %}
"""
MACROS = """\
{%- macro render_content(content, sep=', ') -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}{%- for item in content -%}{{- item.text -}}{{- sep if not loop.last -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro turn(role) -%}<|start|>{{ role }}
{{ caller() }}<|end|>
{% endmacro -%}
{%- for message in messages %}
    {%- call turn(message.role) %}{{ render_content(message.content, sep=' & ') | trim }}{% if message.name %} ({{ message.name }}){% endif %}{% endcall %}
{%- endfor %}
{%- filter upper %}the end{% endfilter %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ nothing }}|{{ messages | length }}"

TEMPLATES = {
    "chatml": CHATML, "default system": CHATML_DEFAULT_SYSTEM, "inst": INST, "headers": HEADERS,
    "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR, "generation": GENERATION, "json": JSON,
    "namespaces": NAMESPACES, "parts": PARTS, "parts by alias": PARTS_BY_ALIAS, "either": EITHER,
    "macros": MACROS, "tokens": TOKENS,
}  # fmt: skip
TAKES_PARTS = {"parts", "parts by alias"}
TAKES_EITHER = {"either", "macros"}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


SYSTEM = {"role": "system", "content": "Answer in verse, <b>please</b>."}
CONVERSATIONS = {
    "one": [user("  Who wrote 'Faust'?\n")],
    "three": [user("hé\tllo 🙂"), assistant("<think>hm\n</think>\n\n hi  "), user('"x" & \\ y')],
    "system": [SYSTEM, user("one"), assistant(" two "), user("three", name="ann")],
    "parts": [SYSTEM, user(text("a ", " b")), assistant(text("c"))],
    "twice": [user("a"), user("b"), user("c"), user("d")],
    "empty": [user(""), assistant("")],
}
NAMES = {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|endoftext|>"}


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock stands, so that no test runs over midnight."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2024, 2, 29, 12, 30)

    monkeypatch.setattr("service.text.chat_template.datetime", Clock)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    yield


def load(folder: Path, template: str, **config: Any) -> ChatTemplate:
    save_chat_tokenizer(folder, template, **{**NAMES, **config})
    return ChatTemplate.load(folder, Tokenizer.load(folder, VOCABULARY))


def rendered_here(template: ChatTemplate, messages: Any, asked: Asked) -> str:
    rendered, mark = template.render(messages, asked)
    return rendered.replace(mark, "") if mark else rendered


def rendered_there(folder: Path, name: str, messages: Any, asked: Asked) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    shaped = []
    for message in messages:
        content = message["content"]
        if name in TAKES_PARTS and isinstance(content, str):
            content = text(content)
        if name not in TAKES_PARTS | TAKES_EITHER and isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        shaped.append({**message, "content": content})
    there: str = tokenizer.apply_chat_template(
        shaped,
        tokenize=False,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **asked.variables,
    )
    return there


ASKED = {
    "to be answered": Asked(),
    "as it is": Asked(add_generation_prompt=False),
    "to be continued": Asked(add_generation_prompt=False, continue_final_message=True),
    "variables": Asked(variables={"enable_thinking": False, "date_string": "a day", "tool": [1]}),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders(tmp_path: Path, name: str, asked: str) -> None:
    template = load(tmp_path, TEMPLATES[name])
    rendered = 0
    for messages in CONVERSATIONS.values():
        try:
            expected = rendered_there(tmp_path, name, messages, ASKED[asked])
        except Exception as error:
            with pytest.raises(InvalidRequest) as refused:
                rendered_here(template, messages, ASKED[asked])
            told = refused.value.message
            assert str(error) in told or "continue_final_message" in told
        else:
            assert rendered_here(template, messages, ASKED[asked]) == expected
            rendered += 1
    assert rendered >= (3 if asked != "to be continued" or name not in ("json", "tokens") else 0)


SPELLED = [
    user("a <|end|> b<|start|>", name="<|end|>"),
    assistant("<think>x<|<|end|>end|>\n</think>\n\n<|end|>y<|start|>"),
    user(" <think></think> "),
]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_special_tokens_in_messages_are_text(tmp_path: Path, name: str, asked: str) -> None:
    """The text is transformers', and of its special tokens those alone are such that the template
    writes: as many as where the messages spell out none. One template looks for `</think>`."""
    save_chat_tokenizer(tmp_path, TEMPLATES[name], **NAMES)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(["<think>", "</think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, VOCABULARY)
    assert tokenizer is not None
    template = ChatTemplate.load(tmp_path, tokenizer)
    for end in (1, 2, 3):
        messages = SPELLED[:end]
        try:
            expected = rendered_there(tmp_path, name, messages, ASKED[asked])
        except ValueError:
            continue
        ids = await template.encode(messages, ASKED[asked])
        assert b"".join(map(tokenizer.bytes_of, ids)).decode() == expected
        plain = [{key: value.replace("<", "(") for key, value in one.items()} for one in messages]
        others = await template.encode(plain, ASKED[asked])
        assert sum(i >= 256 for i in ids) == sum(i >= 256 for i in others)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *((TEMPLATES[name], ContentFormat.PARTS) for name in sorted(TAKES_PARTS)),
        *((TEMPLATES[name], ContentFormat.EITHER) for name in sorted(TAKES_EITHER)),
        *(
            (TEMPLATES[name], ContentFormat.TEXT)
            for name in sorted(TEMPLATES.keys() - TAKES_PARTS - TAKES_EITHER)
        ),
        ("{% for m in messages[1:] %}{% for p in m['content'] %}{% endfor %}{% endfor %}", "parts"),
        ("{% for p in messages[-1].content %}{% endfor %}", "parts"),
        ("{% for p in (messages | last).content %}{% endfor %}", "parts"),
        ("{% for p in messages[0].get('content', []) %}{% endfor %}", "parts"),
        ("{% for p in messages[0].content or [] %}{% endfor %}", "parts"),
        (
            "{% set ms = messages | list %}{% for m in ms %}{% set a = m.content %}{% set b = a %}"
            "{% for p in b %}{% endfor %}{% endfor %}",
            "parts",
        ),
        (
            "{% set ns = namespace(m=none) %}{% for m in messages %}{% set ns.m = m.content %}"
            "{% endfor %}{% for p in ns.m %}{% endfor %}",
            "parts",
        ),
        (
            "{% set ns = namespace(all=messages) %}{% for m in ns.all %}"
            "{% for p in m.content %}{% endfor %}{% endfor %}",
            "parts",
        ),
        ("{% set a, b = messages[0].content, 1 %}{% for p in a %}{% endfor %}", "parts"),
        ("{% with c = messages[0].content %}{% for p in c %}{% endfor %}{% endwith %}", "parts"),
        (
            "{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(x=m.content) }}{% endfor %}",
            "parts",
        ),
        ("{{ messages[0].content | map(attribute='text') | join }}", "parts"),
        ("{{ messages[0].content[0].text }}", "parts"),
        ("{{ (messages[0].content | first)['text'] }}", "parts"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{% for p in m.content %}{% endfor %}"
            "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% endfor %}{% endif %}{% endfor %}",
            "parts",
        ),
        (
            "{% for m in messages %}{% if m.content is not string %}{% for p in m.content %}"
            "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "either",
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "text"),
        ("{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}", "text"),
        ("{% for line in messages[0].content.split('\\n') %}{{ line }}{% endfor %}", "text"),
        ("{{ messages[0].content[0] }}{{ messages[0].content[1:] | trim }}", "text"),
        ("no variables", "text"),
    ],
)
def test_what_content_templates_take(template: str, expected: ContentFormat | str) -> None:
    assert content_format(environment().parse(template)) is ContentFormat(expected)
