"""RadixTree: texts of token ids as a radix tree, with packed runs of ids as edges.

A node exists where texts diverge or where a text has a value. Other nodes are removed, so the tree
is only as large as the texts that it must tell apart.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from engine.protocol.token_ids import ID_BYTES

NODE_BYTES = 400  # approximate memory of a node, apart from its run

T = TypeVar("T")


class RadixNode(Generic[T]):
    """A node: the text of `length` tokens from the root to here, and its `value`."""

    __slots__ = ("children", "length", "parent", "reader", "run", "tree", "value")

    def __init__(
        self, tree: RadixTree[T], parent: RadixNode[T] | None, run: bytes, length: int
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.run = run  # the tokens after the parent's text, packed
        self.length = length
        self.children: dict[bytes, RadixNode[T]] = {}  # by their first token
        self.value: T | None = None
        self.reader = -1  # key of the sequence that is reading this text; -1: none

    def text(self) -> bytes:
        """Return the packed text from the root to here."""
        runs: list[bytes] = []
        node: RadixNode[T] | None = self
        while node is not None:
            runs.append(node.run)
            node = node.parent
        return b"".join(reversed(runs))


class RadixTree(Generic[T]):
    """A radix tree of packed texts (`token_ids.pack_ids`)."""

    def __init__(self, owner: str = "", scope: Any = None) -> None:
        self.owner = owner  # owner of all texts
        self.scope = scope  # what else the texts have in common
        self.root: RadixNode[T] = RadixNode(self, None, b"", 0)
        self.bytes = 0  # memory of the nodes

    @property
    def empty(self) -> bool:
        """Whether the tree has no texts."""
        return not self.root.children

    def walk(self, text: bytes) -> tuple[list[RadixNode[T]], int]:
        """Find the known prefixes of `text`.

        Returns:
            The nodes whose whole text is a prefix of `text`, shortest first, without the root; and
            how many tokens of `text` are a prefix of any text in the tree.
        """
        path: list[RadixNode[T]] = []
        node, at = self.root, 0
        while (child := node.children.get(text[at : at + ID_BYTES])) is not None:
            if not text.startswith(child.run, at):
                return path, (at + _common(child.run, text, at)) // ID_BYTES
            path.append(child)
            node, at = child, at + len(child.run)
        return path, at // ID_BYTES

    def insert(self, text: bytes, length: int) -> RadixNode[T]:
        """Return the node of the first `length` (>= 1) tokens of `text`; create it if necessary."""
        end = length * ID_BYTES
        node, at = self.root, 0
        while at < end:
            first = text[at : at + ID_BYTES]
            child = node.children.get(first)
            if child is None:
                child = self._add(node, text[at:end])
            else:
                same = len(child.run)
                if at + same > end or not text.startswith(child.run, at):
                    same = min(_common(child.run, text, at), end - at)
                if same < len(child.run):
                    child = self._split(child, same)
            node, at = child, at + len(child.run)
        return node

    def tidy(self, node: RadixNode[T]) -> None:
        """Remove the node, and its ancestors, as far as they are not needed any more."""
        while node.parent is not None and node.value is None and node.reader < 0:
            parent = node.parent
            if len(node.children) > 1:
                return
            if node.children:
                self._merge(node)
                return
            del parent.children[node.run[:ID_BYTES]]
            self.bytes -= len(node.run) + NODE_BYTES
            node.parent = None
            node = parent

    def _add(self, parent: RadixNode[T], run: bytes) -> RadixNode[T]:
        node = RadixNode(self, parent, run, parent.length + len(run) // ID_BYTES)
        parent.children[run[:ID_BYTES]] = node
        self.bytes += len(run) + NODE_BYTES
        return node

    def _split(self, node: RadixNode[T], at: int) -> RadixNode[T]:
        """Insert a new node `at` bytes into the run of `node`, and return it."""
        parent = node.parent
        assert parent is not None
        upper = RadixNode(self, parent, node.run[:at], parent.length + at // ID_BYTES)
        parent.children[node.run[:ID_BYTES]] = upper
        node.run, node.parent = node.run[at:], upper
        upper.children[node.run[:ID_BYTES]] = node
        self.bytes += NODE_BYTES
        return upper

    def _merge(self, node: RadixNode[T]) -> None:
        """Prepend the run of a node that has one child to that child's, and remove the node."""
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None
        child.run, child.parent = node.run + child.run, parent
        parent.children[child.run[:ID_BYTES]] = child
        node.parent = None
        self.bytes -= NODE_BYTES


def _common(run: bytes, text: bytes, at: int) -> int:
    """Return how many bytes of whole tokens `run` and `text` from `at` on have in common.

    A binary search, in which each step is one memory comparison.
    """
    # tokens known to be equal, tokens that may be
    low, high = 0, min(len(run), len(text) - at) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(run[low * ID_BYTES : middle * ID_BYTES], at + low * ID_BYTES):
            low = middle
        else:
            high = middle - 1
    return low * ID_BYTES
