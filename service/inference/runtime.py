"""Runtime: one loaded model with its engines, tokenizer, chat template and starts.

A request keeps the runtime that it began with, even if a reload replaces it meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fastapi import Request

from engine.client.interface import EngineBackend
from engine.protocol.events import ModelInfo
from service.http.scope import RUNTIME
from service.inference.admission_control import AdmissionControl
from service.inference.event_template import TokenParts
from service.inference.inference_request import InferenceRequest, RequestsInFlight
from service.inference.inputs.session_header import SessionHeader
from service.observability.metrics import Metrics
from service.settings import Settings
from service.text.chat_template import ChatTemplate, load_text
from service.text.starts import Start, load_starts
from service.text.tokenizer import Tokenizer


class Runtime:
    """One loaded model and what its requests share; made by `load`."""

    def __init__(
        self,
        backend: EngineBackend,
        settings: Settings,
        metrics: Metrics,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate,
        parts: TokenParts | None,
        starts: tuple[Start, ...],
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.info = info
        self.tokenizer = tokenizer
        self.chat = chat
        self.parts = parts  # the tokens' parts of stream events, for event templates
        self.starts = starts
        self.model_name = settings.model_name or info.name  # the name in requests and answers
        self.loaded_at = int(time.time())  # seconds since 1970
        self.session_header = SessionHeader.of(settings)
        self.requests = RequestsInFlight()
        self.admission = AdmissionControl(
            backend, settings.max_waiting, settings.max_waiting_tokens, settings.engines
        )
        self._metrics = metrics

    @classmethod
    async def load(
        cls,
        backend: EngineBackend,
        settings: Settings,
        metrics: Metrics,
        before: Runtime | None = None,
    ) -> Runtime:
        """Wait for the engines and load the tokenizer, chat template and starts of their model.

        If the runtime `before` shares an engine, its tokenizer, template and starts are used again.
        Raises what `EngineBackend.ready` raises, and CheckpointError for a tokenizer that cannot be
        used.
        """
        info = await backend.ready()
        if before is None or not before.shares(backend):
            tokenizer, chat = await load_text(info)
            starts = await asyncio.to_thread(load_starts, Path(info.folder), tokenizer)
            parts = TokenParts.of(tokenizer)
            return cls(backend, settings, metrics, info, tokenizer, chat, parts, starts)
        text = before.tokenizer, before.chat, before.parts, before.starts
        runtime = cls(backend, settings, metrics, info, *text)
        runtime.loaded_at = before.loaded_at  # the model is the same
        return runtime

    def shares(self, backend: EngineBackend) -> bool:
        """Whether this runtime and `backend` have an engine in common."""
        return not set(self.backend.clients).isdisjoint(backend.clients)

    def begin(self, arrived: float, owner: str, least_priority: int) -> InferenceRequest:
        """Begin an HTTP request; the returned request is a context manager.

        Args:
            arrived: Its arrival, in seconds by time.perf_counter.
            owner: The API key's name, or "".
            least_priority: The most urgent priority that the key allows.
        """
        return InferenceRequest(
            self.backend,
            self._metrics,
            self.admission,
            self.requests,
            arrived,
            owner,
            least_priority,
        )

    def begin_beside(self, inference: InferenceRequest) -> InferenceRequest:
        """Begin a further InferenceRequest of the same HTTP request, arriving now."""
        beside = self.begin(time.perf_counter(), inference.owner, inference.least_priority)
        beside.placement = inference.placement
        if inference.is_cut:
            beside.cut()
        return beside


def get_runtime(request: Request) -> Runtime:
    """Return the request's runtime; a FastAPI dependency. Raises EngineLoading."""
    runtime: Runtime | None = request.scope.get(RUNTIME)
    return runtime or request.app.state.lifecycle.runtime
