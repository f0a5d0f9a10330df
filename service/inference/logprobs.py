"""LogprobArrays: log-probabilities in the format of OpenAI's completions API."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any

from engine.protocol.logprobs import TokenLogprobs
from service.inference.output_text import Piece, Whole
from service.text.tokenizer import Tokenizer

# Replaces the logarithm of zero, which JSON cannot hold.
LEAST_LOGPROB = -9999.0


class LogprobArrays:
    """The `logprobs` object of OpenAI's completions: parallel arrays with an entry for each token.

    `top_logprobs` holds the k most likely tokens, and the token itself if it is not among them. Of
    two tokens with the same name, the more likely one is kept.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names = _Numbers() if tokenizer is None else tokenizer.names
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token: int, offset: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token that begins `offset` characters into the text.

        `logprobs`: None for the first token of a text.
        """
        name = self._names[token]
        self.tokens.append(name)
        self.text_offset.append(offset)
        if logprobs is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        own, ids, values = logprobs.logprob, logprobs.top_ids, logprobs.top_logprobs
        if own < LEAST_LOGPROB:
            own = LEAST_LOGPROB
        top: dict[str, float] = {}
        if ids:
            top = dict(zip(map(self._names.__getitem__, ids), values, strict=True))
            if len(top) < len(ids) or values[-1] < LEAST_LOGPROB:
                top = self._by_name(ids, values)
        if name not in top:
            top[name] = own
        self.token_logprobs.append(own)
        self.top_logprobs.append(top)

    def _by_name(self, ids: list[int], values: list[float]) -> dict[str, float]:
        top: dict[str, float] = {}
        for id, value in zip(ids, values, strict=True):
            top.setdefault(self._names[id], max(value, LEAST_LOGPROB))
        return top

    def add_prompt(
        self,
        prompt: Sequence[int],
        scores: Sequence[TokenLogprobs],
        first_scored: int = 1,
        *,
        begins: bool = True,
    ) -> None:
        """Add a whole prompt, before anything else.

        Args:
            prompt: Its token ids.
            scores: Log-probabilities of its tokens from index `first_scored` on; fewer after a
                timeout.
            first_scored: Index of the first token with a log-probability.
            begins: Whether the prompt is the beginning of a text, not the continuation of one.
        """
        decoder = self._tokenizer.decoder(begins=begins) if self._tokenizer else None
        offset = 0
        for token, logprobs in zip_longest(prompt, [*[None] * first_scored, *scores]):
            text = decoder.feed(token) if decoder else ""
            self.add(token, offset + (decoder.late if decoder else 0), logprobs)
            offset += len(text)

    def add_told(self, told: Whole | Sequence[Piece], shift: int = 0) -> None:
        """Add an answer's pieces; its text begins `shift` characters after the start."""
        if isinstance(told, Whole):
            self._add_whole(told, shift)
            return
        for piece in told:
            if piece.token is not None:
                self.add(piece.token, piece.offset + shift, piece.logprobs)

    def _add_whole(self, whole: Whole, shift: int) -> None:
        """Add a whole answer at once, faster than piece by piece."""
        names, top = self._names, whole.reports.top
        tokens = list(map(names.__getitem__, whole.tokens))
        chosen, _, ids, values = whole.reports.columns()
        if min(chosen, default=0.0) < LEAST_LOGPROB:
            chosen = [max(own, LEAST_LOGPROB) for own in chosen]
        self.tokens += tokens
        self.token_logprobs += chosen
        self.text_offset += [offset + shift for offset in whole.offsets] if shift else whole.offsets
        if not top:
            pairs = zip(tokens, chosen, strict=True)
            self.top_logprobs += [{name: own} for name, own in pairs]
            return
        best = zip(map(names.__getitem__, ids), values, strict=True)
        least = values[top - 1 :: top]
        for i, (name, own, last) in enumerate(zip(tokens, chosen, least, strict=True)):
            told = dict(islice(best, top))
            if len(told) < top or last < LEAST_LOGPROB:
                mine = slice(i * top, (i + 1) * top)
                told = self._by_name(ids[mine], values[mine])
            if name not in told:
                told[name] = own
            self.top_logprobs.append(told)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


class _Numbers(dict[int, str]):
    """Names of tokens for a model without a tokenizer: `token_id:17`."""

    def __missing__(self, token: int) -> str:
        return f"token_id:{token}"
