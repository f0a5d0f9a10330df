"""Answer: one request's text as it grows, from engine updates.

Each token becomes one `Piece`: its share of the text, after decoding, after stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from engine.client import Update
from engine.messages import FinishReason, TokenLogprobs
from service.stop import StopMatcher, StopStrings
from service.tokenizer import Tokenizer

# Stands for the logarithm of zero, which JSON cannot hold.
LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class Piece:
    """What one token adds to an answer; `token` is None for text without one (held-back text
    whose end has come)."""

    text: str
    offset: int  # characters of the text before this token
    count: int  # tokens of the answer up to this piece
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None  # on the last piece


def grouped(pieces: list[Piece], interval: int) -> list[list[Piece]]:
    """Pieces by the event of a stream that tells them: up to `interval` in one."""
    return [pieces[i : i + interval] for i in range(0, len(pieces), interval)]


class Answer:
    """What has been generated for one prompt. Without a tokenizer all text is empty."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: StopStrings | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """`ends`: tokens that end the text although the engine takes them for others. They belong
        to the answer, have no text, and make its finish_reason "stop"; they come last, for the
        engine is asked for one token only."""
        self._ends = ends
        self._ended = False  # by one of them
        self._decoder = tokenizer.decoder(after=prompt) if tokenizer else None
        self._plain = tokenizer.plain_texts if tokenizer else None
        self._stop = StopMatcher(stop) if stop else None
        self._decoded = 0  # characters
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.scores: list[TokenLogprobs] = []  # of the prompt's tokens, where asked for

    @property
    def stopped(self) -> bool:
        """A stop string has ended the answer; the engine may not know it yet."""
        return self._stop is not None and self._stop.stopped

    def take(self, update: Update) -> list[Piece]:
        """The pieces of an update. What comes after the answer's end is dropped."""
        self.scores += update.scores
        if self.finish_reason is not None:
            return []
        pieces: list[Piece] = []
        for i, token in enumerate(update.tokens):
            logprobs = update.logprobs[i] if update.logprobs else None
            self._ended = token in self._ends
            text = self._decoder.feed(token) if self._decoder and not self._ended else ""
            self.completion_tokens += 1
            piece = Piece(text, self._decoded, self.completion_tokens, token, logprobs)
            self._decoded += len(text)
            pieces.append(piece)
            if self._stop is not None:
                piece.text = self._stop.feed(text)
                if self._stop.stopped:
                    self.finish_reason = piece.finish_reason = "stop"
                    return pieces
        if update.finished is not None:
            last = pieces[-1] if pieces else Piece("", self._decoded, self.completion_tokens)
            last.text += self._end()
            if not pieces:
                pieces.append(last)
            ended = self.stopped or self._ended
            reason: FinishReason = "stop" if ended else update.finished.reason
            self.finish_reason = last.finish_reason = reason
        return pieces

    def take_plain(self, tokens: Sequence[int]) -> bool:
        """Takes tokens whose texts are whole in themselves: none holds a part of a character, none
        can belong to a stop string. Else takes nothing and returns False. For requests without
        log-probabilities, whose pieces are all that such a token's text is."""
        plain, decoder = self._plain, self._decoder
        if plain is None or decoder is None or self._ends or self.finish_reason is not None:
            return False
        if decoder.holds:
            return False
        stop = self._stop
        if not (plain.has_all(tokens) if stop is None else stop.passes(tokens, plain)):
            return False
        # `_decoded`, which is there for log-probabilities, stays as it is.
        self.completion_tokens += len(tokens)
        return True

    def take_text(self, update: Update) -> tuple[str, list[int]]:
        """As `take`, where nobody asks for pieces: the text and the tokens that an update adds."""
        if self._stop is not None or self._ends or self.finish_reason is not None:
            pieces = self.take(update)
            tokens = [piece.token for piece in pieces if piece.token is not None]
            return "".join([piece.text for piece in pieces]), tokens
        self.scores += update.scores
        text = self._decoder.feed_all(update.tokens) if self._decoder else ""
        self.completion_tokens += len(update.tokens)
        if update.finished is not None:
            text += self._end()
            self.finish_reason = update.finished.reason
        self._decoded += len(text)
        return text, update.tokens

    def _end(self) -> str:
        tail = self._decoder.flush() if self._decoder else ""
        if self._stop is None:
            return tail
        return self._stop.feed(tail) + self._stop.flush()

    def usage(self) -> dict[str, int]:
        """Tokens read and written."""
        return usage(self.prompt_tokens, self.completion_tokens)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def total_usage(answers: Sequence[Answer], draws: int) -> dict[str, int]:
    """The `usage` object of `draws` samples of each prompt; a prompt counts once."""
    return usage(
        sum(answer.prompt_tokens for answer in answers[::draws]),
        sum(answer.completion_tokens for answer in answers),
    )


class LogprobArrays:
    """The `logprobs` object: parallel arrays over tokens, as OpenAI's completions have them.

    `top_logprobs` holds the k best and, where it is not among them, the token itself; of two tokens
    of the same name the more likely one stands.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token: int, offset: int, logprobs: TokenLogprobs | None) -> None:
        """One token; `logprobs` is None for the first token of a text."""
        name = self._name(token)
        self.tokens.append(name)
        self.text_offset.append(offset)
        if logprobs is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        own = max(logprobs.logprob, LEAST_LOGPROB)
        top: dict[str, float] = {}
        for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            top.setdefault(self._name(other), max(value, LEAST_LOGPROB))
        top.setdefault(name, own)
        self.token_logprobs.append(own)
        self.top_logprobs.append(top)

    def add_prompt(self, prompt: Sequence[int], scores: Sequence[TokenLogprobs]) -> None:
        """A whole prompt, which is where the text begins; `scores` are of the tokens after its
        first (fewer where a timeout came first)."""
        decoder = self._tokenizer.decoder() if self._tokenizer else None
        offset = 0
        for token, logprobs in zip_longest(prompt, [None, *scores]):
            self.add(token, offset, logprobs)
            offset += len(decoder.feed(token)) if decoder else 0

    def add_pieces(self, pieces: Sequence[Piece], shift: int = 0) -> None:
        """Pieces of an answer whose text begins `shift` characters after the start."""
        for piece in pieces:
            if piece.token is not None:
                self.add(piece.token, piece.offset + shift, piece.logprobs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def _name(self, token: int) -> str:
        return self._tokenizer.name(token) if self._tokenizer else f"token_id:{token}"
