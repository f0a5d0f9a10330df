"""Texts of clients as templates see them: strings in all but the special tokens that they cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from service.text.client_text import MARKS, ClientText, Knife, texts_in, unused_marks

NAMES = ["<|end|>", "<|start|>", "</think>"]
MARK = MARKS[0]
KNIFE = Knife(NAMES).with_mark(MARK)
PIECES = ["<|end|>", "<|start|>", "</think>", "<|", "end|>", "</", "think>", "a", "B", " ", "\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
# Where a part of a token is sought that stands there both whole and cut, one of them is found.
SOUGHT = st.sampled_from([*NAMES, "a", "B", "<", ">", "a<|end|>", "<|end|></think>", " "])

METHODS: dict[str, Callable[[Any, str], Any]] = {
    "in": lambda text, sought: sought in text,
    "equal": lambda text, sought: (text == sought, text != sought, sought == text),
    "starts": lambda text, sought: (text.startswith(sought), text.endswith(("x", sought))),
    "count": lambda text, sought: text.count(sought),
    "is found": lambda text, sought: (text.find(sought) >= 0, text.rfind(sought) >= 0),
    "split": lambda text, sought: text.split(sought),
    "rsplit": lambda text, sought: text.rsplit(sep=sought, maxsplit=1),
    "partition": lambda text, sought: text.partition(sought) + text.rpartition(sought),
    "affixes": lambda text, sought: [text.removeprefix(sought), text.removesuffix(sought)],
    "strip": lambda text, sought: [text.strip(), text.lstrip("\n"), text.rstrip()],
    "lines": lambda text, sought: text.splitlines(),
    "replace": lambda text, sought: [text.replace(sought, ""), text.replace(sought, "|")],
    "case": lambda text, sought: [text.lower(), text.upper(), text.title(), text.swapcase()],
    "sum": lambda text, sought: [text + text, text + text.strip(), str(text)],
}


def without_marks(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(without_marks, value))
    return str.replace(value, MARK, "") if isinstance(value, str) else value


@pytest.mark.parametrize("method", METHODS)
@given(text=TEXTS, sought=SOUGHT)
def test_methods_are_those_of_strings(method: str, text: str, sought: str) -> None:
    made = METHODS[method](KNIFE.cut_all(text), sought)
    assert without_marks(made) == METHODS[method](text, sought)
    for one in texts_in(made if isinstance(made, list | tuple) else [made]):
        assert isinstance(one, ClientText)
        assert not any(str.__contains__(one, name) for name in NAMES)


def test_parts_of_special_tokens_are_found() -> None:
    text = KNIFE.cut_all("a<|end|>b")
    assert "<|" in text and "<|e" in text and "|end" in text and "<x" not in text
    assert without_marks(text.split("<|")) == ["a", "end|>b"]


def test_text_of_the_template_stays_whole() -> None:
    text = "<|start|>" + KNIFE.cut_all("<|end|> ") + "</think>"
    assert without_marks(text) == "<|start|><|end|> </think>"
    for made in (text, text.strip(), text.split("x")[0], text.replace("z", "b")):
        assert str.__contains__(made, "<|start|>") and not str.__contains__(made, "<|end|>")
    assert "<|end|>" in text and "<|start|>" in text


def test_special_tokens_of_one_character() -> None:
    knife = Knife(["§", "<s>", "k"]).with_mark(MARK)
    text = knife.cut_all("a<s>b")
    assert text.split("§") == [text]  # a template may look for it
    with pytest.raises(InvalidRequest, match="§"):
        knife.cut_all(["§"])
    with pytest.raises(InvalidRequest, match="k"):
        knife.cut_all("K").lower()


def test_values_of_json() -> None:
    value = KNIFE.cut_all({"<|end|>": [1, None, True, "</think>"], "a": {"b": 0.5}})
    assert without_marks(list(value)) == ["<|end|>", "a"]
    assert value["a"] == {"b": 0.5} and without_marks(value["<" + MARK + "|end|>"][3]) == NAMES[2]
    assert sorted(map(without_marks, texts_in(value))) == sorted(["<|end|>", "</think>", "a", "b"])


def test_marks_that_are_free() -> None:
    assert unused_marks(["a"], 2) == MARKS[:2]
    assert unused_marks(["a", MARKS[0], "\\ufdd1"], 2) == MARKS[2:4]
    assert unused_marks(MARKS[1:], 2) == MARKS[:1]
    assert unused_marks(MARKS, 1) == []
    assert Knife(NAMES).cut("<|end|>") == "<|end|>"
    assert Knife([]).with_mark(MARK).cut("<|end|>") == "<|end|>"
