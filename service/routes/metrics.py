"""GET /metrics: Prometheus' text exposition."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from service.metrics import CONTENT_TYPE
from service.runtime import Runtime, get_runtime

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=Response)
async def metrics(runtime: Annotated[Runtime, Depends(get_runtime)]) -> Response:
    """All series."""
    return Response(runtime.metrics.render(), headers={"content-type": CONTENT_TYPE})
