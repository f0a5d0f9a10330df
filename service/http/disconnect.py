"""unless_client_leaves: cancels work for a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from service.http.connection import Connection
from service.http.scope import CONNECTION

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection, so nobody reads the answer."""


async def unless_client_leaves(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; cancel it and raise ClientGone if the client disconnects.

    The request's body must have been read.
    """
    connection: Connection | None = scope.get(CONNECTION)
    task = asyncio.current_task(None if connection is None else connection.loop)
    assert task is not None
    left = over = False

    def note() -> None:
        nonlocal left
        if not over:
            left = True
            task.cancel()

    unwatch = _watch(connection, receive, note)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():  # else the task was cancelled by others, too
            raise ClientGone from None
        raise
    finally:
        over = True
        unwatch()


def _watch(
    connection: Connection | None, receive: Receive, on_lost: Callable[[], None]
) -> Callable[[], object]:
    """Call `on_lost` when the client disconnects. Returns the function that ends the watch."""
    if connection is not None:
        return connection.watch(on_lost)

    def note(watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            on_lost()

    watcher = asyncio.create_task(_disconnect(receive))
    watcher.add_done_callback(note)
    return watcher.cancel


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
