"""PrefixCache: which texts have a state kept, so that what begins with them need not read them.

Every owner and salt has a trie of its own: whether a text has been read before would tell others
of it. So has every named state that texts are read after, if their requests name places for states
(samples do: they read a prompt once); of most such texts nobody will ever go on from. Rows, and
what tries take, are common to all; where they are short, who has the most of them gives way
(`fair_lru`).

A state is kept
- at the end of a prompt, with its logits: the same prompt again is not read at all;
- at the end of an answer, as far as it was read;
- where a prompt leaves what is known, if that saves LEAST_GAIN tokens: to end a chunk there costs
  the prompt a step;
- where its request says so.

The first request that comes to such a place reads up to it, and is its *reader*; who would start
from there waits for it. (While rows are short, prompts of a few tokens are read without all that:
their states would not be kept.) Where whole chunks are asked for, states are kept at their
multiples and at prompts' ends, and from the latter only the very same prompt goes on: every bit is
as without a cache.
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
from engine.step_plan import Copy

LEAST_GAIN = 16  # tokens: less is read in the time that a further step, or waiting for one, takes
FEW_TOKENS = 2 * LEAST_GAIN  # less than these are hardly worth waiting for

MOST_LOADS = 3  # of cached states for one request: others may have taken the row meanwhile

SPARE_SCOPES = 256  # tries that may be empty

Place = RadixNode[CachedState]
Scope = tuple[str, str, CachedState | None]  # owner, salt and the state that texts go on from


class CacheHit(msgspec.Struct, gc=False):
    """What a prompt may start from, and what it is to leave behind."""

    kept: CachedState | None = None
    length: int = 0  # prompt tokens that `kept` has read; all of them: its logits are used too
    awaited: Place | None = None  # a longer one is being read just now
    loading: CachedState | None = None  # a file of it is being read
    marks: list[int] = []  # where states should be kept, rising
    ends: list[int] = []  # those of them where a chunk has to end
    reason: str = ""  # why there is nothing to start from


class PendingEntry(msgspec.Struct, gc=False):
    """A place whose reader has not come to it."""

    node: Place
    kept: CachedState | None = None  # to which a copy is planned


class PrefixCache:
    """Keeps states in `tiers`; `most_bytes` bounds what the tries take."""

    def __init__(
        self, tiers: TieredStateStore, most_bytes: int, with_whole_chunks: bool = False
    ) -> None:
        self._tiers = tiers
        tiers.forget = self.forget
        self._most_bytes = most_bytes
        self._align = SCAN_CHUNK if with_whole_chunks else 1
        self._tries: dict[Scope, RadixTree[CachedState]] = {}
        self._bytes = Weights()  # that tries take
        self._weights = Weights()  # parts of these bytes
        self._scopes = 0  # tries that were not empty when this was last looked at
        self.on_forgotten: Callable[[CachedState], None] | None = None
        self._claims: dict[int, dict[int, PendingEntry]] = {}  # by reader and length
        self._answers: dict[int, CachedState] = {}  # by sequence: states of answers not known yet

    def look(self, sequence: Sequence) -> CacheHit:
        """What is known of its prompt."""
        found = CacheHit()
        most, length = sequence.cacheable_tokens, sequence.prompt_tokens
        if not self._tiers.rows:
            found.ends = found.marks = self._aligned(sequence.cache_points)
            return found
        trie = self._tries.get(_scope(sequence))
        path, same = ((), 0) if trie is None else trie.walk(sequence.text)
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
            if value is not None and (node.length < length or value.logits):
                found.kept, found.length = value, node.length
            elif node.reader >= 0 and self._is_worth_it(node, found, sequence):
                found.awaited = node
        if found.awaited is not None and found.awaited.length <= found.length:
            found.awaited = None
        if found.kept is None:
            if most == 0 and not sequence.resumable:
                found.reason = "short"
            elif known:
                found.reason = "unaligned"
            else:
                found.reason = "unheld" if same else "new"
        self._mark(found, sequence, same)
        return found

    def _is_worth_it(self, node: Place, found: CacheHit, sequence: Sequence) -> bool:
        return node.length - found.length >= LEAST_GAIN or node.length in sequence.cache_points

    def _mark(self, found: CacheHit, sequence: Sequence, same: int) -> None:
        length, align = sequence.prompt_tokens, self._align
        points = sequence.cache_points
        ends = self._aligned(points) if points else []
        leaves = same // align * align
        if leaves < length and leaves - found.length >= LEAST_GAIN:
            ends.append(leaves)
        if align > 1:
            ends.append((length - 1) // align * align)
        if ends:
            ends = sorted({end for end in ends if end > found.length})
        found.ends = found.marks = ends
        if sequence.samples and found.length < length and length not in ends:
            found.marks = [*ends, length]

    def _aligned(self, points: tuple[int, ...]) -> list[int]:
        return sorted({point // self._align * self._align for point in points} - {0})

    def claim(self, sequence: Sequence, marks: list[int]) -> None:
        """It reads up to those of `marks` that nobody has kept or reads to."""
        if not self._tiers.rows or not marks or self._is_vain(sequence, marks):
            return
        trie = self._trie(_scope(sequence))
        before = trie.bytes
        mine: dict[int, PendingEntry] = {}
        for mark in marks:
            node = trie.insert(sequence.text, mark)
            if node.reader < 0 and (node.value is None or self._lacks_logits(node, sequence)):
                node.reader = sequence.key
                mine[mark] = PendingEntry(node)
        if mine:
            self._claims[sequence.key] = mine
        self._account(trie, trie.bytes - before)

    def _is_vain(self, sequence: Sequence, marks: list[int]) -> bool:
        """Whether it could only keep a short prompt's end, which nobody has asked for, at a time
        when there are no rows for that. Of several samples of a prompt, all but the first may still
        wait for each other."""
        if not self._tiers.crowded or sequence.cache_points or sequence.request.sampling.choice:
            return False
        length = sequence.prompt_tokens
        return length < FEW_TOKENS and marks[0] == length

    def _lacks_logits(self, node: Place, sequence: Sequence) -> bool:
        return (
            node.value is not None
            and not node.value.logits
            and node.length == sequence.prompt_tokens
        )

    def reserve(self, sequence: Sequence, length: int) -> CachedState | None:
        """A place for the state of a prompt of which `length` tokens are read in the plan being
        made; None unless the sequence is the reader of this length, or where there is no room."""
        claims = self._claims.get(sequence.key)
        claim = None if claims is None else claims.get(length)
        if claim is None:
            return None
        with_logits = length == sequence.prompt_tokens and sequence.samples
        kept = CachedState(length, sequence.owner, logits=with_logits)
        if not self._tiers.put(kept, for_cache=True):
            return None
        claim.kept = self._tiers.hold(kept)
        return kept

    def landed(self, key: int, length: int) -> Place | None:
        """The reader has passed a mark: what was planned to be kept stands. Returns the place,
        for which others may wait."""
        claims = self._claims.get(key)
        claim = None if claims is None else claims.pop(length, None)
        if claims is None or claim is None:
            return None
        if not claims:
            del self._claims[key]
        node = claim.node
        node.reader = -1
        if claim.kept is not None:
            self._set(node, claim.kept)
        else:
            self._tidy(node)
        return node

    def leave(self, key: int) -> list[Place]:
        """The sequence has ended: the places that it does not read any more."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._tiers.release(answer)
        claims = self._claims.pop(key, None)
        if claims is None:
            return []
        for claim in claims.values():
            if claim.kept is not None:
                self._tiers.release(claim.kept)
            claim.node.reader = -1
            self._tidy(claim.node)
        return [claim.node for claim in claims.values()]

    def save_answer(self, sequence: Sequence) -> None:
        """Others will have its slot when its answer is known: plans a copy of the state."""
        kept = self._copy_of(sequence) if self._align == 1 and self._may_copy else None
        if kept is not None:
            self._answers[sequence.key] = kept

    @property
    def _may_copy(self) -> bool:
        return self._tiers.rows > 0 and not self._tiers.crowded

    def _copy_of(self, sequence: Sequence) -> CachedState | None:
        """A state like that in its slot, from the next plan on; how much it has read is said
        later."""
        kept = CachedState(0, sequence.owner)
        if not self._tiers.put(kept, for_cache=True):
            return None
        self._tiers.moves.append(Copy(sequence.slot, kept.place))
        return self._tiers.hold(kept)

    def keep_answer(self, sequence: Sequence, read: int) -> None:
        """Keeps the state of a sequence that ends, which has read its text and `read` tokens of its
        answer."""
        saved = self._answers.get(sequence.key)
        can_copy = not sequence.handed_over and self._align == 1 and self._may_copy
        if read <= 0 or not (saved or can_copy):
            return
        text = sequence.text + sequence.tokens[:read].tobytes()
        trie = self._trie(_scope(sequence))
        before = trie.bytes
        node = trie.insert(text, len(text) // ID_BYTES)
        more = trie.bytes - before
        if node.value is None and node.reader < 0:
            node.reader = sequence.key  # so that it stays, whatever makes room
            kept = self._answers.pop(sequence.key, None) or self._copy_of(sequence)
            if kept is not None:
                kept.position = node.length
                self._set(node, kept)
            node.reader = -1
            if node.value is None:
                self._tidy(node)
        self._account(trie, more)

    def forget(self, kept: CachedState) -> None:
        """Keeps a state no more."""
        node: Place | None = kept.node
        if node is None:
            return
        if self.on_forgotten is not None:
            self.on_forgotten(kept)
        node.value = kept.node = None
        self._tiers.release(kept)
        self._tidy(node)

    def restore(self, scope: Scope, text: bytes, kept: CachedState) -> CachedState:
        """A state of a former process, which a file has; returns the one that its text has from
        then on: another one, where that was there."""
        trie = self._trie(scope)
        before = trie.bytes
        node = trie.insert(text, kept.position)
        if node.value is not None:
            return node.value
        node.value, kept.node = self._tiers.hold(kept), node
        self._tiers.rest(kept)
        self._account(trie, trie.bytes - before)
        return kept

    def _set(self, node: Place, kept: CachedState) -> None:
        if node.value is not None:
            old, node.value = node.value, None
            if self.on_forgotten is not None:
                self.on_forgotten(old)
            old.node = None
            self._tiers.release(old)
        node.value, kept.node = kept, node
        if not kept.has_row:  # lost with the round that was to write it
            self.forget(kept)
        else:
            self._tiers.stand(kept)

    def _trie(self, scope: Scope) -> RadixTree[CachedState]:
        """The scope's, made if need be."""
        trie = self._tries.get(scope)
        if trie is None:
            trie = self._tries[scope] = RadixTree(scope[0], scope)
        return trie

    def _tidy(self, node: Place) -> None:
        trie: RadixTree[CachedState] = node.trie
        before = trie.bytes
        trie.tidy(node)
        self._bytes.add(trie.owner, trie.bytes - before)

    def _account(self, trie: RadixTree[CachedState], more: int) -> None:
        if more:
            self._bytes.add(trie.owner, more)
        while self._bytes.total > self._most_bytes:
            if not self._tiers.make_room(self._bytes.heaviest() or ""):
                break
        if len(self._tries) > 2 * self._scopes + SPARE_SCOPES:
            self._tries = {scope: trie for scope, trie in self._tries.items() if not trie.empty}
            self._scopes = len(self._tries)


def _scope(sequence: Sequence) -> Scope:
    keeping, request = sequence.keeping, sequence.request
    if keeping is None:
        return request.owner, request.cache_salt, None
    source = None if keeping.source is None else keeping.source.kept
    return request.owner, request.cache_salt, source
