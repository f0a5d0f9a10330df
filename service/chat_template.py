"""Chat templates: a conversation becomes the one text that the model was trained to continue.

A checkpoint brings its template, in Jinja, as `chat_template.jinja` or in `tokenizer_config.json`.
It is a program by strangers, so it runs in Jinja's sandbox. What clients write stays text: special
tokens that their messages spell out are not taken for the template's own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest
from service.tokenizer import THREAD_CHARACTERS, Tokenizer

logger = logging.getLogger(__name__)

NO_TOKENIZER = "the model has no tokenizer.json, so it cannot read messages"
NO_TEMPLATE = (
    "the model's tokenizer brings no chat template (a file chat_template.jinja, or chat_template "
    "in tokenizer_config.json), so it cannot read messages; use /v1/completions"
)
# Characters that Unicode gives no meaning for good: one that no message holds marks where a
# spelled-out special token is cut in two.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

Message = Mapping[str, str]  # role, content, and perhaps name


class ChatTemplate:
    """A model's chat template, or the reason why it has none."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: Template | None = None,
        names: Mapping[str, str] | None = None,
        refusal: str = NO_TEMPLATE,
    ) -> None:
        """`names`: special tokens by the names that the template knows them by (bos_token)."""
        self._tokenizer = tokenizer
        self._template = template
        self._names = dict(names or {})
        self._refusal = NO_TOKENIZER if tokenizer is None else refusal
        self._special = list(tokenizer.special_ids) if tokenizer else []
        self._short = [name for name in self._special if len(name) == 1]  # cannot be cut in two
        # The first character of each place where a special token begins.
        some = "|".join(map(re.escape, self._special))
        self._spelled = re.compile(f"(?={some})(.)", re.DOTALL) if some else None

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer | None) -> ChatTemplate:
        """Reads what lies in the folder. A template that cannot be used is a reason to refuse
        conversations (it is logged), not to refuse everything."""
        try:
            config = _tokenizer_config(folder)
            source = _source(folder, config)
            if source is None:
                return cls(tokenizer)
            names = {
                key: value for key in config if (value := _name(config[key])) and "_token" in key
            }
            return cls(tokenizer, _environment().from_string(source), names)
        except (OSError, ValueError, TemplateError) as error:
            refusal = f"the model's chat template cannot be used: {error}"
            logger.warning("%s; /v1/chat/completions will refuse", refusal)
            return cls(tokenizer, refusal=refusal)

    @property
    def end_id(self) -> int | None:
        """The token that ends a turn, as the tokenizer's configuration names it."""
        name = self._names.get("eos_token")
        return self._tokenizer.id_of(name) if self._tokenizer and name else None

    async def encode(self, messages: Sequence[Message]) -> array[int]:
        """The token ids of a conversation, up to where the model's answer begins; on a thread
        where it is long. Raises InvalidRequest."""
        size = sum(len(value) for message in messages for value in message.values())
        if size <= THREAD_CHARACTERS:
            return self._encode(messages)
        return await asyncio.to_thread(self._encode, messages)

    def _encode(self, messages: Sequence[Message]) -> array[int]:
        if self._tokenizer is None or self._template is None:
            raise InvalidRequest(self._refusal)
        text, mark = self._render(self._template, messages)
        return self._tokenizer.encode_template(text, mark)

    def _render(self, template: Template, messages: Sequence[Message]) -> tuple[str, str]:
        """The template's text, and the mark at which it is to be cut ("" for none)."""
        mark, messages = self._cut(messages)
        try:
            text = template.render(messages=messages, add_generation_prompt=True, **self._names)
        except Exception as error:  # a template may do anything with what it is given
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {error}"
            ) from error
        return text, mark

    def _cut(self, messages: Sequence[Message]) -> tuple[str, list[Message]]:
        """The messages with special tokens that they spell out cut in two by a mark, and the mark;
        "" where there are none."""
        spelled = self._spelled
        text = "\n".join(value for message in messages for value in message.values())
        if spelled is None or not any(name in text for name in self._special):
            return "", list(messages)
        for name in self._short:
            if name in text:
                raise InvalidRequest(f"messages may not hold the special token {name!r}")
        mark = next((one for one in MARKS if one not in text), None)
        if mark is None:
            raise InvalidRequest("messages may not hold special tokens and U+FDD0 to U+FDEF")

        def cut(found: re.Match[str]) -> str:
            return found[1] + mark

        return mark, [
            {key: spelled.sub(cut, value) for key, value in message.items()} for message in messages
        ]


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return config


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    """The template's text, None for none. Of several named ones, the one named "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ValueError("chat_template in tokenizer_config.json is no text")
    return source


def _name(value: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates expect to find, as Hugging Face's tokenizers offer it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own escapes what HTML cannot hold."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
