"""RequestSize: limits the size of one request and of its answer, summed over all its prompts.

Each sample and continuation counts. The engine keeps the prompt of each of them until it has been
read, even if they share prefixes. An answer that is not streamed is kept in memory as a whole, and
log-probabilities are most of it.
"""

from __future__ import annotations

from service.http.errors import invalid
from service.settings import Settings


class RequestSize:
    """Sums up the size of a request while its prompts are read; errors name the field `param`."""

    def __init__(self, param: str, settings: Settings) -> None:
        self._param = param
        self._most_tokens = settings.max_prompt_tokens
        self._tokens = 0
        self._most_reports = settings.max_reports
        self._reports = 0

    def add_prompt(self, tokens: int, times: int = 1) -> None:
        """Add a prompt with `times` samples. Raises ApiError 400 beyond max_prompt_tokens."""
        self._tokens += tokens * times
        if self._tokens > self._most_tokens:
            raise invalid(
                self._param,
                f"more than {self._most_tokens} prompt tokens in one request (a prompt counts for "
                "each of its samples and continuations); send fewer at a time",
            )

    def add_reports(self, tokens: int, top: int = 0, times: int = 1) -> None:
        """Add log-probabilities to an answer that is not streamed.

        Args:
            tokens: Tokens with log-probabilities.
            top: Alternatives of each token.
            times: Samples of this size.

        Raises ApiError 400 beyond max_reports.
        """
        self._reports += tokens * (1 + top) * times
        if self._reports > self._most_reports:
            raise invalid(
                self._param,
                f"the answer could hold {self._reports} log-probabilities, but at most "
                f"{self._most_reports} are allowed in one answer; ask for fewer prompts, tokens or "
                "alternatives at a time",
            )
