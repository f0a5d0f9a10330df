"""What cannot be read as HTTP is answered as any other mistake: by an error in JSON, with an id,
counted and logged, after what was asked before it; then the connection is closed.

uvicorn's own answer is a text, which it may write into another answer, and a line on stderr. (h11,
which stands in for httptools on other systems, keeps to it.)
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from service.http.connection import RequestResponseCycle, WatchedProtocol
from service.http.errors import ApiError, respond
from service.http.scope import REFUSAL


class RefusingProtocol(WatchedProtocol):
    """uvicorn's HTTP protocol, whose parser is left at what it cannot read. It asks its application
    for `refusals`, an application that answers such requests: `tell`, wrapped as others are."""

    cycle: Any  # uvicorn's, of the latest request
    refused = False  # nothing more is read

    def refuse(self, error: ApiError) -> None:
        """Answers what is being read by `error`; after that, nothing."""
        if self.refused:
            return
        self.refused = True
        cycle = self.cycle
        if self.scope is None:  # not even a first line has begun
            self.on_message_begin()
        if cycle is None or cycle.scope is not self.scope:
            self._answer(error)
        elif cycle.response_complete:  # whatever its body was
            self.transport.close()
        else:
            cycle.scope[REFUSAL] = error
            cycle.more_body = cycle.keep_alive = False
            cycle.message_event.set()

    def _answer(self, error: ApiError) -> None:
        """To a head: as uvicorn does with one that it can read."""
        self.scope.update({REFUSAL: error, "method": "", "path": ""})
        before = self.cycle
        self.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        refusals = self.config.app.refusals
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, refusals)
        else:
            self.pipeline.appendleft((self.cycle, refusals))


async def tell(scope: Scope, receive: Receive, send: Send) -> None:
    """The application that answers a request by what its head was refused for."""
    await respond(scope, scope[REFUSAL])(scope, receive, send)
