"""ChatTemplate: renders a conversation as the text that the model was trained to continue.

A checkpoint's template is in Jinja, in `chat_template.jinja`, `tokenizer_config.json` or
`chat_template.json`. It is untrusted code, so it runs in Jinja's sandbox, with the functions and
filters that transformers offers. Special tokens that clients spell out in their messages stay text
and do not become the template's own tokens (`service.text.client_text`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import InvalidRequest
from engine.protocol.events import ModelInfo
from service.text.client_text import ClientText, Knife, escaped, texts_in, unused_marks
from service.text.content_format import ContentFormat, content_format
from service.text.tokenizer import THREAD_CHARACTERS, Tokenizer

logger = logging.getLogger(__name__)

NO_TOKENIZER = "the model has no tokenizer.json or tokenizer.model, so it cannot read messages"
NO_TEMPLATE = (
    "the model has no chat template (a file chat_template.jinja, or chat_template in "
    "tokenizer_config.json or chat_template.json), so it cannot read messages; use "
    "/v1/completions"
)
NO_MARKS = (
    "messages that hold special tokens, or are continued, must leave two of the characters "
    "U+FDD0 to U+FDEF unused"
)

# Variables that requests may not set, in addition to the names of special tokens.
RESERVED = frozenset(
    (
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "chat_template", "tokenize", "raise_exception", "strftime_now", "range", "dict",
        "namespace", "lipsum", "cycler", "joiner", "bos_token", "eos_token", "unk_token",
        "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens",
    )
)  # fmt: skip

# A message: role, content (a text, a list of text parts, or None) and optionally name.
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """How a request wants its messages rendered.

    add_generation_prompt: the text ends where an answer begins.
    continue_final_message: the text ends with the last message's content, which the model then
      continues. Not together with add_generation_prompt.
    variables: further variables of the template, none of them in `ChatTemplate.reserved`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


PLAINLY = Asked()


class ChatTemplate:
    """A model's chat template, or the reason why conversations are refused."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        source: str | None = None,
        names: Mapping[str, Any] | None = None,
        refusal: str = NO_TEMPLATE,
    ) -> None:
        """Compile a template.

        Args:
            tokenizer: The model's tokenizer, or None.
            source: The template; None: there is none.
            names: Special tokens by their variable names in templates, such as bos_token.
            refusal: The error message for conversations if there is no template.

        Raises TemplateError and other exceptions of Jinja's for a `source` that is not a template.
        """
        self._tokenizer = tokenizer
        self._names = dict(names or {})
        self._refusal = NO_TOKENIZER if tokenizer is None else refusal
        self._knife = Knife(list(tokenizer.special_ids) if tokenizer else [])
        self._source = source or ""
        self._template: Template | None = None
        self._format = ContentFormat.TEXT
        if source is not None:
            jinja = environment()
            self._template = jinja.from_string(source)
            self._format = content_format(jinja.parse(source))

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer | None) -> ChatTemplate:
        """Read the chat template of a model's folder.

        A template that cannot be used is logged, and the model then refuses conversations only.
        """
        try:
            config = _object(folder / "tokenizer_config.json")
            source = _source(folder, config)
            if source is None:
                return cls(tokenizer)
            names = _names(config, _object(folder / "special_tokens_map.json"))
            return cls(tokenizer, source, names)
        except Exception as error:  # Jinja also lets exceptions of Python's compiler through
            refusal = f"the model's chat template cannot be used: {_tellable(error)}"
            logger.warning("%s; /v1/chat/completions will answer with 400", refusal)
            return cls(tokenizer, refusal=refusal)

    @property
    def end_id(self) -> int | None:
        """The token that ends a turn: the eos_token of the tokenizer's configuration, or None."""
        name = self._names.get("eos_token")
        return self._tokenizer.id_of(name) if self._tokenizer and name else None

    @property
    def reserved(self) -> frozenset[str]:
        """Variables of the template that requests may not set."""
        return RESERVED.union(self._names)

    async def encode(self, messages: Sequence[Message], asked: Asked = PLAINLY) -> array[int]:
        """Return the token ids of a conversation, up to where the model's answer begins.

        Runs on a thread if the conversation is long. Raises InvalidRequest.
        """
        size = 0
        for text in texts_in([*messages, asked.variables]):
            size += len(text) + 1  # empty parts take time, too
            if size > THREAD_CHARACTERS:
                return await asyncio.to_thread(self._encode, messages, asked)
        return self._encode(messages, asked)

    def _encode(self, messages: Sequence[Message], asked: Asked) -> array[int]:
        text, mark = self.render(messages, asked)
        assert self._tokenizer is not None
        return self._tokenizer.encode_template(text, mark)

    def render(self, messages: Sequence[Message], asked: Asked = PLAINLY) -> tuple[str, str]:
        """Return the rendered text, and the mark that splits special tokens spelled by clients.

        The mark is "" if there is none (see `service.text.client_text`). Raises InvalidRequest.
        """
        if self._tokenizer is None or self._template is None:
            raise InvalidRequest(self._refusal)
        marks = self._marks(messages, asked)
        mark, end = marks[0], marks[1] if asked.continue_final_message else ""
        knife = self._knife.with_mark(mark)
        try:
            shaped = [self._shaped(message, knife) for message in messages]
            if end and messages[-1]["content"] is None:
                raise InvalidRequest("continue_final_message: the last message has no content")
            if end and "content" not in self._source:
                raise InvalidRequest(
                    "continue_final_message: the model's chat template does not use the messages' "
                    "content, so the end of the last message is not known"
                )
            last = _ending(shaped[-1], end, knife) if end else ""
            text = self._template.render(
                {
                    **{name: knife.cut_all(value) for name, value in asked.variables.items()},
                    **self._names,
                    "messages": shaped,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": asked.add_generation_prompt,
                }
            )
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise anything
            told = _tellable(error)
            for one in filter(None, (mark, end)):
                told = told.replace(one, "")
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {told}"
            ) from error
        for one in filter(None, (mark, end)):
            text = text.replace(escaped(one), one)
        return (_cut_behind(text, last, end) if end else text), mark

    def _marks(self, messages: Sequence[Message], asked: Asked) -> list[str]:
        """Return an unused mark, and a second one to find the end of a message to continue.

        Returns "" if no mark is unused and none is needed. Raises InvalidRequest if one is needed.
        """
        needed = 2 if asked.continue_final_message else 1
        given = list(texts_in([*messages, asked.variables]))
        marks = unused_marks([*given, self._source], needed)
        if len(marks) == needed:
            return marks
        if asked.continue_final_message or any(map(self._knife.finds, given)):
            raise InvalidRequest(NO_MARKS)
        return [""]

    def _shaped(self, message: Message, knife: Knife) -> dict[str, Any]:
        """Return a message in the format that the template expects, with special tokens cut."""
        content = message["content"]
        if self._format is ContentFormat.TEXT and isinstance(content, list):
            content = "\n".join([part["text"] for part in content])
        if self._format is ContentFormat.PARTS and not isinstance(content, list):
            content = [] if content is None else [{"type": "text", "text": content}]
        if content is None:
            content = ""
        if isinstance(content, list):
            content = [{"type": "text", "text": knife.cut_all(part["text"])} for part in content]
            return {**{key: knife.cut_all(message[key]) for key in message}, "content": content}
        return {
            key: knife.cut_all(content if key == "content" else message[key]) for key in message
        }


async def load_text(info: ModelInfo) -> tuple[Tokenizer | None, ChatTemplate]:
    """Load a model's tokenizer, if it has one, and its chat template, on threads.

    Raises CheckpointError for a tokenizer that cannot be used.
    """
    folder = Path(info.folder)
    tokenizer = await asyncio.to_thread(Tokenizer.load, folder, info.vocab_size)
    return tokenizer, await asyncio.to_thread(ChatTemplate.load, folder, tokenizer)


def _tellable(error: Exception) -> str:
    """Return an error's message with characters that UTF-8 cannot hold escaped."""
    return str(error).encode(errors="backslashreplace").decode()


def _ending(message: dict[str, Any], end: str, knife: Knife) -> str:
    """Append the mark `end` and a space to a message's content; return the content without them.

    The space shows whether the template strips spaces there. Raises InvalidRequest if there is no
    text.
    """
    content = message["content"]
    if isinstance(content, list):
        if not content:
            raise InvalidRequest("continue_final_message: the last message has no text to continue")
        content[-1], text = dict(content[-1]), content[-1]["text"]
        content[-1]["text"] = ClientText(f"{text}{end} ", knife)
        return str(text)
    message["content"] = ClientText(f"{content}{end} ", knife)
    return str(content)


def _cut_behind(text: str, last: str, end: str) -> str:
    """Return the rendered text up to the end of the last message's content.

    `last`: the content. `end`: the mark after it. Raises InvalidRequest if the template changed it.
    """
    at = text.rfind(end)
    if at < 0 or last.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the text that the model's chat template renders does not hold "
            "the last message's content"
        )
    kept = text[:at]
    if not text.startswith(f"{end} ", at):  # the template strips spaces there
        kept = kept.rstrip()
    return kept.replace(f"{end} ", "").replace(end, "")


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file does not exist."""
    if not path.exists():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return config


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template's text, or None. Of several named templates, the one named "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    name, source = "tokenizer_config.json", config.get("chat_template")
    if source is None:
        name = "chat_template.json"
        source = _object(folder / name).get("chat_template")
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
    if isinstance(source, dict):
        source = source.get("default")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"chat_template in {name} is not a string")
    return source


def _names(config: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return special tokens by their variable names in templates.

    `config` is tokenizer_config.json and `saved` is special_tokens_map.json. The latter takes
    precedence in folders of older versions of transformers, in which tokenizer_config.json lists no
    added tokens.
    """
    both = {**saved, **config} if "added_tokens_decoder" in config else {**config, **saved}
    entries = {key: value for key, value in both.items() if key.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(both.get(key), dict):
            entries |= both[key]
    names: dict[str, Any] = {
        key: name for key, value in entries.items() if (name := _name(value)) is not None
    }
    more = both.get("additional_special_tokens")
    if isinstance(more, list):
        found = map(_name, more)
        names["additional_special_tokens"] = [name for name in found if name is not None]
    return names


def _name(value: Any) -> str | None:
    """Return a special token's text, which may be a string or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja sandbox with the functions and filters that transformers offers."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _raise
    jinja.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    jinja.globals["dict"] = _Dict()
    jinja.globals["namespace"] = _Namespace
    return jinja


class _Generation(Extension):
    """The tag {% generation %}, which marks text to train on and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As in transformers, variables that are set inside are not visible outside.
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """The function dict of templates, without the other attributes of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, without attributes that begin with an underscore."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        given = dict(*args, **values)
        for name in given:
            _check_attribute(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may have no attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson, which does not escape for HTML and takes json.dumps' arguments."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
