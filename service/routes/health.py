"""GET /health: the server is alive. GET /ready: it takes requests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from service.runtime import Runtime, get_runtime
from service.schemas.common import ErrorBody
from service.wire import JSONResponse

router = APIRouter(tags=["operation"])
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody}}


@router.get("/health", responses=UNAVAILABLE)
async def health(runtime: Annotated[Runtime, Depends(get_runtime)]) -> Response:
    """200 while the model loads, and afterwards as long as the engine's loop turns."""
    if runtime.state == "failed":
        runtime.check_ready()
    if runtime.state != "loading":
        await runtime.client.ping(runtime.settings.ping_timeout)
    return JSONResponse({"status": runtime.state})


@router.get("/ready", responses=UNAVAILABLE)
async def ready(runtime: Annotated[Runtime, Depends(get_runtime)]) -> Response:
    """200 when the model is loaded and the server is not shutting down."""
    runtime.check_ready()
    return JSONResponse({"status": runtime.state})
