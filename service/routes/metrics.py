"""GET /metrics: all metrics in Prometheus' text exposition format."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from service.inference.lifecycle import Lifecycle, get_lifecycle
from service.observability.metrics import CONTENT_TYPE
from service.schemas.common import ErrorBody

router = APIRouter(tags=["operation"])


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={503: {"model": ErrorBody}})
async def metrics(lifecycle: Annotated[Lifecycle, Depends(get_lifecycle)]) -> Response:
    """All metrics, summed over the server's processes. 503 if the other processes do not answer."""
    return Response(await lifecycle.exposition(), headers={"content-type": CONTENT_TYPE})
