"""How large one request may be: the sum over its prompts, each sample and continuation counted.

The engine keeps the prompt of each of them until it has been read, whatever they share.
"""

from __future__ import annotations

from service.errors import invalid
from service.settings import Settings


class RequestSize:
    """Adds up while a request is read; `param` is the field that errors name."""

    def __init__(self, param: str, settings: Settings) -> None:
        self._param = param
        self._most_tokens = settings.max_prompt_tokens
        self._tokens = 0

    def add_prompt(self, tokens: int, times: int = 1) -> None:
        """A prompt that is asked for `times` times. Raises ApiError 400 beyond the limit."""
        self._tokens += tokens * times
        if self._tokens > self._most_tokens:
            raise invalid(
                self._param,
                f"more than {self._most_tokens} prompt tokens in one request (those of every "
                "sample and continuation count); send fewer at a time",
            )
