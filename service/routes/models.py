"""GET /v1/models: the one model that is served, in OpenAI's format."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from msgspec import structs

from service.http.json_response import JSONResponse
from service.inference.inputs.sampling import check_model
from service.inference.runtime import Runtime, get_runtime
from service.schemas.common import ErrorBody, statuses
from service.schemas.models import ModelCard, ModelList

router = APIRouter(tags=["models"])
CurrentRuntime = Annotated[Runtime, Depends(get_runtime)]


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", responses={200: {"model": ModelList}, "5XX": {"model": ErrorBody}})
async def list_models(runtime: CurrentRuntime) -> Response:
    """List the models that requests may name: there is one."""
    return JSONResponse({"object": "list", "data": [_describe(runtime)]})


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}", responses=statuses(ModelCard))
async def get_model(model: str, runtime: CurrentRuntime) -> Response:
    """Describe one model."""
    check_model(model, runtime.model_name, runtime.info)
    return JSONResponse(_describe(runtime))


def _describe(runtime: Runtime) -> dict[str, Any]:
    info = runtime.info
    return {
        "id": runtime.model_name,
        "object": "model",
        "created": runtime.loaded_at,
        "owned_by": "minserve",
        "root": info.name,
        "family": info.family,
        "cell": info.cell,
        "parameters": info.parameters,
        "vocab_size": info.vocab_size,
        "eos_token_id": info.eos_token_id,
        "eos_token_ids": info.eos_token_ids,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "deterministic": info.deterministic,
        "device": info.device_name,
        "backend": asdict(info.backend),
        "state_bytes": info.state_bytes,
        "state": [
            {"name": one.name, "shape": one.full_shape, "dtype": one.dtype} for one in info.state
        ],
        "fingerprint": info.fingerprint,
        "max_states": runtime.settings.max_states,
        "starts": [structs.asdict(start) for start in runtime.starts],
    }
