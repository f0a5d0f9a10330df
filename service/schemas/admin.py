"""POST /admin/reload."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from service.schemas.common import RequestModel

EXAMPLES: dict[str, Any] = {
    "the present model": {
        "summary": "The present model again, as its folder is now",
        "value": {},
    },
    "another": {"summary": "Another model", "value": {"model": "shakespeare-minlstm"}},
}


class ReloadRequest(RequestModel):
    """An empty object loads the present model again, as its folder is now."""

    model: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="a bundled name, a folder or a Hugging Face repo id"
    )


class ReloadResponse(BaseModel):
    """New requests are answered by this model."""

    model: str = Field(description="what requests call it")
    root: str = Field(description="the checkpoint's own name")
    fingerprint: str = Field(description="of the weights and the configuration")
    seconds: float = Field(description="from the request until every process used it")
