"""POST /admin/reload: load another model, or the same one again, without dropping a request."""

from __future__ import annotations

import logging
import time
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from engine.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineError,
    EngineLoading,
    Refused,
)
from service.http.errors import SERVER, ApiError
from service.http.json_response import JSONResponse
from service.inference.lifecycle import get_lifecycle
from service.routes.base import JsonRoute
from service.schemas.admin import EXAMPLES, ReloadRequest, ReloadResponse
from service.schemas.common import statuses

router = APIRouter(route_class=JsonRoute, tags=["administration"])
logger = logging.getLogger(__name__)


@router.post("/admin/reload", responses=statuses(ReloadResponse))
async def reload(
    body: Annotated[ReloadRequest, Body(openapi_examples=EXAMPLES)], request: Request
) -> Response:
    """Load another model, or the same one again, without dropping a request.

    The model is loaded next to the one that is served. When it is ready, new requests go to it, and
    the old one ends after its last request in flight. If the new model cannot be loaded, the old
    one keeps serving. The answer comes when the reload has ended; the reload goes on if the client
    disconnects before.
    """
    lifecycle = get_lifecycle(request)
    begun = time.monotonic()
    try:
        info = await lifecycle.engines.reload(body.model)
    except (Refused, EngineLoading):
        raise  # the reload has not begun
    except EngineError as error:
        raise _not_loaded(error) from error
    seconds = time.monotonic() - begun
    logger.info("reloaded: %s in %.1f s", info.name, seconds)
    return JSONResponse(
        {
            "model": lifecycle.settings.model_name or info.name,
            "root": info.name,
            "fingerprint": info.fingerprint,
            "seconds": round(seconds, 3),
        }
    )


def _not_loaded(error: EngineError) -> ApiError:
    message = f"{error.message}; the present model keeps serving"
    logger.error("error: the reload failed: %s", message)
    if isinstance(error, ConfigError | CheckpointError | DeviceError):
        return ApiError(400, f"model: {message}", param="model", code=error.code)
    return ApiError(500, message, type=SERVER, code="reload_failed")
