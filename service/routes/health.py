"""GET /health: whether the server is alive. GET /ready: whether it takes requests.

HEAD requests, which many probes send, get the same answer without its body.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from service.http.json_response import JSONResponse
from service.inference.lifecycle import Lifecycle, get_lifecycle
from service.schemas.common import ErrorBody

router = APIRouter(tags=["operation"])
CurrentLifecycle = Annotated[Lifecycle, Depends(get_lifecycle)]
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody}}


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=UNAVAILABLE)
async def health(lifecycle: CurrentLifecycle) -> Response:
    """200 while a model loads, and afterwards as long as the engine answers; 503 if it does not."""
    if lifecycle.state == "failed":
        lifecycle.check_ready()
    if lifecycle.state not in ("loading", "restarting"):
        await lifecycle.ping()
    return JSONResponse({"status": lifecycle.state})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=UNAVAILABLE)
async def ready(lifecycle: CurrentLifecycle) -> Response:
    """200 when the model is loaded and the server is not shutting down; else 503."""
    lifecycle.check_ready()
    return JSONResponse({"status": lifecycle.state})
