"""GET /version and GET /load: what routers in front of several servers ask each of them."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from service.http.json_response import JSONResponse
from service.inference.lifecycle import Lifecycle, get_lifecycle
from service.schemas.common import ErrorBody
from service.schemas.operation import LoadReport, VersionInfo

router = APIRouter(tags=["operation"])
VERSION_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": VersionInfo},
    "5XX": {"model": ErrorBody},
}
LOAD_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": LoadReport},
    503: {"model": ErrorBody},
}


def _version() -> str:
    try:
        return importlib.metadata.version("minserve")
    except importlib.metadata.PackageNotFoundError:  # a checkout that nobody has installed
        return "unknown"


VERSION = _version()


@router.head("/version", include_in_schema=False)
@router.get("/version", responses=VERSION_ANSWERS)
async def version() -> Response:
    """The version of the server's software, whatever state it is in."""
    return JSONResponse({"version": VERSION})


@router.head("/load", include_in_schema=False)
@router.get("/load", responses=LOAD_ANSWERS)
async def load(lifecycle: Annotated[Lifecycle, Depends(get_lifecycle)]) -> Response:
    """How much the server has to do. 503 where /ready says 503, so that it is sent no requests."""
    lifecycle.check_ready()
    stats = lifecycle.load()
    return JSONResponse(
        {
            "server_load": stats.running + stats.waiting,
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "waiting_prompt_tokens": stats.waiting_tokens,
            "state_slots_used": stats.slots_used,
            "state_slots_total": stats.slots_total,
            "state_usage_ratio": stats.state_usage,
        }
    )
