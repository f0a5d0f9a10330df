"""GET /: the playground, a page to try the model; its files are below /playground/."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.http.errors import ApiError
from service.playground import FOLDER_PATH, PAGE, Asset, assets

router = APIRouter(include_in_schema=False)
METHODS = ["GET", "HEAD"]


@router.api_route("/", methods=METHODS)
async def page(request: Request) -> Response:
    """Return the playground page."""
    return answer(request, assets()[PAGE])


@router.api_route(FOLDER_PATH + "{name}", methods=METHODS)
async def file(name: str, request: Request) -> Response:
    """Return one of the playground's files; 404 for other names."""
    asset = assets().get(name) if name != PAGE else None
    if asset is None:
        raise ApiError(404, f"no such path: {FOLDER_PATH}{name}", code="not_found")
    return answer(request, asset)


def answer(request: Request, asset: Asset) -> Response:
    """Return a file, or 304 if the browser has this version already."""
    if _is_known(request.headers.get("if-none-match", ""), asset.etag):
        headers = {name: value for name, value in asset.headers.items() if name != "content-type"}
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        return Response(headers={**asset.headers, "content-length": str(len(asset.content))})
    return Response(asset.content, headers=asset.headers)


def _is_known(given: str, etag: str) -> bool:
    """Whether an If-None-Match header names `etag`, also as the weak one that proxies make."""
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    return etag in tags or given.strip() == "*"
