"""GET /metrics: Prometheus' text exposition."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from service.lifecycle import Lifecycle, get_lifecycle
from service.metrics import CONTENT_TYPE

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=Response)
async def metrics(lifecycle: Annotated[Lifecycle, Depends(get_lifecycle)]) -> Response:
    """All series, those of the server's other processes added."""
    return Response(await lifecycle.exposition(), headers={"content-type": CONTENT_TYPE})
