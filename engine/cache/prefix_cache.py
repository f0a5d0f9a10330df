"""PrefixCache: which texts have a cached state, so that what begins with them need not read them.

Every owner and salt has a tree of its own: whether a text has been read before would tell others
of it. So has every named state that texts are read after, if their requests name cache points
(samples do: they read a prompt once); from most such texts nobody will ever go on. Rows, and the
memory of the trees, are common to all; where they are short, who has the most of them gives way
(`fair_lru`).

A state is stored
- at the end of a prompt, with its logits: the same prompt again is not read at all;
- at the end of an answer, as far as it was read;
- where a prompt leaves what is known, if that saves LEAST_GAIN tokens: to end a chunk there costs
  the prompt a step;
- where its request says so.

These lengths of a prompt are its marks. The first request that comes to a mark reads up to it, and
is its *reader*: the mark is a pending entry until then, and who would start from it waits. (While
rows are short, prompts of a few tokens are read without all that: their states would not be
stored.) Where whole chunks are asked for, states are stored at their multiples and at prompts'
ends, and from the latter only the very same prompt goes on: every bit is as without a cache.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.cache.fair_lru import Weights
from engine.cache.radix_tree import RadixNode, RadixTree
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.config import SCAN_CHUNK
from engine.protocol.token_ids import ID_BYTES
from engine.sequence import Sequence

LEAST_GAIN = 16  # tokens: less is read in the time that a further step, or waiting for one, takes
FEW_TOKENS = 2 * LEAST_GAIN  # less than these are hardly worth waiting for

MOST_LOADS = 3  # of cached states for one request: others may have taken the row meanwhile

SPARE_TREES = 256  # that may be empty

Node = RadixNode[CachedState]
Scope = tuple[str, str, CachedState | None]  # owner, salt and the state that texts go on from


class CacheHit(msgspec.Struct, gc=False):
    """What a prompt may start from, and where states of it should be stored.

    At most one of `awaited` and `loading` is set; then it cannot start yet. Without these and
    without `state` it starts from nothing.
    """

    state: CachedState | None = None  # in a row
    length: int = 0  # prompt tokens that `state` has read; all of them: its logits are used too
    awaited: Node | None = None  # a longer prefix's, which another sequence reads just now
    loading: CachedState | None = None  # its file is being read
    marks: list[int] = []  # lengths in tokens at which states should be stored, rising
    ends: list[int] = []  # those of them at which a chunk has to end
    reason: str = ""  # why there is nothing to start from, for the metrics


class PendingEntry(msgspec.Struct, gc=False):
    """A mark that its reader has not come to."""

    node: Node
    state: CachedState | None = None  # to which a copy is planned


class PrefixCache:
    """The trees of texts with cached states. Lengths are tokens of `Sequence.text`."""

    def __init__(
        self, tiers: TieredStateStore, tree_bytes: int, with_whole_chunks: bool = False
    ) -> None:
        """`tree_bytes` bounds the trees' memory, `tiers` has the rows."""
        self._tiers = tiers
        tiers.on_evict = self.evict
        self._tree_bytes = tree_bytes
        self._align = SCAN_CHUNK if with_whole_chunks else 1
        self._trees: dict[Scope, RadixTree[CachedState]] = {}
        self._bytes = Weights()  # that trees take, by owner
        self._nonempty = 0  # trees, when this was last looked at
        # Told of a state that no node has any more; its files are nobody's then.
        self.on_evicted: Callable[[CachedState], None] | None = None
        self._pending: dict[int, dict[int, PendingEntry]] = {}  # by reader and length
        self._answers: dict[int, CachedState] = {}  # by sequence: states of answers not known yet

    def lookup(self, sequence: Sequence, source: CachedState | None = None) -> CacheHit:
        """Looks up the longest cached prefix of a prompt, before the sequence is admitted.

        Args:
            source: the named state that the sequence goes on from.

        Returns: the hit, whose `state` may lie in a file alone: who calls has it loaded then. It
        is not pinned, and holds until something is allocated.
        """
        hit = CacheHit()
        most, length = sequence.cacheable_tokens, sequence.prompt_tokens
        if not self._tiers.rows:
            hit.ends = hit.marks = self._aligned(sequence.cache_points)
            return hit
        tree = self._trees.get(_scope(sequence, source))
        path, same = ((), 0) if tree is None else tree.walk(sequence.text)
        known = False
        for node in path:
            if node.length > most and not (node.length == length and sequence.resumable):
                continue
            if node.length % self._align and node.length != length:
                known = known or node.value is not None
                continue
            value = node.value
            if value is not None and not value.has_row and sequence.loads >= MOST_LOADS:
                value = None  # others have always taken its row before it was used
            if value is not None and (node.length < length or value.has_logits):
                hit.state, hit.length = value, node.length
            elif node.reader >= 0 and self._is_worth_it(node, hit, sequence):
                hit.awaited = node
        if hit.awaited is not None and hit.awaited.length <= hit.length:
            hit.awaited = None
        if hit.state is None:
            if most == 0 and not sequence.resumable:
                hit.reason = "short"
            elif known:
                hit.reason = "unaligned"
            else:
                hit.reason = "unheld" if same else "new"
        self._mark(hit, sequence, same)
        return hit

    def _is_worth_it(self, node: Node, hit: CacheHit, sequence: Sequence) -> bool:
        return node.length - hit.length >= LEAST_GAIN or node.length in sequence.cache_points

    def _mark(self, hit: CacheHit, sequence: Sequence, same: int) -> None:
        length, align = sequence.prompt_tokens, self._align
        points = sequence.cache_points
        ends = self._aligned(points) if points else []
        leaves = same // align * align
        if leaves < length and leaves - hit.length >= LEAST_GAIN:
            ends.append(leaves)
        if align > 1:
            ends.append((length - 1) // align * align)
        if ends:
            ends = sorted({end for end in ends if end > hit.length})
        hit.ends = hit.marks = ends
        if sequence.samples and hit.length < length and length not in ends:
            hit.marks = [*ends, length]

    def _aligned(self, points: tuple[int, ...]) -> list[int]:
        return sorted({point // self._align * self._align for point in points} - {0})

    def add_pending(
        self, sequence: Sequence, marks: list[int], source: CachedState | None = None
    ) -> None:
        """Makes an admitted sequence the reader of those of `marks` at which nothing is stored and
        which nobody else reads up to. `source` as of `lookup`."""
        if not self._tiers.rows or not marks or self._is_vain(sequence, marks):
            return
        tree = self._tree(_scope(sequence, source))
        before = tree.bytes
        mine: dict[int, PendingEntry] = {}
        for mark in marks:
            node = tree.insert(sequence.text, mark)
            if node.reader < 0 and (node.value is None or self._lacks_logits(node, sequence)):
                node.reader = sequence.key
                mine[mark] = PendingEntry(node)
        if mine:
            self._pending[sequence.key] = mine
        self._account(tree, tree.bytes - before)

    def _is_vain(self, sequence: Sequence, marks: list[int]) -> bool:
        """Whether it could only keep a short prompt's end, which nobody has asked for, at a time
        when there are no rows for that. Of several samples of a prompt, all but the first may still
        wait for each other."""
        if not self._tiers.crowded or sequence.cache_points or sequence.request.sampling.choice:
            return False
        length = sequence.prompt_tokens
        return length < FEW_TOKENS and marks[0] == length

    def _lacks_logits(self, node: Node, sequence: Sequence) -> bool:
        return (
            node.value is not None
            and not node.value.has_logits
            and node.length == sequence.prompt_tokens
        )

    def allocate(self, sequence: Sequence, length: int) -> CachedState | None:
        """Allocates a row for the state of a prompt whose first `length` tokens are read when the
        plan being made has run; that plan has to copy the sequence's slot there.

        Returns: the state; None unless the sequence is the reader of this length, and where there
        is no room.
        """
        mine = self._pending.get(sequence.key)
        entry = None if mine is None else mine.get(length)
        if entry is None:
            return None
        with_logits = length == sequence.prompt_tokens and sequence.samples
        state = CachedState(length, sequence.owner, with_logits)
        if not self._tiers.allocate(state, for_cache=True):
            return None
        entry.state = self._tiers.pin(state)
        return state

    def commit(self, key: int, length: int) -> Node | None:
        """The plan in which sequence `key` has read `length` tokens is committed: what was
        allocated for that is stored.

        Returns: the node that others may have waited for; None where the sequence is no reader.
        """
        mine = self._pending.get(key)
        entry = None if mine is None else mine.pop(length, None)
        if mine is None or entry is None:
            return None
        if not mine:
            del self._pending[key]
        node = entry.node
        node.reader = -1
        if entry.state is not None:
            self._store(node, entry.state)
        else:
            self._tidy(node)
        return node

    def cancel(self, key: int) -> list[Node]:
        """Sequence `key` reads no more. Returns the nodes that it does not read up to any more."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._tiers.release(answer)
        mine = self._pending.pop(key, None)
        if mine is None:
            return []
        for entry in mine.values():
            if entry.state is not None:
                self._tiers.release(entry.state)
            entry.node.reader = -1
            self._tidy(entry.node)
        return [entry.node for entry in mine.values()]

    def copy_answer(self, sequence: Sequence) -> None:
        """Plans a copy of a state whose slot goes to another sequence before the answer is
        known; `store_answer` stores it then."""
        state = self._copy_of(sequence) if self._align == 1 and self._may_copy else None
        if state is not None:
            self._answers[sequence.key] = state

    @property
    def _may_copy(self) -> bool:
        return self._tiers.rows > 0 and not self._tiers.crowded

    def _copy_of(self, sequence: Sequence) -> CachedState | None:
        """A state like that in its slot, from the next plan on; how much it has read is known when
        it is attached to a node."""
        state = CachedState(0, sequence.owner)
        if not self._tiers.allocate(state, for_cache=True):
            return None
        self._tiers.copy_into(state, sequence.slot)
        return self._tiers.pin(state)

    def store_answer(self, sequence: Sequence, read: int) -> None:
        """Stores the state of a sequence that ends, where there is room.

        Args:
            read: tokens of the answer that its slot's state has read, after all of its text.
        """
        saved = self._answers.get(sequence.key)
        can_copy = not sequence.handed_over and self._align == 1 and self._may_copy
        if read <= 0 or not (saved or can_copy):
            return
        text = sequence.text + sequence.tokens[:read].tobytes()
        tree = self._tree(_scope(sequence, None))
        before = tree.bytes
        node = tree.insert(text, len(text) // ID_BYTES)
        more = tree.bytes - before
        if node.value is None and node.reader < 0:
            node.reader = sequence.key  # so that it stays, whatever makes room
            state = self._answers.pop(sequence.key, None) or self._copy_of(sequence)
            if state is not None:
                self._store(node, state)
            node.reader = -1
            if node.value is None:
                self._tidy(node)
        self._account(tree, more)

    def evict(self, state: CachedState) -> None:
        """Takes a state from its node, if it has one, and releases it."""
        node: Node | None = state.node
        if node is None:
            return
        self._detach(node, state)
        self._tidy(node)

    def restore(self, scope: Scope, text: bytes, state: CachedState) -> CachedState:
        """Stores a state of a former process, which a file alone has.

        Args:
            text: packed ids; the first `state.position` of them are those that it has read.

        Returns: the state that the text has from then on: another one, where that was there.
        """
        tree = self._tree(scope)
        before = tree.bytes
        node = tree.insert(text, state.position)
        if node.value is not None:
            return node.value
        node.value = self._tiers.pin(state)
        self._tiers.attach(state, node)
        self._tiers.move_to_disk(state)
        self._account(tree, tree.bytes - before)
        return state

    def _store(self, node: Node, state: CachedState) -> None:
        """At a node, in the place of what is there; a state that is pinned for that."""
        if node.value is not None:
            self._detach(node, node.value)
        node.value = state
        self._tiers.attach(state, node)
        if not state.has_row:  # lost with the plan that was to write it
            self.evict(state)
        else:
            self._tiers.commit(state)

    def _detach(self, node: Node, state: CachedState) -> None:
        if self.on_evicted is not None:
            self.on_evicted(state)
        node.value = None
        self._tiers.detach(state)
        self._tiers.release(state)

    def _tree(self, scope: Scope) -> RadixTree[CachedState]:
        """The scope's, made if need be."""
        tree = self._trees.get(scope)
        if tree is None:
            tree = self._trees[scope] = RadixTree(scope[0], scope)
        return tree

    def _tidy(self, node: Node) -> None:
        tree: RadixTree[CachedState] = node.tree
        before = tree.bytes
        tree.tidy(node)
        self._bytes.add(tree.owner, tree.bytes - before)

    def _account(self, tree: RadixTree[CachedState], more: int) -> None:
        if more:
            self._bytes.add(tree.owner, more)
        while self._bytes.total > self._tree_bytes:
            if not self._tiers.evict(self._bytes.heaviest() or ""):
                break
        if len(self._trees) > 2 * self._nonempty + SPARE_TREES:
            self._trees = {scope: tree for scope, tree in self._trees.items() if not tree.empty}
            self._nonempty = len(self._trees)


def _scope(sequence: Sequence, source: CachedState | None) -> Scope:
    request = sequence.request
    return request.owner, request.cache_salt, source
