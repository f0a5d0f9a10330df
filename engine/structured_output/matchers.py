"""GrammarMatchers: which tokens the grammar of each sequence allows next; does not import torch.

A sequence's matcher follows the sampled tokens. `fill` computes the masks of a step on the host. On
a GPU this happens while the model's step runs, to whose logits the masks are applied. Many masks
are computed by threads (engine.structured_output.masks), which may start as soon as the last tokens
are known.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.protocol.sampling_params import Grammar, SamplingParams, endings, stop_ids
from engine.structured_output.compiler import is_full, reason
from engine.structured_output.grammar_cache import GrammarCache, Original
from engine.structured_output.masks import SLOW_SECONDS, MaskThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

MOST_THREADS = 8  # threads that compute masks
SEVERAL = 16  # Waking threads pays for this many masks, if each takes WORTH_SECONDS.
WORTH_SECONDS = 8e-6
LEARN_EVERY = 64  # every this many batches one thread computes all masks, to measure their duration
CROWD = 8  # sequences per instance of a grammar beyond which another one should be compiled


@dataclass(slots=True)
class _Text:
    """The text of one sequence."""

    grammar: Grammar
    original: Original
    matcher: LLMatcher  # a copy of `original`'s
    ends: frozenset[int]  # the tokens that end the text
    min_tokens: int
    # The mask [words] of all tokens except those that min_tokens forbids.
    lasting: NDArray[np.uint32] | None
    # Tokens in the latest mask only because the text may end here.
    ending: set[int] = field(default_factory=set)
    # tokens that the matcher has consumed
    written: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Masks that are being computed before they are requested."""

    row_of: dict[int, int]  # by key
    masks: NDArray[np.int32]  # [rows, words]


class GrammarMatchers:
    """The matchers of one model, whose texts end with any of `eos_token_ids`.

    Up to `threads` threads compute masks.
    """

    def __init__(
        self, grammars: GrammarCache, eos_token_ids: tuple[int, ...], threads: int = 1
    ) -> None:
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        # Instances of a grammar: at most one for each thread.
        self._most_originals = min(threads, MOST_THREADS)
        self._threads = MaskThreads(self._most_originals)
        self._ahead: _Ahead | None = None
        self._mask_seconds = 0.0  # recent seconds per mask in a large batch, on one thread
        self._since_learning = 0  # number of batches
        self._copies: Counter[Original] = Counter()  # number of sequences that use each instance
        self._textual: NDArray[np.uint32] | None = None  # the mask of all tokens that may be text
        self._texts: dict[int, _Text] = {}  # by key
        self._rejected: dict[int, str] = {}

    @property
    def words(self) -> int:
        """32-bit words of a mask; known once a sequence was admitted."""
        return self._grammars.tokens.words

    def admit(self, key: int, params: SamplingParams) -> None:
        """Add a sequence; its grammar, if it has one, must be compiled."""
        if params.grammar is None:
            return
        originals = self._grammars.originals(params.grammar)
        if not originals:
            raise RuntimeError("a sequence was admitted without its grammar")
        original = min(originals, key=self._copies.__getitem__)
        lacking = len(originals) < self._most_originals and self._copies[original] >= CROWD
        if lacking and self._mask_seconds >= WORTH_SECONDS:
            self._grammars.compile_again(params.grammar)
        self._copies[original] += 1
        lasting = None
        if params.min_tokens:
            lasting = _all_but(endings(params, self._eos_token_ids), self.words)
        ends = stop_ids(params, self._eos_token_ids)
        matcher = original.copy()
        self._texts[key] = _Text(
            params.grammar, original, matcher, ends, params.min_tokens, lasting
        )

    def copies_of(self, original: Original) -> int:
        """Return how many sequences use a copy of this instance."""
        return self._copies[original]

    def release(self, keys: Iterable[int]) -> None:
        """Forget sequences; unknown keys are ignored."""
        if not (self._texts or self._rejected):
            return
        for key in keys:
            self._rejected.pop(key, None)
            text = self._texts.pop(key, None)
            if text is not None:
                self._leave(text.original)

    def rows(self, keys: Sequence[int]) -> list[int]:
        """Return the indices of the sequences that have a grammar."""
        if not self._texts:
            return []
        return [row for row, key in enumerate(keys) if key in self._texts]

    def fill(self, keys: Sequence[int], positions: Sequence[int], out: NDArray[np.int32]) -> None:
        """Write the mask of allowed tokens for each of these sequences, which all have grammars.

        Bit t of row i, counted from the lowest bit of the first word, says that token t is allowed.
        Where min_tokens would leave nothing, it is ignored. A sequence that cannot go on is
        rejected, and its mask allows everything.

        Args:
            keys: the sequences.
            positions: how many tokens have been sampled for each.
            out: [len(keys), words].
        """
        texts = [self._texts[key] for key in keys]
        self._fill_raw(keys, texts, out)
        for row, (key, text) in enumerate(zip(keys, texts, strict=True)):
            try:
                if text.matcher.is_error():
                    self._retry(text, partial(self._compute_one, key, text, _place(out, row)))
            except BaseException as error:
                self._rejected[key] = _defect(error)
        bits = out.view(np.uint32)
        may_end = self._take_out_ends(bits).tolist()
        goes_on = np.asarray(bits.any(axis=1)).tolist()
        for row, (key, position, text) in enumerate(zip(keys, positions, texts, strict=True)):
            text.ending.clear()
            if key in self._rejected:
                bits[row] = 0xFFFFFFFF
                continue
            # The bit alone does not say so, because a grammar may ask for that token by its number.
            ends = may_end[row] and text.matcher.is_accepting()
            if text.matcher.is_error() or not (goes_on[row] or (ends and text.ends)):
                self._rejected[key] = reason(text.matcher)
                bits[row] = 0xFFFFFFFF
            elif ends:
                for token in text.ends:
                    word, bit = token // 32, np.uint32(1 << token % 32)
                    if not bits[row, word] & bit:
                        bits[row, word] |= bit
                        text.ending.add(token)
            if position < text.min_tokens and text.lasting is not None:
                left = bits[row] & text.lasting
                if left.any():
                    bits[row] = left

    def take(self, key: int, token: int) -> bool:
        """Advance a sequence by a sampled token; return whether nothing can follow it."""
        text = self._texts[key]
        if key in self._rejected or token in text.ending:
            return False
        try:
            taken = text.matcher.consume_token(token)
            if taken or self._retry(text, lambda: text.matcher.consume_token(token)):
                text.written.append(token)
                return text.matcher.is_accepting() and self._is_stuck(text.matcher)
            self._rejected[key] = reason(text.matcher)
        except BaseException as error:
            self._rejected[key] = _defect(error)
        return False

    def _retry(self, text: _Text, redo: Callable[[], bool]) -> bool:
        """Retry with another instance, if a matcher failed because its shared lexer is full.

        The second try uses an instance of its own. Returns whether it succeeded.
        """
        for alone in (False, True):
            if text.original.copies == 1 or not is_full(text.matcher):
                return False
            original = self._grammars.replace(text.grammar, text.original, alone)
            if original is None:
                return False
            self._leave(text.original)
            self._copies[original] += 1
            text.original, text.matcher = original, original.copy()
            if text.matcher.consume_tokens(text.written.tolist()) and redo():
                return True
        return False

    def _leave(self, original: Original) -> None:
        self._copies[original] -= 1
        if not self._copies[original]:
            del self._copies[original]

    def _is_stuck(self, matcher: LLMatcher) -> bool:
        """Return whether no token can follow, by the grammar or because no token spells it.

        The latter happens only with tokens that lack some bytes.
        """
        tokens = self._grammars.tokens
        if tokens.complete or matcher.is_stopped():
            return matcher.is_stopped()
        bits = np.frombuffer(bytearray(matcher.compute_bitmask()), np.uint32).reshape(1, -1)
        self._take_out_ends(bits)
        return not bits.any() and not matcher.is_error()  # `fill` handles errors

    def _take_out_ends(self, bits: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Clear the bits of tokens that are not text [rows, words]; return who may end [rows]."""
        if self._textual is None:
            ends = self._grammars.tokens.end, *self._eos_token_ids
            self._textual = _all_but(ends, self.words)
        word, bit = divmod(self._grammars.tokens.end, 32)
        may_end: NDArray[np.bool_] = bits[:, word] & np.uint32(1 << bit) != 0
        bits &= self._textual
        return may_end

    def rejected(self) -> dict[int, str]:
        """Return the sequences that could not go on since the last call, and why."""
        rejected, self._rejected = self._rejected, {}
        return rejected

    def begin(self, keys: Sequence[int]) -> None:
        """Start computing the masks for the next `fill`, if there are enough to pay.

        Until then no tokens may be taken.
        """
        self._land()
        going_on = [
            key
            for key in keys
            if (text := self._texts.get(key)) is not None
            and key not in self._rejected
            and not text.original.cost.is_slow  # slow ones may not be in the next step
        ]
        if not self._are_worth_threads(len(going_on)):
            return
        texts = [self._texts[key] for key in going_on]
        try:
            masks = np.empty((len(going_on), self.words), np.int32)
            self._threads.begin(self._together(texts), masks)
        except Exception as error:  # no thread or no memory available
            _defect(error)
            return
        self._ahead = _Ahead({key: row for row, key in enumerate(going_on)}, masks)

    def _land(self) -> _Ahead | None:
        """Wait for what `begin` started, and return it; None if it failed or there is nothing."""
        ahead, self._ahead = self._ahead, None
        try:
            self._threads.wait()
        except BaseException as error:
            _defect(error)  # computing them one by one shows which one fails
            return None
        return ahead

    def _fill_raw(
        self, keys: Sequence[int], texts: Sequence[_Text], out: NDArray[np.int32]
    ) -> None:
        """Write every matcher's mask; sequences whose matcher raises are rejected."""
        ahead = self._land()
        if ahead is None:
            self._compute(keys, texts, out)
            return
        rows = np.array([ahead.row_of.get(key, -1) for key in keys])
        np.take(ahead.masks, rows, axis=0, out=out, mode="wrap")  # "wrap" is faster than "raise"
        new = np.flatnonzero(rows < 0).tolist()
        if new:
            masks = np.empty((len(new), self.words), np.int32)
            self._compute([keys[row] for row in new], [texts[row] for row in new], masks)
            out[new] = masks

    def _compute(self, keys: Sequence[int], texts: Sequence[_Text], out: NDArray[np.int32]) -> None:
        if self._are_worth_threads(len(texts)):
            try:
                self._threads.compute(self._together(texts), out)
                return
            except BaseException as error:
                _defect(error)  # computing them one by one shows which one fails
        began = last = time.perf_counter()
        address, size = _place(out, 0)
        for row, (key, text) in enumerate(zip(keys, texts, strict=True)):
            self._compute_one(key, text, (address + row * size, size))
            before, last = last, time.perf_counter()
            if last - before >= SLOW_SECONDS or text.original.cost.is_slow:
                text.original.cost.note(last - before)
        if len(texts) >= SEVERAL:  # in small batches each takes longer, because caches are cold
            self._mask_seconds = (last - began) / len(texts)
            self._since_learning = 0

    def _compute_one(self, key: int, text: _Text, out: tuple[int, int]) -> bool:
        """Write the mask to `out`, (address, bytes); return whether there is one."""
        try:
            text.matcher.unsafe_compute_mask_ptr(*out)
        except BaseException as error:
            self._rejected[key] = _defect(error)
            return False
        return not text.matcher.is_error()

    def _are_worth_threads(self, masks: int) -> bool:
        """Return whether threads pay for this many masks, most of which do not wait for others."""
        crowds = self._copies.values()
        if (
            masks < SEVERAL
            or self._most_originals == 1
            or self._mask_seconds < WORTH_SECONDS
            or 2 * max(crowds) > sum(crowds)
        ):
            return False
        self._since_learning += 1
        return self._since_learning < LEARN_EVERY

    def _together(self, texts: Sequence[_Text]) -> list[tuple[LLMatcher, int]]:
        """Return (matcher, row), with copies of one instance next to each other."""
        numbers = {original: number for number, original in enumerate(self._copies)}
        order = [numbers[text.original] for text in texts]
        rows = sorted(range(len(texts)), key=order.__getitem__)
        return [(texts[row].matcher, row) for row in rows]


def _defect(error: BaseException) -> str:
    """Log an error that a matcher raised, and describe it for the client.

    A panic of the library is not an Exception, but must fail only one request. Errors that end the
    process are raised again.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    log.error("a matcher failed", exc_info=error)
    return f"the matcher failed: {type(error).__name__}"


def _place(out: NDArray[np.int32], row: int) -> tuple[int, int]:
    """Return the address and the size in bytes of a row."""
    size = out.shape[1] * out.itemsize
    return out.ctypes.data + row * size, size


def _all_but(tokens: Iterable[int], words: int) -> NDArray[np.uint32]:
    """Return the mask [words] of all tokens except these."""
    bits = np.full(words, 0xFFFFFFFF, np.uint32)
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)
    return bits
