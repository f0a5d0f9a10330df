"""GET /docs: the API reference (Swagger UI); its files are below /docs/."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.http.errors import ApiError
from service.reference import FOLDER_PATH, PAGE, PATH, assets
from service.routes.playground import METHODS, answer

router = APIRouter(include_in_schema=False)


@router.api_route(PATH, methods=METHODS)
async def page(request: Request) -> Response:
    """Return the reference page."""
    return answer(request, assets()[PAGE])


@router.api_route(FOLDER_PATH + "{name}", methods=METHODS)
async def file(name: str, request: Request) -> Response:
    """Return one of the reference's files; 404 for other names."""
    asset = assets().get(name) if name != PAGE else None
    if asset is None:
        raise ApiError(404, f"no such path: {FOLDER_PATH}{name}", code="not_found")
    return answer(request, asset)
