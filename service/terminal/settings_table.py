"""Print the table of all settings in Markdown: `python -m service.terminal.settings_table`.

docker/README.md holds the table, and a test compares the two. The description of a setting is the
help text of its option; `VARIABLES` describes the settings that have no option.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from service.settings import Settings
from service.terminal.serve import serve

HEAD = ("variable", "option", "default", "allowed", "description")
# Descriptions of the settings that have no option.
VARIABLES = {
    "api_keys": "API keys, each name:key, separated by commas.",
    "admin_key": "The admin key, which opens the /admin endpoints.",
    "restart_window": "Seconds within which engine restarts are counted.",
    "max_text_bytes": "Largest text that POST /v1/states/text reads, in bytes.",
    "max_n": "Most samples of one prompt (n, best_of).",
    "max_prompt_tokens": "Most prompt tokens of one request; a prompt counts once for each of its "
    "samples or continuations.",
    "max_logprobs": "Most alternatives per token (logprobs, top_logprobs); more than 20 are "
    "slower.",
    "max_reports": "Most log-probabilities in one answer.",
    "max_unread": "Most tokens and alternatives that may wait for a slow reader of a stream.",
    "max_stop": "Most stop strings of one prompt.",
    "max_stop_length": "Longest stop string, in characters.",
    "max_stop_token_ids": "Most stop token ids of one prompt.",
    "max_logit_bias": "Most entries of one logit_bias.",
    "max_grammar_bytes": "Largest schema, regular expression or grammar, in bytes.",
    "max_grammars": "Most different schemas, expressions and grammars in one request.",
    "grammar_timeout": "Seconds of processor time to compile one schema, expression or grammar.",
    "receive_timeout": "Seconds for a request's head to arrive, and again for its body.",
    "stall_timeout": "Seconds after which a client that reads nothing of its answer is "
    "disconnected.",
    "ping_timeout": "Seconds within which the engine has to answer /health.",
}
KINDS = {bool: "`true`, `false`", int: "integer", float: "number", str: "text", Path: "path",
         SecretStr: "text"}  # fmt: skip
BRACKETS = re.compile(r" \[([^\]]*)\]\.$")  # the default, at the end of an option's help


def option_texts() -> dict[str, str]:
    """Return the help texts of `minserve serve`'s options, by the name of their setting."""
    hints = get_type_hints(serve, include_extras=True)
    hints.pop("return")
    return {name: hint.__metadata__[0].help for name, hint in hints.items()}


def _default(field: FieldInfo, text: str) -> str:
    if field.default is None or field.default == ():
        found = BRACKETS.search(text)
        return found[1] if found else "none"
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`"


def _plain(kind: Any) -> Any:
    """Return a type without None and without annotations."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (one for one in get_args(kind) if one is not type(None))
        return _plain(inner)
    return kind


def _bounds(metadata: Iterable[Any]) -> list[str]:
    found: list[str] = []
    for one in metadata:
        for kind, field, words in (
            (annotated_types.Gt, "gt", "above"),
            (annotated_types.Ge, "ge", "at least"),
            (annotated_types.Le, "le", "at most"),
        ):
            if isinstance(one, kind):
                found.append(f"{words} {getattr(one, field)}")
    return found


def _allowed(field: FieldInfo) -> str:
    kind = _plain(field.annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is tuple:
        return "texts separated by commas"
    return ", ".join([KINDS[kind], *_bounds(field.metadata)])


def rows() -> list[tuple[str, ...]]:
    """Return the cells of each setting's row, in the order of service/settings.py."""
    options = option_texts()
    found: list[tuple[str, ...]] = []
    for name, field in Settings.model_fields.items():
        text = options.get(name) or VARIABLES[name]
        option = f"`--{name.replace('_', '-')}`" if name in options else ""
        variable = f"`MINSERVE_{name.upper()}`"
        words = BRACKETS.sub(".", text)
        found.append((variable, option, _default(field, text), _allowed(field), words))
    return found


def table() -> str:
    """Return the whole table as Markdown, its head included."""
    lines = [HEAD, ("---",) * len(HEAD), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
