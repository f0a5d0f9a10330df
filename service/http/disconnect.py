"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from service.http.connection import Connection
from service.http.scope import CONNECTION

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_client_leaves(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects: then raises
    ClientGone. The request's body must have been read."""
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
        if left and not task.uncancel():  # else somebody else wants it to end as well
            raise ClientGone from None
        raise
    finally:
        over = True
        unwatch()


def _watch(
    connection: Connection | None, receive: Receive, on_lost: Callable[[], None]
) -> Callable[[], object]:
    """Has `on_lost` called when the client leaves. Returns what ends that."""
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
