"""The review application: pages, images, downloads, and the error responses of all routes."""

import asyncio
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from equicam.drawing.text import FLAGS
from equicam.errors import EquicamError
from equicam.runs.review import visibility
from equicam.runs.review.api import api_routes
from equicam.runs.review.auth import Access, AuthMiddleware, json_error
from equicam.runs.review.context import ReviewContext, filters_of, session_of
from equicam.runs.review.images import pad
from equicam.runs.review.queue import FILTERS
from equicam.runs.review.verdict_files import encode_verdicts
from equicam.runs.store import RunStore
from equicam.runs.verdicts import StaleError

MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
STATIC = Path(__file__).parent / "static"
# A Windows registry may call scripts text/plain, which browsers refuse to run under nosniff.
mimetypes.add_type("text/javascript", ".js")


def make_app(store: RunStore, access: Access, *, blind: bool = True, blind_class: bool = False) -> ASGIApp:
    """The review page of a run; `blind_class` also hides the class to judge."""
    context = ReviewContext(store, blind=blind, blind_class=blind_class)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.workers.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    _add_pages(app, context)
    _add_images(app, context)
    _add_exports(app, context)
    add_error_handlers(app)
    app.include_router(api_routes(context))
    app.mount("/static", StaticFiles(directory=STATIC))
    return AuthMiddleware(app, access)


def _add_pages(app: FastAPI, context: ReviewContext) -> None:
    @app.get("/")
    def queue_page(request: Request) -> Response:
        session = session_of(request)
        queue, reviewer = context.current_queue(), context.reviewer(session)
        if reviewer is None:
            return RedirectResponse("/reviewer", 303)
        progress = visibility.progress(queue, context.filter, reviewer)
        chosen = {name: request.query_params.get(name, "") for name in FILTERS}
        return context.render_page("queue.html.j2", session, progress=progress, flags=FLAGS, chosen=chosen)

    @app.get("/item/{key}")
    def item_page(request: Request, key: str) -> Response:
        session = session_of(request)
        queue, reviewer = context.current_queue(), context.reviewer(session)
        if reviewer is None:
            return RedirectResponse("/reviewer", 303)
        item = queue.find(key)
        if item is None:
            return context.render_page("not_found.html.j2", session, status=404)
        filters = filters_of(request)
        return context.render_page(
            "item.html.j2", session, flags=FLAGS, filters=filters,
            item=visibility.item_facts(queue, item, context.filter, reviewer, context.manifest),
            neighbours=context.neighbours(queue, item, reviewer, filters),
            missing=context.images.missing_reason(queue, item),
        )  # fmt: skip

    @app.get("/reviewer")
    def reviewer_page(request: Request) -> Response:
        session = session_of(request)
        context.reviewer(session)
        return context.render_page("reviewer.html.j2", session)


def _add_images(app: FastAPI, context: ReviewContext) -> None:
    @app.get("/image/{key}/{kind}")
    async def image(request: Request, key: str, kind: str) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(context.workers, _image, context, request, key, kind)


def _image(context: ReviewContext, request: Request, key: str, kind: str) -> Response:
    queue = context.queues.current()
    item = queue.find(key)
    # only the colour scale has no item
    if not context.images.has_kind(kind) or (item is None) != (kind == "scale"):
        return json_error(404, "there is no such image")
    reviewer = context.reviewer(session_of(request))
    if item is not None and kind not in visibility.BLIND_KINDS and not context.reveals(item, reviewer):
        return json_error(404, "this is shown after your verdict")
    headers = {"etag": f'"{context.images.etag(queue, item, kind)}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    rendered = context.images.render(queue, item, kind)
    if rendered is None:
        return json_error(404, "there is nothing to show here")
    data, media_type = rendered
    return Response(pad(data, kind) if context.blind else data, media_type=media_type, headers=headers)


def _add_exports(app: FastAPI, context: ReviewContext) -> None:
    @app.get("/export/verdicts.{suffix}")
    def export(request: Request, suffix: str) -> Response:
        reviewer = context.reviewer_of(request)
        queue = context.current_queue()
        own = None if context.filter.reveals_arms(queue, reviewer) else reviewer
        if suffix not in MEDIA_TYPES:
            return json_error(404, "verdicts are exported as csv or json")
        data = encode_verdicts(context.log, queue.triage, suffix, reviewer=own)
        headers = {"content-disposition": f'attachment; filename="verdicts.{suffix}"'}
        return Response(data, media_type=MEDIA_TYPES[suffix], headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every failure that a route can have becomes an error as the page's scripts read it."""

    @app.exception_handler(EquicamError)
    def refused(_: Request, error: EquicamError) -> Response:
        return json_error(409 if isinstance(error, StaleError) else 422, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        where = ", ".join(sorted({".".join(map(str, one["loc"][1:])) or "body" for one in error.errors()}))
        return json_error(422, f"the request has missing or invalid fields: {where[:200]}")

    @app.exception_handler(OSError)
    def unavailable(_: Request, error: OSError) -> Response:
        return json_error(503, f"the run cannot be read or written now: {error.strerror or error}")
