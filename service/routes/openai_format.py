"""What answers of OpenAI's two endpoints share: head, events, the usage at the end."""

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
    """One answer. `kind` is the `object` that it and its events are; `draws` how many choices each
    prompt has."""

    def __init__(
        self,
        body: OpenAIRequest,
        runtime: Runtime,
        tasks: list[GenerationTask],
        answer_id: str,
        kind: str,
        draws: int,
    ) -> None:
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
        """The usage chunk, where it is asked for."""
        if not self._options.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": total_usage(outputs, self._draws)})

    def template(self, index: int) -> Template | None:
        """Of a choice's events to come, where only the text in them is new."""
        if self._parts is None or self._ids or self._options.continuous_usage_stats:
            return None
        if not self._is_plain(index):
            return None
        return Template(self._event(self._plain_choice(index, HOLE)), self._parts)

    @abstractmethod
    def _is_plain(self, index: int) -> bool:
        """Whether a choice's next event is one like all that follow."""

    @abstractmethod
    def _plain_choice(self, index: int, text: str) -> dict[str, Any]:
        """A choice in an event that tells of nothing but text."""

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        content = {**self._head, "choices": [choice]}
        return {**content, "usage": None} if self._options.include_usage else content
