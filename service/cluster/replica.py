"""Replica: one server on Ray Serve, with its engines.

Ray runs the ASGI application in a process of its own, checks its health, and starts another replica
in the place of one that fails. So engines are not restarted here: when the last one dies, every
request under way gets its one error, and the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from engine.errors import EngineError
from service.cluster.expositions import Expositions
from service.settings import Settings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # between two looks at whether the model is loaded
LAST_SECONDS = 1.0  # for the errors of requests under way to be sent, before the process ends
ENDED = 1  # exit code


class Replica:
    """A replica's part of `serve.ingress`; Ray makes one in each replica's process."""

    def __init__(self, settings: bytes) -> None:
        """`settings`: as by Settings.to_json."""
        self._settings = Settings.from_json(settings)
        self._app: Any = None
        self._expositions: Any = None

    def __serve_build_asgi_app__(self) -> Any:
        """Return the server's application; Ray calls this once and runs its lifespan."""
        from ray import serve

        from engine.supervisor.supervisor_client import LocalSupervisorClient
        from service.app.app import create_app
        from service.inference.supervision import make_supervisor

        engines = LocalSupervisorClient(make_supervisor(self._settings))
        self._app = create_app(engines, self._settings, self._on_failure)
        name = serve.get_replica_context().replica_id.unique_id
        self._expositions = Expositions(name, self._own)
        self._app.state.lifecycle.with_others = self._expositions.merged
        return self._app

    async def _own(self) -> bytes:
        text: bytes = await self._app.state.lifecycle.own_exposition()
        return text

    async def check_health(self) -> None:
        """Raise EngineError if this replica serves nothing; called by Ray.

        Returns when the model is loaded: Ray sends no requests before the first answer.
        """
        lifecycle = self._app.state.lifecycle
        while lifecycle.state == "loading":
            await asyncio.sleep(POLL_SECONDS)
        self._expositions.start()
        lifecycle.check_ready()
        await lifecycle.ping()

    def _on_failure(self, error: EngineError) -> None:
        log.error("the replica ends, and Ray starts another one: %s", error.message)
        asyncio.get_running_loop().call_later(LAST_SECONDS, os._exit, ENDED)
