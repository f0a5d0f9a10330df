"""Request and answer of POST /admin/reload."""

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
    """The model to load; an empty object loads the present one again, as its folder is now."""

    model: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None,
        description="A bundled name, a folder or a Hugging Face repo id. Default: the present "
        "model.",
    )


class ReloadResponse(BaseModel):
    """The model that answers new requests from now on."""

    model: str = Field(description="The model's name in requests.")
    root: str = Field(description="The checkpoint's own name.")
    fingerprint: str = Field(description="Fingerprint of the weights and the configuration.")
    seconds: float = Field(description="Seconds from the request until every process used it.")
