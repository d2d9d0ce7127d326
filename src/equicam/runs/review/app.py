"""The review page of a run: its start, its pages, images, downloads and JSON routes, and the error responses of all of them."""

import asyncio
import getpass
import mimetypes
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from equicam.drawing.text import FLAGS
from equicam.errors import EquicamError
from equicam.runs.log import Log
from equicam.runs.queue_files import refuse_unranked
from equicam.runs.review import visibility
from equicam.runs.review.auth import Access, AuthMiddleware, json_error
from equicam.runs.review.context import FILTERS, ReviewContext, filters_of, session_of
from equicam.runs.review.server import Links, listen, serve
from equicam.runs.review.verdict_files import encode_verdicts
from equicam.runs.store import RunStore
from equicam.runs.verdicts import StaleError, reviewer_name

PORT = 8321
MAX_ITEMS_PER_RESPONSE = 200
MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
STATIC = Path(__file__).parent / "static"
# A Windows registry may call scripts text/plain, which browsers refuse to run under nosniff.
mimetypes.add_type("text/javascript", ".js")

Mark = Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{8,64}$")]
"""A random string that the browser gives each post; it makes a repeated request idempotent."""
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{20}$")]
Text = Annotated[str, Field(max_length=4000)]


class _VerdictPost(BaseModel):
    """A verdict as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Key
    verdict: Annotated[str, Field(max_length=40)]
    reason: Text = ""
    previous_event: Annotated[int, Field(ge=0)]  # of the reviewer's own verdict that the page showed; 0: none
    mark: Mark  # the same mark again: a repeated request, answered with the first result


class _NotePost(BaseModel):
    """A note as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Key
    text: Text
    mark: Mark  # as of a verdict


class _ReviewerPost(BaseModel):
    """The reviewer's name as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(max_length=200)]


def serve_review(
    store: RunStore,
    *,
    announce: Callable[[Links], None],
    reviewers: Sequence[str] = (),
    blind: bool = True,
    blind_class: bool = False,
    port: int | None = None,
) -> None:
    """Serve the page; `announce` gets its addresses once the port listens.

    Several reviewers get a link each, and the names of its sessions are fixed.
    """
    refuse_unranked(store)
    names = list(dict.fromkeys(map(reviewer_name, reviewers)))
    personal = names if len(names) > 1 else []
    name = names[0] if len(names) == 1 else None
    with listen(port, PORT) as listener:
        login, port = None if names else _login_name(), listener.getsockname()[1]
        access = Access(port, reviewer=name, login=login, personal=personal)
        app = make_app(store, access, blind=blind, blind_class=blind_class)
        opened: dict[str, Any] = {"blind": blind, "blind_class": blind and blind_class}
        opened |= {"reviewers": personal} if personal else {}
        Log(store.folder).add("review opened", opened, actor=name or access.login or "equicam")
        serve(app, access, listener, announce)


def _login_name() -> str | None:
    """The login name, if it can be a reviewer's name; else None, and the page shows a form for it."""
    try:
        return reviewer_name(getpass.getuser())
    except (EquicamError, OSError, KeyError):
        return None


def make_app(store: RunStore, access: Access, *, blind: bool = True, blind_class: bool = False) -> ASGIApp:
    """The review page of a run; `blind_class` also hides the class to judge."""
    context = ReviewContext(store, blind=blind, blind_class=blind_class)

    app = new_app(partial(context.workers.shutdown, wait=False, cancel_futures=True))
    _add_pages(app, context)
    _add_files(app, context)
    _add_api(app, context)
    app.mount("/static", StaticFiles(directory=STATIC))
    return AuthMiddleware(app, access)


def _add_pages(app: FastAPI, context: ReviewContext) -> None:
    @app.get("/")
    def queue_page(request: Request) -> Response:
        queue, reviewer = context.current_queue(), context.reviewer(request)
        if reviewer is None:
            return RedirectResponse("/reviewer", 303)
        progress = visibility.progress(queue, context, reviewer)
        chosen = {name: request.query_params.get(name, "") for name in FILTERS}
        return context.render_page("queue.html.j2", request, progress=progress, flags=FLAGS, chosen=chosen)

    @app.get("/item/{key}")
    def item_page(request: Request, key: str) -> Response:
        queue, reviewer = context.current_queue(), context.reviewer(request)
        if reviewer is None:
            return RedirectResponse("/reviewer", 303)
        item = queue.find(key)
        if item is None:
            return context.render_page("not_found.html.j2", request, status=404)
        filters, input_ = filters_of(request), context.images.render(queue, item, "input")
        return context.render_page(
            "item.html.j2", request, flags=FLAGS, filters=filters,
            item=visibility.item_facts(queue, item, context, reviewer),
            neighbours=context.neighbours(queue, item, reviewer, filters),
            missing=input_ if isinstance(input_, str) else None,
        )  # fmt: skip

    @app.get("/reviewer")
    def reviewer_page(request: Request) -> Response:
        context.reviewer(request)
        return context.render_page("reviewer.html.j2", request)


def _add_files(app: FastAPI, context: ReviewContext) -> None:
    @app.get("/image/{key}/{kind}")
    async def image(request: Request, key: str, kind: str) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(context.workers, _image, context, request, key, kind)

    @app.get("/export/verdicts.{suffix}")
    def export(request: Request, suffix: str) -> Response:
        queue, reviewer = context.current_queue(), context.reviewer_of(request)
        own = None if context.reveals_arms(queue, reviewer) else reviewer
        if suffix not in MEDIA_TYPES:
            return json_error(404, "verdicts are exported as csv or json")
        data = encode_verdicts(context.log, queue.triage, suffix, reviewer=own)
        headers = {"content-disposition": f'attachment; filename="verdicts.{suffix}"'}
        return Response(data, media_type=MEDIA_TYPES[suffix], headers=headers)


def _image(context: ReviewContext, request: Request, key: str, kind: str) -> Response:
    queue, reviewer = context.current_queue(), context.reviewer(request)
    item = queue.find(key)
    # only the colour scale has no item
    if not context.images.has_kind(kind) or (item is None) != (kind == "scale"):
        return json_error(404, "there is no such image")
    own = context.log.standing(reviewer or "")
    if context.blind and item is not None and kind not in visibility.BLIND_KINDS and item.id not in own:
        return json_error(404, "this is shown after your verdict")
    headers = {"etag": f'"{context.images.etag(queue, item, kind)}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    rendered = context.images.render(queue, item, kind)
    if isinstance(rendered, str):
        return json_error(404, "there is nothing to show here")
    data, media_type = rendered
    return Response(
        context.images.pad(data, kind) if context.blind else data, media_type=media_type, headers=headers
    )


def _add_api(app: FastAPI, context: ReviewContext) -> None:
    @app.get("/api/queue")
    def list_items(request: Request, offset: int = 0, limit: int = 60) -> dict[str, Any]:
        queue, reviewer = context.current_queue(), context.reviewer_of(request)
        selected, own = context.select(queue, reviewer, filters_of(request)), context.log.standing(reviewer)
        start, count = max(0, offset), max(1, min(limit, MAX_ITEMS_PER_RESPONSE))
        items = [visibility.list_entry(one, own, context) for one in selected[start : start + count]]
        return {"version": queue.version, "matching": len(selected), "offset": start, "items": items}

    @app.get("/api/progress")
    def progress(request: Request) -> dict[str, Any]:
        queue, reviewer = context.current_queue(), context.reviewer_of(request)
        return visibility.progress(queue, context, reviewer)

    @app.get("/api/item/{key}")
    def item_facts(request: Request, key: str) -> dict[str, Any]:
        reviewer = context.reviewer_of(request)
        return visibility.item_facts(*context.find(key), context, reviewer)

    @app.post("/api/verdict")
    def add_verdict(request: Request, post: _VerdictPost) -> dict[str, Any]:
        reviewer = context.reviewer_of(request, acts=True)
        queue, item = context.find(post.key)
        made = context.log.add_verdict(
            item.id, reviewer, post.verdict, reason=post.reason, blind=context.blind,
            blind_class=context.blind_class, previous_event=post.previous_event, mark=post.mark,
        )  # fmt: skip
        neighbours = context.neighbours(queue, item, reviewer, filters_of(request))
        entry = visibility.list_entry(item, context.log.standing(reviewer), context)
        return {"number": made.number, "verdict": made.verdict, "entry": entry, **neighbours}

    @app.post("/api/note")
    def add_note(request: Request, post: _NotePost) -> dict[str, int]:
        reviewer = context.reviewer_of(request, acts=True)
        _, item = context.find(post.key)
        return {"number": context.log.add_note(item.id, reviewer, post.text, mark=post.mark).number}

    @app.post("/api/reviewer")
    def set_reviewer(request: Request, post: _ReviewerPost) -> dict[str, str]:
        session, name = session_of(request), reviewer_name(post.name)
        if session.fixed and name != session.reviewer:
            raise EquicamError("this link", f"the name {session.reviewer}", name, "the link of that reviewer")
        context.reviewer(request)  # the name so far may have shown verdicts
        session.reviewer = name
        context.reviewer(request, acts=True)
        return {"reviewer": name}


def new_app(close: Callable[[], None]) -> FastAPI:
    """An application that ends with `close`; a failure of any route becomes an error as the page's scripts read it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)

    @app.exception_handler(EquicamError)
    def refused(_: Request, error: EquicamError) -> Response:
        return json_error(409 if isinstance(error, StaleError) else 422, str(error))

    @app.exception_handler(HTTPException)
    def absent(_: Request, error: HTTPException) -> Response:
        return json_error(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        where = ", ".join(sorted({".".join(map(str, one["loc"][1:])) or "body" for one in error.errors()}))
        return json_error(422, f"the request has missing or invalid fields: {where[:200]}")

    @app.exception_handler(OSError)
    def unavailable(_: Request, error: OSError) -> Response:
        return json_error(503, f"the run cannot be read or written now: {error.strerror or error}")

    return app
