"""GrammarCache: the compiled grammars of one model, kept while in use; compiled on a thread.

Rounds without grammars go on meanwhile, since the library does not hold the GIL. All methods are
called by one thread. Nothing compiled is evicted between the plan that admits a sequence and its
admission.

Copies of a matcher share its lexer. They wait for each other if several threads compute their
masks, so a grammar that many sequences use is compiled again, once for each of some threads. They
also fill the lexer together: its number of states is limited, and every text written by the grammar
adds some. A full one is replaced.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, InvalidRequest
from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.structured_output.compiler import TextTokens, compile_grammar, load_tokens
from engine.structured_output.masks import MaskCost

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

# Limits of the cache. The library does not report a grammar's memory, but it grows with the time to
# compile it (160 MB per second were measured).
MOST_KEPT = 128
MOST_KEPT_BYTES = 4 * 2**20  # total size of grammar texts
MOST_KEPT_SECONDS = 2.0  # total CPU time for compiling
# Grammars that requests may have requested at a time; with more, the last could evict the first
# before they are used.
MOST_PENDING = 8
# Grammars that take longer are compiled only once, because new grammars would wait. Lexers use up
# to 40 MB as they grow, so the number of additional ones is limited over all grammars.
SECONDS_AGAIN = 0.02
MOST_AGAIN = 14
END_SECONDS = 2.0  # wait at the process's end for the grammar being compiled


@dataclass(eq=False, slots=True)
class Original:
    """A compiled grammar, at the beginning of a text."""

    matcher: LLMatcher
    cost: MaskCost
    copies: int = 0  # number of copies ever made

    def copy(self) -> LLMatcher:
        """Return a new matcher for one text."""
        self.copies += 1
        return self.matcher.deep_copy()


@dataclass(slots=True)
class _Compiled:
    grammar: Grammar
    seconds: float
    cost: MaskCost
    error: EngineError | None = None
    # at least one, unless there is an error
    originals: list[Original] = field(default_factory=list)

    def add(self, again: _Compiled) -> None:
        """Add the results of compiling the same grammar once more."""
        for original in again.originals:
            original.cost = self.cost
        self.originals += again.originals
        self.seconds += again.seconds


class GrammarCache:
    """The compiled grammars of a model.

    `folder` holds the model's tokenizer.json, which is read with the first grammar, or by
    `prepare`. Without a folder every grammar is refused.
    """

    def __init__(self, folder: Path | None, vocab_size: int = 0) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokens: TextTokens | None = None
        self._kept: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._pending: dict[Grammar, None] = {}  # in the order in which they were requested
        self._again: set[Grammar] = set()  # being compiled again
        # None: end of the thread
        self._todo: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Compiled] = queue.SimpleQueue()
        self._collected: list[_Compiled] = []
        self._thread: threading.Thread | None = None
        self._ending = False

    @property
    def tokens(self) -> TextTokens:
        """The model's tokens; available once a grammar has been compiled."""
        assert self._tokens is not None
        return self._tokens

    @property
    def pending(self) -> bool:
        """Whether grammars are being compiled for the first time."""
        return bool(self._pending)

    @property
    def busy(self) -> bool:
        """Whether anything is being compiled, for the first time or again."""
        return bool(self._pending or self._again)

    def lacking(self, params: SamplingParams) -> Grammar | EngineError | None:
        """Return what keeps a request from running: a grammar or an error; None if nothing does.

        It is the request's grammar while that is being compiled, another one that comes before it,
        or the error of its grammar.
        """
        grammar = params.grammar
        if grammar is None:
            return None
        if len(self._pending) >= MOST_PENDING and grammar not in self._kept:
            return grammar if grammar in self._pending else next(iter(self._pending))
        found = self.ask(grammar)
        if isinstance(found, EngineError):
            return found
        return grammar if found is None else None

    def ask(self, grammar: Grammar) -> Original | EngineError | None:
        """Return the compiled grammar or its error; None while it is being compiled."""
        if self._folder is None:
            return InvalidRequest("this engine does not support grammars")
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            compiled = self._kept[grammar]
            return compiled.error or compiled.originals[0]
        if grammar not in self._pending:
            self.prepare()
            self._pending[grammar] = None
            self._todo.put(grammar)
        return None

    def originals(self, grammar: Grammar) -> list[Original]:
        """Return all compiled instances of a grammar; empty if there are none.

        Copies of different instances do not wait for each other.
        """
        compiled = self._kept.get(grammar)
        return [] if compiled is None else compiled.originals.copy()

    def cost(self, grammar: Grammar) -> MaskCost | None:
        """Return the mask cost of a compiled grammar; None if it is not compiled."""
        compiled = self._kept.get(grammar)
        return None if compiled is None else compiled.cost

    def compile_again(self, grammar: Grammar) -> None:
        """Compile one more instance of a grammar, if that takes little time."""
        compiled = self._kept.get(grammar)
        if compiled is None or compiled.error is not None or grammar in self._again:
            return
        if compiled.seconds <= SECONDS_AGAIN * len(compiled.originals) and self._has_room(grammar):
            self._again.add(grammar)
            self._todo.put(grammar)

    def _has_room(self, grammar: Grammar) -> bool:
        """Return whether one more instance may be compiled, evicting others if necessary.

        Those of the least recently used grammar are evicted, down to one.
        """
        again = [one for one in self._kept.values() if len(one.originals) > 1]
        if sum(len(one.originals) - 1 for one in again) < MOST_AGAIN:
            return True
        oldest = again[0]
        if oldest.grammar == grammar:
            return False
        oldest.seconds /= len(oldest.originals)
        del oldest.originals[1:]
        return True

    def replace(self, grammar: Grammar, full: Original, alone: bool) -> Original | None:
        """Replace an instance whose lexer is full, by another one or by compiling it again.

        With `alone` the new instance is used by nobody else. Returns None if it cannot be compiled
        any more.
        """
        kept = self._kept.get(grammar)
        if kept is not None and full in kept.originals:
            kept.seconds *= 1 - 1 / len(kept.originals)
            kept.originals.remove(full)
        if kept is not None and kept.originals and not alone:
            return kept.originals[0]
        log.info("the lexer of a grammar is full; compiling the grammar again")
        made = self._made(grammar, full.cost)
        if made.originals and not alone:
            self._kept[grammar] = made
        elif kept is not None and not (kept.originals or kept.error):
            del self._kept[grammar]
        return made.originals[0] if made.originals else None

    def prepare(self) -> None:
        """Start reading the tokenizer, so that the first grammar need not wait for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until something has been compiled."""
        with suppress(queue.Empty):
            self._collected.append(self._done.get(timeout=seconds))

    def collect(self) -> list[Grammar]:
        """Return the grammars that were compiled, or have failed, since the last call."""
        if not self.busy:
            return []
        with suppress(queue.Empty):
            while True:
                self._collected.append(self._done.get_nowait())
        collected, self._collected = self._collected, []
        new = []
        for one in collected:
            if one.grammar in self._pending:
                del self._pending[one.grammar]
                self._kept[one.grammar] = one
                new.append(one.grammar)
            else:
                self._add(one)
        while self._are_too_many():
            self._kept.popitem(last=False)
        return new

    def _add(self, again: _Compiled) -> None:
        """Add a new instance to its grammar, unless that was evicted meanwhile."""
        self._again.discard(again.grammar)
        kept = self._kept.get(again.grammar)
        if kept is not None and again.originals:
            kept.add(again)

    def _are_too_many(self) -> bool:
        """Return whether the cache exceeds its limits; the latest grammar always stays."""
        kept = self._kept.values()
        return len(kept) > 1 and (
            len(kept) > MOST_KEPT
            or sum(len(one.grammar.text) for one in kept) > MOST_KEPT_BYTES
            or sum(one.seconds for one in kept) > MOST_KEPT_SECONDS
        )

    def _compile_all(self) -> None:
        with suppress(BaseException):  # reported with each grammar
            self._load()
        while (grammar := self._todo.get()) is not None and not self._ending:
            self._done.put(self._made(grammar))

    def _end(self) -> None:
        """Stop the thread: Python crashes if it exits while the library runs on another thread."""
        assert self._thread is not None
        self._ending = True
        self._todo.put(None)
        self._thread.join(END_SECONDS)

    def _load(self) -> TextTokens:
        if self._tokens is None:
            assert self._folder is not None
            self._tokens = load_tokens(self._folder, self._vocab_size)
        return self._tokens

    def _made(self, grammar: Grammar, known: MaskCost | None = None) -> _Compiled:
        began, cost = time.thread_time(), known or MaskCost()
        compiled = _Compiled(grammar, 0.0, cost)
        try:
            matcher = compile_grammar(self._load(), grammar)
            compiled.originals.append(Original(matcher, cost))
        except EngineError as error:
            compiled.error = error
        except BaseException as error:  # panics of the library are not Exceptions
            log.exception("unexpected error while compiling a grammar")
            compiled.error = EngineError(f"the grammar could not be read: {type(error).__name__}")
        compiled.seconds = time.thread_time() - began
        if known is None and compiled.originals:
            matcher.compute_bitmask()  # a second time, which is like all later ones
            cost.seconds = time.thread_time() - began - compiled.seconds
        return compiled
