"""Base of the renderers of OpenAI's two endpoints: common fields, events, the last usage chunk."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from service.http.json_response import event
from service.inference.event_template import HOLE, Template
from service.inference.generation import GenerationTask
from service.inference.output_text import OutputText, total_usage
from service.inference.runtime import Runtime
from service.schemas.common import StreamOptions
from service.schemas.openai import OpenAIRequest


class OpenAIView(ABC):
    """Renders one answer, streamed or not, in OpenAI's format."""

    def __init__(
        self,
        body: OpenAIRequest,
        runtime: Runtime,
        tasks: list[GenerationTask],
        answer_id: str,
        kind: str,
        draws: int,
    ) -> None:
        """Prepare an answer.

        Args:
            tasks: One for each choice.
            answer_id: The `id` of the answer and of its events.
            kind: The `object` of the answer and of its events.
            draws: Choices of each prompt.
        """
        self._options = body.stream_options or StreamOptions()
        self._ids = bool(body.return_token_ids)
        self._tokenizer = runtime.tokenizer
        self._tasks = tasks
        self._draws = draws
        self._head = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": runtime.model_name,
        }
        self._begun: set[int] = set()  # choices that have had their first event
        self._parts = None if runtime.parts is None else runtime.parts.texts

    def last(self, outputs: list[OutputText]) -> bytes:
        """Return the usage chunk at a stream's end, or b"" if the client did not ask for it."""
        if not self._options.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": total_usage(outputs, self._draws)})

    def template(self, index: int) -> Template | None:
        """Return a template of a choice's further events; None if they differ beyond their text."""
        if self._parts is None or self._ids or self._options.continuous_usage_stats:
            return None
        if not self._is_plain(index):
            return None
        return Template(self._event(self._plain_choice(index, HOLE)), self._parts)

    @abstractmethod
    def _is_plain(self, index: int) -> bool:
        """Whether a choice's next event has the same form as all that follow."""

    @abstractmethod
    def _plain_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return the choice of an event that holds nothing but text."""

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        content = {**self._head, "choices": [choice]}
        return {**content, "usage": None} if self._options.include_usage else content
