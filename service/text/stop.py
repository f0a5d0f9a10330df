"""Stop strings: a text ends before the first of them, wherever tokens cut it.

One Knuth-Morris-Pratt automaton per stop string reads character by character, so that the outcome
depends on the text alone and each character costs the same, whatever the stop strings are.

A stop string may name a special token, which has no text: where it does, the token is one character
of its own kind (a surrogate, which no text holds) to the automata, and none to the reader.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence

MOST_KNOWN = 1024  # tokens that stop strings keep in mind
_SURROGATES = range(0xD800, 0xE000)
_UNSEEN = dict.fromkeys(_SURROGATES)


class StopStrings:
    """Stop strings with their tables: built once, read by the matcher of every text."""

    def __init__(self, stops: Sequence[str], special_ids: Mapping[str, int] | None = None) -> None:
        """`stops` are not empty strings; `special_ids` are the model's special tokens by name."""
        named = [name for name in special_ids or () if any(name in stop for stop in stops)]
        # Of the special tokens that stop strings name: the character that stands for each.
        self.marks: dict[int, str] = {}
        all_stops = set(stops)
        if special_ids and named:
            named = sorted(named, key=len, reverse=True)[: len(_SURROGATES)]
            characters = dict(zip(named, map(chr, _SURROGATES), strict=False))
            self.marks = {special_ids[name]: mark for name, mark in characters.items()}
            pattern = re.compile("|".join(map(re.escape, named)))
            # The name may also be spelled out by tokens that have a text.
            all_stops |= {pattern.sub(lambda found: characters[found[0]], stop) for stop in stops}
        self.stops = sorted(all_stops, key=lambda stop: (-len(stop), stop))
        self.failures = [_failure_function(stop) for stop in self.stops]
        self._firsts = frozenset(stop[0] for stop in self.stops)
        self._clear: set[int] = set()
        self._texts: Mapping[int, str | None] | None = None

    def known_clear(self, texts: Mapping[int, str | None]) -> set[int]:
        """Tokens that are known to be clear (`all_clear`): a set that may grow, of these texts
        alone."""
        if self._texts is not texts:
            self._texts, self._clear = texts, set()
        return self._clear

    def all_clear(self, tokens: Sequence[int], texts: Mapping[int, str | None]) -> bool:
        """No token's text, which `texts` gives, is None or holds a character with which a stop
        string begins."""
        clear = self.known_clear(texts)
        for token in tokens:
            text = texts[token]
            if text is None or not self._firsts.isdisjoint(text):
                return False
            if len(clear) < MOST_KNOWN:
                clear.add(token)
        return True


class StopMatcher:
    """Passes text on up to the first stop string, and holds back the longest suffix that could
    begin one. The first stop string to be complete wins; of two that end together, the longer."""

    __slots__ = ("_failures", "_held", "_matched", "_stops", "passed", "stopped", "strings")

    def __init__(self, strings: StopStrings) -> None:
        self._stops = strings.stops
        self.strings = strings
        self._failures = strings.failures
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        self._held = ""
        self.passed = 0  # characters that are known to stay, those of special tokens too
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is now known to stay; nothing after a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            complete = self._advance(text[position])
            if complete:
                self.stopped = True
                self._held = ""
                return self._pass_on(text[: position + 1 - complete])
        kept = len(text) - max(self._matched, default=0)
        self._held = text[kept:]
        return self._pass_on(text[:kept])

    @property
    def holds(self) -> bool:
        """Text is held back: a stop string may have begun."""
        return bool(self._held)

    def flush(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return self._pass_on(held)

    def _pass_on(self, text: str) -> str:
        self.passed += len(text)
        return text.translate(_UNSEEN) if self.strings.marks else text

    def _advance(self, character: str) -> int:
        """Reads one character; the length of the stop string that it completes, else 0."""
        for which, stop in enumerate(self._stops):
            matched, failure = self._matched[which], self._failures[which]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                return matched
            self._matched[which] = matched
        return 0


def _failure_function(word: str) -> array[int]:
    """For each prefix, the length of its longest proper suffix that is also its prefix."""
    failure = array("i", bytes(4 * len(word)))
    length = 0
    for position in range(1, len(word)):
        while length and word[position] != word[length]:
            length = failure[length - 1]
        if word[position] == word[length]:
            length += 1
        failure[position] = length
    return failure
