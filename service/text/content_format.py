"""content_format: finds out whether a chat template expects content as text or as a list of parts.

Templates do not declare it. As in vLLM, it is derived from whether the template iterates over a
message's content.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Literal

from jinja2 import nodes


class ContentFormat(Enum):
    """The type of a message's content that a template expects."""

    TEXT = "text"
    PARTS = "parts"  # always a list of parts
    EITHER = "either"  # as the client sent it: the template checks whether it is a string


# What an expression of a template may refer to.
_Kind = Literal["messages", "message", "content", "part"]
# Filters whose result is a list of the same entries, and those that only lists of objects have.
_SAME = {"list", "reverse", "sort", "unique", "select", "reject", "default", "d"}
_OF_OBJECTS = {"selectattr", "rejectattr", "groupby"}


def content_format(template: nodes.Template) -> ContentFormat:
    """Return the format that a parsed template expects.

    Scopes are ignored: a name that refers to a message's content anywhere is taken to do so
    everywhere.
    """
    reader = _Reader(template)
    if not reader.lists:
        return ContentFormat.TEXT
    return ContentFormat.EITHER if all(reader.lists) else ContentFormat.PARTS


class _Reader:
    """Finds the places of a template where content is treated as a list."""

    def __init__(self, template: nodes.Template) -> None:
        self._kinds: dict[str, set[_Kind]] = {"messages": {"messages"}}
        self._macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        # For each such place: whether the template checks before that the content is not a string.
        self.lists: list[bool] = []
        while self._learns(template):
            pass
        self._look(template, asked=False)

    def _learns(self, template: nodes.Template) -> bool:
        """Propagate what names refer to, once; return whether something new was found."""
        before = sum(map(len, self._kinds.values()))
        for node in template.find_all((nodes.Assign, nodes.For, nodes.With, nodes.Call)):
            if isinstance(node, nodes.Assign):
                self._set(node.target, node.node)
            elif isinstance(node, nodes.For):
                for kind in self._kinds_of(node.iter):
                    if kind == "messages":
                        self._add(node.target, {"message"})
                    elif kind == "content":
                        self._add(node.target, {"part"})
            elif isinstance(node, nodes.With):
                for target, value in zip(node.targets, node.values, strict=True):
                    self._set(target, value)
            elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
                macro = self._macros.get(node.node.name)
                if macro is not None:
                    for parameter, value in zip(macro.args, node.args, strict=False):
                        self._set(parameter, value)
                    for keyword in node.kwargs:
                        self._add(nodes.Name(keyword.key, "param"), self._kinds_of(keyword.value))
        return sum(map(len, self._kinds.values())) > before

    def _set(self, target: nodes.Node, value: nodes.Node) -> None:
        if isinstance(target, nodes.Tuple) and isinstance(value, nodes.Tuple):
            for one, its in zip(target.items, value.items, strict=False):
                self._set(one, its)
            return
        if (
            isinstance(value, nodes.Call)
            and isinstance(value.node, nodes.Name)
            and value.node.name == "namespace"
            and isinstance(target, nodes.Name)
        ):
            for keyword in value.kwargs:
                self._add(nodes.NSRef(target.name, keyword.key), self._kinds_of(keyword.value))
        self._add(target, self._kinds_of(value))

    def _add(self, target: nodes.Node, kinds: Iterable[_Kind]) -> None:
        if isinstance(target, nodes.Name):
            self._kinds.setdefault(target.name, set()).update(kinds)
        elif isinstance(target, nodes.NSRef):
            self._kinds.setdefault(f"{target.name}.{target.attr}", set()).update(kinds)

    def _kinds_of(self, node: nodes.Node | None) -> set[_Kind]:
        if isinstance(node, nodes.Name):
            return self._kinds.get(node.name, set())
        if isinstance(node, nodes.Filter):
            kinds = self._kinds_of(node.node)
            if node.name in ("first", "last"):
                return _one_of(kinds)
            return kinds if node.name in _SAME | _OF_OBJECTS else set()
        if isinstance(node, nodes.CondExpr):
            return self._kinds_of(node.expr1) | self._kinds_of(node.expr2)
        if isinstance(node, nodes.And | nodes.Or):
            return self._kinds_of(node.left) | self._kinds_of(node.right)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._kinds_of(node.node)
        name = _key(node)
        if name is not None:
            return self._kinds_of_field(node, name)
        if isinstance(node, nodes.Getitem):
            return _one_of(self._kinds_of(node.node))
        return set()

    def _kinds_of_field(self, node: nodes.Node | None, name: str) -> set[_Kind]:
        owner = _owner(node)
        found: set[_Kind] = set()
        if name == "content" and "message" in self._kinds_of(owner):
            found = {"content"}
        if isinstance(owner, nodes.Name):
            if owner.name == "loop" and name in ("previtem", "nextitem"):
                found = {"message"}
            found = found | self._kinds.get(f"{owner.name}.{name}", set())
        return found

    def _look(self, node: nodes.Node, asked: bool) -> None:
        """Find list uses of content below `node`.

        `asked`: an enclosing condition checks whether the content is a string.
        """
        if isinstance(node, nodes.If | nodes.CondExpr):
            asked = asked or self._asks(node.test)
            self._look(node.test, asked)
            if isinstance(node, nodes.CondExpr):
                branches = [node.expr1, *([node.expr2] if node.expr2 else [])]
                for branch in branches:
                    self._look(branch, asked)
                return
            for one in node.body:
                self._look(one, asked)
            for other in node.elif_:
                asked = asked or self._asks(other.test)
                self._look(other, asked)
            for one in node.else_:
                self._look(one, asked)
            return
        if self._is_list(node):
            self.lists.append(asked)
        for child in node.iter_child_nodes():
            self._look(child, asked)

    def _is_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.For):
            return "content" in self._kinds_of(node.iter)
        if isinstance(node, nodes.Filter):
            by_field = node.name in _OF_OBJECTS or (
                node.name == "map" and any(one.key == "attribute" for one in node.kwargs)
            )
            return by_field and "content" in self._kinds_of(node.node)
        owner = _owner(node)  # content[0].text
        return (
            _key(node) in ("text", "type")
            and isinstance(owner, nodes.Getitem | nodes.Filter)
            and "part" in self._kinds_of(owner)
        )

    def _asks(self, test: nodes.Node) -> bool:
        return any(
            one.name == "string" and "content" in self._kinds_of(one.node)
            for one in [test, *test.find_all(nodes.Test)]
            if isinstance(one, nodes.Test)
        )


def _key(node: nodes.Node | None) -> str | None:
    """Return the field that `node` reads (x.key, x["key"] or x.get("key")), or None."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    given: nodes.Node | None = None
    if isinstance(node, nodes.Getitem):
        given = node.arg
    elif isinstance(node, nodes.Call) and node.args:
        called = node.node
        given = node.args[0] if isinstance(called, nodes.Getattr) and called.attr == "get" else None
    if isinstance(given, nodes.Const) and isinstance(given.value, str):
        return given.value
    return None


def _owner(node: nodes.Node | None) -> nodes.Node | None:
    """Return the node whose field `_key` returns."""
    if isinstance(node, nodes.Call):
        return node.node.node if isinstance(node.node, nodes.Getattr) else None
    return node.node if isinstance(node, nodes.Getattr | nodes.Getitem) else None


def _one_of(kinds: set[_Kind]) -> set[_Kind]:
    """Return what an entry of a list of these kinds refers to."""
    found: set[_Kind] = set()
    if "messages" in kinds:
        found.add("message")
    if "content" in kinds:
        found.add("part")
    return found
