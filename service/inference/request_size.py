"""How large one request and its answer may be: sums over its prompts, each sample and continuation
counted.

The engine keeps the prompt of each of them until it has been read, whatever they share; the answer
is kept whole until it is sent, where it is not streamed, and log-probabilities are its bulk.
"""

from __future__ import annotations

from service.http.errors import invalid
from service.settings import Settings


class RequestSize:
    """Adds up while a request is read; `param` is the field that errors name."""

    def __init__(self, param: str, settings: Settings) -> None:
        self._param = param
        self._most_tokens = settings.max_prompt_tokens
        self._tokens = 0
        self._most_reports = settings.max_reports
        self._reports = 0

    def add_prompt(self, tokens: int, times: int = 1) -> None:
        """A prompt that is asked for `times` times. Raises ApiError 400 beyond the limit."""
        self._tokens += tokens * times
        if self._tokens > self._most_tokens:
            raise invalid(
                self._param,
                f"more than {self._most_tokens} prompt tokens in one request (those of every "
                "sample and continuation count); send fewer at a time",
            )

    def add_reports(self, tokens: int, top: int = 0, times: int = 1) -> None:
        """Log-probabilities of so many tokens, each with the `top` best beside it, in `times`
        answers that are kept whole. Raises ApiError 400 beyond the limit."""
        self._reports += tokens * (1 + top) * times
        if self._reports > self._most_reports:
            raise invalid(
                self._param,
                f"the answer could hold {self._reports} log-probabilities, but at most "
                f"{self._most_reports} are allowed in one; ask for fewer prompts, tokens or "
                "alternatives at a time",
            )
