"""OutputText: turns the engine's updates of one request into text, and applies stop strings.

Each token becomes one `Piece`: its share of the text after both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, NamedTuple, cast

import msgspec

from engine.client.request_stream import Update
from engine.protocol.events import Finished
from engine.protocol.logprobs import PackedLogprobs, TokenLogprobs
from engine.protocol.requests import FinishReason
from service.text.detokenizer import Decoder
from service.text.stop import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer


class Piece(msgspec.Struct, gc=False):
    """The share of a text that one token adds.

    `token` is None for held-back text that is released at the text's end.
    """

    text: str
    offset: int  # characters of the text before this token
    count: int  # generated tokens up to this piece
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None  # on the last piece


class Whole(NamedTuple):
    """The pieces of a text that arrived as a whole, with log-probabilities, as columns.

    Most formats of log-probabilities are columns.
    """

    tokens: list[int]
    texts: list[str]
    offsets: list[int]
    reports: PackedLogprobs

    def pieces(self) -> list[Piece]:
        """Return the pieces one by one."""
        rows = zip(self.texts, self.offsets, self.tokens, self.reports.unpack(), strict=True)
        return [
            Piece(text, offset, count, token, logprobs)
            for count, (text, offset, token, logprobs) in enumerate(rows, 1)
        ]


@dataclass(frozen=True, slots=True)
class EndRule:
    """The end of a text that is found here and not by the engine (GenerationTask._runs_on)."""

    most: int  # tokens
    stop_ids: frozenset[int]  # tokens that end the text and are not part of it


def grouped(pieces: list[Piece], interval: int) -> list[list[Piece]]:
    """Split pieces into groups of up to `interval`, one group for each event of a stream."""
    return [pieces[i : i + interval] for i in range(0, len(pieces), interval)]


class _KeptPart:
    """Counts the tokens whose text no stop string can cut off any more."""

    __slots__ = ("_count", "_ends", "_fed", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._count = 0  # all tokens
        self._fed = 0  # characters that the stop strings have seen
        # For tokens that may still be cut off: the tokens and characters up to their end.
        self._ends: deque[tuple[int, int]] = deque()

    def add(self, characters: int, passed: int, *, whole: bool) -> None:
        """Add one token.

        Args:
            characters: The token's characters.
            passed: Characters of the whole text that are certain to stay.
            whole: Whether the text ends with a complete character after this token.
        """
        self._count += 1
        self._fed += characters
        if whole:
            self._ends.append((self._count, self._fed))
        while self._ends and self._ends[0][1] <= passed:
            self.tokens, _ = self._ends.popleft()


class OutputText:
    """The generated text of one prompt. Without a tokenizer all text is empty.

    Each update of the engine is passed once, in order, to one of the `take` methods.
    `finish_reason` is None until the text has ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: StopStrings | None = None,
        ends: frozenset[int] = frozenset(),
        *,
        before: Sequence[int] = (),
        begins: bool = True,
        keeps: bool = False,
        rule: EndRule | None = None,
    ) -> None:
        """Begin an empty text.

        Args:
            tokenizer: The model's tokenizer, or None.
            prompt: Token ids that the text continues.
            stop: Stop strings; the text ends before the first one that occurs.
            ends: Tokens that end the text here, although the engine treats them as any other. They
                count as generated, have no text, and set the finish_reason "stop". Used only if the
                engine generates a single token.
            before: The last tokens of the state that the prompt continues.
            begins: Whether the text begins with its first generated token if neither `before` nor
                the prompt has any text. Some tokenizers remove a space there.
            keeps: Whether a state is kept at the text's end; the last piece then waits for it.
            rule: The text's end, if it is found here: with `keeps` and `stop`, so that the state
                does not read beyond the text.
        """
        self._ends = ends
        self._ended = False  # whether one of `ends` came
        self._tokenizer = tokenizer
        self._context = [*before, *prompt] if before else prompt
        self._plain = tokenizer.plain_texts if tokenizer else None
        # Made only if it is needed: plain tokens need no decoder, and text after a plain token does
        # not depend on what is before it.
        self._decoder: Decoder | None = None
        clear = self._plain is not None and prompt and self._plain[prompt[-1]]
        if tokenizer is not None and not clear:
            self._decoder = tokenizer.decoder(after=self._context, begins=begins)
        self._stop = StopMatcher(stop) if stop else None
        self._decoded = 0  # characters
        # Counts the tokens that the kept state is to have read, if a stop string may cut some off.
        self._kept = _KeptPart() if keeps and stop else None
        self._rule = rule
        self._over: FinishReason | None = None  # set by the rule or a stop string
        self._awaits_state = False  # the text has ended, and its state is not kept yet
        self._keeps = keeps
        # If tokens have to be looked at one by one, only `take` can do so.
        in_part = bool(ends) or rule is not None or self._kept is not None
        if stop is not None and stop.marks:  # stop strings name special tokens
            in_part = True
        self._takes_plain = None if in_part else self._plain
        self.finished: Finished | None = None  # the engine's last event
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.scores: list[TokenLogprobs] = []  # of the prompt's tokens, if it is scored
        # Tokens that `take_plain` may take without a check; None or empty: it has to check.
        self._known: set[int] | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string or the rule has ended the text; the engine may still generate."""
        return self._over is not None

    def take(self, update: Update) -> list[Piece]:
        """Take an update and return its pieces, one for each token.

        Tokens after the text's end are dropped. The last piece has the finish_reason.
        """
        self._known = None
        self.scores += update.scores
        self.finished = update.finished or self.finished
        if self._awaits_state:
            return self._end_kept(update)
        if self.finish_reason is not None:
            return []
        pieces = self._take_clear(update)
        if pieces is None:
            pieces = self._take_each(update)
        if self._over is not None and self._keeps and update.finished is None:
            self._awaits_state = True
        elif self._cut:
            self.finish_reason = pieces[-1].finish_reason = "stop"
        elif update.finished is not None:
            last = pieces[-1] if pieces else Piece("", self._decoded, self.completion_tokens)
            last.text += self._end()
            if not pieces:
                pieces.append(last)
            reason = "stop" if self._ended else self._over or update.finished.reason
            self.finish_reason = last.finish_reason = reason
        return pieces

    def _take_clear(self, update: Update) -> list[Piece] | None:
        """Return the pieces if all tokens are plain and nothing can end the text; else None.

        With None, nothing was taken.
        """
        plain = self._takes_plain
        if plain is None or self._stop is not None or self._holds:
            return None
        pieces: list[Piece] = []
        count, decoded = self.completion_tokens, self._decoded
        logprobs = update.logprobs or repeat(None)
        for token, of_token in zip(update.tokens, logprobs, strict=False):
            text = plain[token]
            if text is None:
                return None
            count += 1
            pieces.append(Piece(text, decoded, count, token, of_token))
            decoded += len(text)
        self.completion_tokens, self._decoded = count, decoded
        return pieces

    def _take_each(self, update: Update) -> list[Piece]:
        """Return the pieces, token by token, up to the text's end."""
        pieces: list[Piece] = []
        for i, token in enumerate(update.tokens):
            if self._rule is not None and token in self._rule.stop_ids:
                self._over = "stop"
                break
            logprobs = update.logprobs[i] if update.logprobs else None
            self._ended = token in self._ends
            text, late = ("", 0) if self._ended else self._text_of_one(token)
            self.completion_tokens += 1
            piece = Piece(text, self._decoded + late, self.completion_tokens, token, logprobs)
            self._decoded += len(text)
            pieces.append(piece)
            if self._stop is not None:
                piece.text = self._pass_on(token, text)
                if self._stop.stopped:
                    self._over = "stop"
                    break
            if self._rule is not None and self.completion_tokens == self._rule.most:
                self._over = "length"
                break
        return pieces

    def _pass_on(self, token: int, text: str) -> str:
        """Pass a token's text through the stop strings; return the text that is certain to stay."""
        assert self._stop is not None
        if self._stop.strings.marks:
            text += self._stop.strings.marks.get(token, "")
        passed = self._stop.feed(text)
        if self._kept is not None:
            self._kept.add(len(text), self._stop.passed, whole=not self._holds)
        return passed

    @property
    def _cut(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop is not None and self._stop.stopped

    def take_whole(self, update: Update) -> Whole | None:
        """Take an update that is a whole text with log-probabilities; return it as columns.

        Returns None and takes nothing if the update is not a whole text, or if its end is not found
        by the engine alone: then use `take`.
        """
        plain, finished, tokens = self._takes_plain, update.finished, update.tokens
        if plain is None or finished is None or finished.reports is None or not tokens:
            return None
        if self._stop is not None or self.finished is not None or self.completion_tokens:
            return None
        self.scores += update.scores
        self.finished, self.finish_reason = finished, finished.reason
        self.completion_tokens = len(tokens)
        texts: list[str] | None = None
        late: list[int] = []
        if not self._holds:
            known = [plain[token] for token in tokens]
            texts = None if None in known else cast(list[str], known)
        if texts is None:
            pairs = [self._text_of_one(token) for token in tokens]
            texts, late = [text for text, _ in pairs], [late for _, late in pairs]
        offsets = list(accumulate(map(len, texts), initial=0))
        self._decoded = offsets.pop()
        if any(late):
            offsets = [offset + some for offset, some in zip(offsets, late, strict=True)]
        texts[-1] += self._end()
        return Whole(tokens, texts, offsets, finished.reports)

    def take_plain(self, tokens: Sequence[int]) -> bool:
        """Take tokens if all of them are plain, and return whether they were taken.

        Plain: no token holds a part of a character, and none can belong to a stop string. For
        requests without log-probabilities, whose pieces are only the tokens' texts.
        """
        known = self._known or self._find_known()
        if known is None or not (known.issuperset(tokens) or self._are_plain(tokens)):
            return False
        # `_decoded` is used by log-probabilities only, so it is not updated.
        self.completion_tokens += len(tokens)
        return True

    def _find_known(self) -> set[int] | None:
        """Return `_known`, which may be empty, or None if `take_plain` may take nothing.

        It may not if text is held back, the text has ended or tokens are counted one by one.
        """
        plain, stop = self._takes_plain, self._stop
        if plain is not None and self.finish_reason is None and not self._holds:
            if stop is None:
                self._known = plain.known
            elif not (stop.holds or stop.stopped):
                self._known = stop.strings.known_clear(plain)
        return self._known

    def _are_plain(self, tokens: Sequence[int]) -> bool:
        """Check the texts of tokens; plain ones are added to `_known`, up to a limit."""
        plain, stop = self._plain, self._stop
        assert plain is not None
        return plain.has_all(tokens) if stop is None else stop.strings.all_clear(tokens, plain)

    def take_text(self, update: Update) -> tuple[str, list[int]]:
        """Take an update and return the text and the token ids that it adds, without pieces."""
        if self._stop is not None or self._ends or self.finish_reason is not None:
            pieces = self.take(update)
            tokens = [piece.token for piece in pieces if piece.token is not None]
            return "".join([piece.text for piece in pieces]), tokens
        self._known = None
        self.scores += update.scores
        self.finished = update.finished or self.finished
        text = self._text_of(update.tokens)
        self.completion_tokens += len(update.tokens)
        if update.finished is not None:
            text += self._end()
            self.finish_reason = update.finished.reason
        self._decoded += len(text)
        return text, update.tokens

    @property
    def _holds(self) -> bool:
        """Whether an incomplete character is held back."""
        return self._decoder is not None and self._decoder.holds

    def _text_of_one(self, token: int) -> tuple[str, int]:
        """Return the text that a token adds, and the characters in it of earlier tokens."""
        held = self._holds
        text = self._text_of((token,))
        return text, self._decoder.late if held and self._decoder is not None else 0

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens add."""
        if self._tokenizer is None:
            return ""
        if self._plain is not None and not self._holds:
            text = self._plain.joined(tokens)
            if text is not None:
                return text
        if self._decoder is None:
            self._decoder = self._tokenizer.decoder()
        return self._decoder.feed(tokens[0]) if len(tokens) == 1 else self._decoder.feed_all(tokens)

    def _end_kept(self, update: Update) -> list[Piece]:
        """Return the last piece of a text that has ended, once its state is kept; before: none."""
        if update.finished is None:
            return []
        reason: FinishReason | None = "stop" if self._ended else self._over
        self._awaits_state, self.finish_reason = False, reason
        text = "" if self._cut else self._end()
        return [Piece(text, self._decoded, self.completion_tokens, finish_reason=reason)]

    def kept_tokens(self) -> int | None:
        """Return how many generated tokens the kept state is to have read, once the text has ended.

        These are the tokens that end before the stop string, or all. None if no state is kept or
        there are no stop strings.
        """
        if self._kept is None:
            return None
        return self._kept.tokens if self._cut else self.completion_tokens

    def _end(self) -> str:
        tail = "" if self._decoder is None else self._decoder.flush()
        if self._stop is None:
            return tail
        return self._stop.feed(tail) + self._stop.flush()

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were prefix cache hits; None until the engine request has ended."""
        return None if self.finished is None else self.finished.cached_tokens

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object of this text alone."""
        return usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
) -> dict[str, Any]:
    """Return OpenAI's `usage` object for these numbers of tokens."""
    told: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return told


def total_usage(outputs: Sequence[OutputText], draws: int = 1) -> dict[str, Any]:
    """Return the `usage` object of `draws` samples of each prompt.

    A prompt counts once, with the cache hits of its first sample.
    """
    firsts = outputs[::draws]
    return usage(
        sum(output.prompt_tokens for output in firsts),
        sum(output.completion_tokens for output in outputs),
        sum(output.cached_tokens or 0 for output in firsts),
    )
