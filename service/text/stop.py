"""Stop strings: end a text before the first of them, independent of token boundaries.

One Knuth-Morris-Pratt automaton per stop string reads the text character by character. So the
result depends on the text alone, and each character costs the same whatever the stop strings are.

A stop string may name a special token, which has no text. Then the automata see the token as one
special character (a surrogate, which no text holds), and the client does not see it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence

MOST_KNOWN = 1024  # tokens known to be clear that are cached
_SURROGATES = range(0xD800, 0xE000)
_UNSEEN = dict.fromkeys(_SURROGATES)


class StopStrings:
    """Stop strings with their automata's tables, shared by the matchers of many texts."""

    def __init__(self, stops: Sequence[str], special_ids: Mapping[str, int] | None = None) -> None:
        """`stops`: non-empty strings. `special_ids`: the model's special tokens by name."""
        named = [name for name in special_ids or () if any(name in stop for stop in stops)]
        # The character that represents each special token that is named in a stop string.
        self.marks: dict[int, str] = {}
        all_stops = set(stops)
        if special_ids and named:
            named = sorted(named, key=len, reverse=True)[: len(_SURROGATES)]
            characters = dict(zip(named, map(chr, _SURROGATES), strict=False))
            self.marks = {special_ids[name]: mark for name, mark in characters.items()}
            pattern = re.compile("|".join(map(re.escape, named)))
            # The name itself remains a stop string, as other tokens may spell it out.
            all_stops |= {pattern.sub(lambda found: characters[found[0]], stop) for stop in stops}
        self.stops = sorted(all_stops, key=lambda stop: (-len(stop), stop))
        self.failures = [_failure_function(stop) for stop in self.stops]
        self._firsts = frozenset(stop[0] for stop in self.stops)
        self._clear: set[int] = set()
        self._texts: Mapping[int, str | None] | None = None

    def known_clear(self, texts: Mapping[int, str | None]) -> set[int]:
        """Return the cached set of clear tokens (see `all_clear`) for these token texts."""
        if self._texts is not texts:
            self._texts, self._clear = texts, set()
        return self._clear

    def all_clear(self, tokens: Sequence[int], texts: Mapping[int, str | None]) -> bool:
        """Whether all tokens are clear: no stop string can begin within their texts.

        `texts`: each token's text; None for a token that holds a part of a character, which is not
        clear.
        """
        clear = self.known_clear(texts)
        for token in tokens:
            text = texts[token]
            if text is None or not self._firsts.isdisjoint(text):
                return False
            if len(clear) < MOST_KNOWN:
                clear.add(token)
        return True


class StopMatcher:
    """Passes a text on up to the first stop string.

    It holds back the longest suffix that could begin a stop string. The stop string that is
    complete first counts; if two end at the same character, the longer one.
    """

    __slots__ = ("_failures", "_held", "_matched", "_stops", "passed", "stopped", "strings")

    def __init__(self, strings: StopStrings) -> None:
        self._stops = strings.stops
        self.strings = strings
        self._failures = strings.failures
        self._matched = [0] * len(self._stops)  # matched characters of each stop string
        self._held = ""
        self.passed = 0  # characters that are certain to stay, including those of special tokens
        self.stopped = False

    def feed(self, text: str) -> str:
        """Take text and return what is now certain to stay; nothing after a stop string."""
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
        """Whether text is held back, because it may be the beginning of a stop string."""
        return bool(self._held)

    def flush(self) -> str:
        """End the text and return what was held back."""
        held, self._held = self._held, ""
        return self._pass_on(held)

    def _pass_on(self, text: str) -> str:
        self.passed += len(text)
        return text.translate(_UNSEEN) if self.strings.marks else text

    def _advance(self, character: str) -> int:
        """Read one character; return the length of the stop string that it completes, else 0."""
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
    """Return for each prefix the length of its longest proper suffix that is also a prefix."""
    failure = array("i", bytes(4 * len(word)))
    length = 0
    for position in range(1, len(word)):
        while length and word[position] != word[length]:
            length = failure[length - 1]
        if word[position] == word[length]:
            length += 1
        failure[position] = length
    return failure
