"""PrefixCache: finds the longest cached prefix of a prompt, and decides which states to store.

Every (owner, salt) has a tree of its own, because a cache hit tells a client that a text was read
before. Texts read after a named state have a tree of their own, too, if their requests name cache
points (as several samples of one prompt do); most such texts are never continued. Rows, and the
memory of the trees, are shared by all. Where they are short, the owner with the most loses some
(`fair_lru`).

A state is stored

- at the end of a prompt, with the hidden state there, from which the logits are computed: the same
  prompt again is not read at all;
- at the end of an answer, as far as it was read;
- where a prompt diverges from what is known, if that saves LEAST_GAIN tokens: ending a chunk there
  costs the prompt a step;
- where its request says so.

These lengths of a prompt are its marks. The first request that gets to a mark is its *reader*.
Until it has read up to the mark, the mark is a pending entry, and requests that would start from it
wait. (While rows are short, prompts of a few tokens skip this, since their states would not be
stored.) With whole chunks, states are stored at multiples of SCAN_CHUNK and at prompts' ends, and
only the very same prompt continues from the latter; results are then bitwise equal to those without
a cache.
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

LEAST_GAIN = 16  # fewer tokens are read in the time of one more step, or of waiting for one
FEW_TOKENS = 2 * LEAST_GAIN  # shorter prompts are hardly worth waiting for

# most loads from files for one request, as others may take the row before it is used
MOST_LOADS = 3

SPARE_TREES = 256  # empty trees that are tolerated

Node = RadixNode[CachedState]
# owner, salt, and the named state from which the texts continue
Scope = tuple[str, str, CachedState | None]


class CacheHit(msgspec.Struct, gc=False):
    """What a prompt may start from, and where its states should be stored.

    At most one of `awaited` and `loading` is set; the prompt cannot start yet then. If these and
    `state` are None, it starts from the initial state.
    """

    state: CachedState | None = None  # the state to start from; in a row
    # prompt tokens that `state` has read; if these are all, its hidden state is used, too
    length: int = 0
    awaited: Node | None = None  # a longer prefix that another sequence is reading
    loading: CachedState | None = None  # a state whose file is being read
    marks: list[int] = []  # lengths in tokens at which states should be stored, ascending
    ends: list[int] = []  # those of `marks` at which a chunk must end
    reason: str = ""  # reason of a miss, for the metrics


class PendingEntry(msgspec.Struct, gc=False):
    """A mark that its reader has not reached yet."""

    node: Node
    state: CachedState | None = None  # state to which a copy is planned


class PrefixCache:
    """The radix trees of texts with cached states. Lengths are tokens of `Sequence.text`."""

    def __init__(
        self, tiers: TieredStateStore, tree_bytes: int, with_whole_chunks: bool = False
    ) -> None:
        """Create an empty cache; `tree_bytes` bounds the trees' memory, `tiers` has the rows."""
        self._tiers = tiers
        tiers.on_evict = self.evict
        self._tree_bytes = tree_bytes
        self._align = SCAN_CHUNK if with_whole_chunks else 1
        self._trees: dict[Scope, RadixTree[CachedState]] = {}
        self._bytes = Weights()  # memory of the trees, by owner
        self._nonempty = 0  # non-empty trees at the last cleanup
        # Called with a state that no node has any more, so that its files can be deleted.
        self.on_evicted: Callable[[CachedState], None] | None = None
        self._pending: dict[int, dict[int, PendingEntry]] = {}  # by reader and length
        # by sequence: copied states of answers that are not known yet
        self._answers: dict[int, CachedState] = {}

    def lookup(self, sequence: Sequence, source: CachedState | None = None) -> CacheHit:
        """Look up the longest cached prefix of a prompt, before the sequence is admitted.

        Args:
            sequence: the waiting sequence.
            source: the named state from which the sequence continues.

        Returns:
            The hit. If its `state` is only in a file, the caller must have it loaded. The state is
            not pinned, and is valid until something is allocated.
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
                value = None  # other requests have always taken its row before it was used
            if value is not None and (node.length < length or value.has_hidden):
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
        """Make an admitted sequence the reader of the `marks` that are not stored or being read.

        `source` as in `lookup`.
        """
        if not self._tiers.rows or not marks or self._is_vain(sequence, marks):
            return
        tree = self._tree(_scope(sequence, source))
        before = tree.bytes
        mine: dict[int, PendingEntry] = {}
        for mark in marks:
            node = tree.insert(sequence.text, mark)
            if node.reader < 0 and (node.value is None or self._lacks_hidden(node, sequence)):
                node.reader = sequence.key
                mine[mark] = PendingEntry(node)
        if mine:
            self._pending[sequence.key] = mine
        self._account(tree, tree.bytes - before)

    def _is_vain(self, sequence: Sequence, marks: list[int]) -> bool:
        """Return whether marks are useless for the sequence: a short prompt while rows are short.

        Its state, which nobody asked for, could not be stored. Samples of one prompt, except for
        the first, may still wait for each other.
        """
        if not self._tiers.crowded or sequence.cache_points or sequence.request.sampling.choice:
            return False
        length = sequence.prompt_tokens
        return length < FEW_TOKENS and marks[0] == length

    def _lacks_hidden(self, node: Node, sequence: Sequence) -> bool:
        return (
            node.value is not None
            and not node.value.has_hidden
            and node.length == sequence.prompt_tokens
        )

    def allocate(self, sequence: Sequence, length: int) -> CachedState | None:
        """Allocate a row for the state after the first `length` tokens of a prompt.

        They are read when the plan being made has run; that plan must copy the sequence's slot
        there.

        Returns:
            The state; None if the sequence is not the reader of this length, or if there is no
            room.
        """
        mine = self._pending.get(sequence.key)
        entry = None if mine is None else mine.get(length)
        if entry is None:
            return None
        with_hidden = length == sequence.prompt_tokens and sequence.samples
        state = CachedState(length, sequence.owner, with_hidden)
        if not self._tiers.allocate(state, for_cache=True):
            return None
        entry.state = self._tiers.pin(state)
        return state

    def commit(self, key: int, length: int) -> Node | None:
        """Store what was allocated for `length`, because the plan that read it was committed.

        Returns:
            The node for which others may have waited; None if sequence `key` is not its reader.
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
        """Cancel the pending entries of sequence `key`, and return their nodes."""
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
        """Plan a copy of the state in a slot that is reused before its sequence's answer is known.

        `store_answer` stores the copy later.
        """
        state = self._copy_of(sequence) if self._align == 1 and self._may_copy else None
        if state is not None:
            self._answers[sequence.key] = state

    @property
    def _may_copy(self) -> bool:
        return self._tiers.rows > 0 and not self._tiers.crowded

    def _copy_of(self, sequence: Sequence) -> CachedState | None:
        """Copy the state in the sequence's slot with the next plan; None if there is no room.

        How much the state has read is set when it is attached to a node.
        """
        state = CachedState(0, sequence.owner)
        if not self._tiers.allocate(state, for_cache=True):
            return None
        self._tiers.copy_into(state, sequence.slot)
        return self._tiers.pin(state)

    def store_answer(self, sequence: Sequence, read: int) -> None:
        """Store the state of a sequence that ends, if there is room.

        Args:
            sequence: the ending sequence.
            read: tokens of the answer that the state in its slot has read, after all of its text.
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
            node.reader = sequence.key  # keeps the node from being removed while room is made
            state = self._answers.pop(sequence.key, None) or self._copy_of(sequence)
            if state is not None:
                self._store(node, state)
            node.reader = -1
            if node.value is None:
                self._tidy(node)
        self._account(tree, more)

    def evict(self, state: CachedState) -> None:
        """Remove a state from its node, if it has one, and release it."""
        node: Node | None = state.node
        if node is None:
            return
        self._detach(node, state)
        self._tidy(node)

    def restore(self, scope: Scope, text: bytes, state: CachedState) -> CachedState:
        """Add a state of a former process that only a file has.

        Args:
            scope: the tree to which it belongs.
            text: packed ids, of which the state has read the first `state.position`.
            state: the state.

        Returns:
            The text's state from now on: another one if the text already had one.
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
        """Store a pinned state at a node, replacing the one there."""
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
        """Return the scope's tree, creating it if necessary."""
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
