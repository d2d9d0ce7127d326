"""The JSON routes: the list, one item, progress, verdicts, notes and the reviewer's name."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from equicam.errors import EquicamError
from equicam.runs.review import visibility
from equicam.runs.review.auth import json_error
from equicam.runs.review.context import ReviewContext, filters_of, session_of
from equicam.runs.review.queue import MAX_ITEMS_PER_RESPONSE
from equicam.runs.verdicts import reviewer_name

Mark = Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{8,64}$")]
"""A random string that the browser gives each post; it makes a repeated request idempotent."""
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{20}$")]
Text = Annotated[str, Field(max_length=4000)]


class VerdictPost(BaseModel):
    """A verdict as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Key
    verdict: Annotated[str, Field(max_length=40)]
    reason: Text = ""
    previous_event: Annotated[int, Field(ge=0)]  # of the reviewer's own verdict that the page showed; 0: none
    mark: Mark  # the same mark again: a repeated request, answered with the first result


class NotePost(BaseModel):
    """A note as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Key
    text: Text
    mark: Mark  # as of a verdict


class ReviewerPost(BaseModel):
    """The reviewer's name as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(max_length=200)]


def api_routes(context: ReviewContext) -> APIRouter:
    """Everything below /api."""
    router = APIRouter(prefix="/api")
    _add_reads(router, context)
    _add_posts(router, context)
    return router


def _add_reads(router: APIRouter, context: ReviewContext) -> None:
    @router.get("/queue")
    def list_items(request: Request, offset: int = 0, limit: int = 60) -> dict[str, Any]:
        reviewer = context.reviewer_of(request)
        queue = context.current_queue()
        selected = context.filter.select(queue, reviewer, filters_of(request))
        own = context.log.standing(reviewer)
        start, count = max(0, offset), max(1, min(limit, MAX_ITEMS_PER_RESPONSE))
        shown = selected[start : start + count]
        return {
            "version": queue.version,
            "matching": len(selected),
            "offset": start,
            "items": [visibility.list_entry(item, own, context.filter) for item in shown],
        }

    @router.get("/progress")
    def progress(request: Request) -> dict[str, Any]:
        reviewer = context.reviewer_of(request)
        return visibility.progress(context.current_queue(), context.filter, reviewer)

    @router.get("/item/{key}")
    def item_facts(request: Request, key: str) -> Response:
        reviewer = context.reviewer_of(request)
        queue = context.current_queue()
        item = queue.find(key)
        if item is None:
            return _not_in_queue()
        return JSONResponse(visibility.item_facts(queue, item, context.filter, reviewer, context.manifest))


def _add_posts(router: APIRouter, context: ReviewContext) -> None:
    @router.post("/verdict")
    def add_verdict(request: Request, post: VerdictPost) -> Response:
        reviewer = context.reviewer_of(request, acts=True)
        queue = context.current_queue()
        item = queue.find(post.key)
        if item is None:
            return _not_in_queue()
        made = context.log.add_verdict(
            item.id, reviewer, post.verdict, reason=post.reason, blind=context.blind,
            blind_class=context.blind_class, previous_event=post.previous_event, mark=post.mark,
        )  # fmt: skip
        neighbours = context.neighbours(queue, item, reviewer, filters_of(request))
        own = context.log.standing(reviewer)
        entry = visibility.list_entry(item, own, context.filter)
        return JSONResponse({"number": made.number, "verdict": made.verdict, "entry": entry, **neighbours})

    @router.post("/note")
    def add_note(request: Request, post: NotePost) -> Response:
        reviewer = context.reviewer_of(request, acts=True)
        item = context.current_queue().find(post.key)
        if item is None:
            return _not_in_queue()
        made = context.log.add_note(item.id, reviewer, post.text, mark=post.mark)
        return JSONResponse({"number": made.number})

    @router.post("/reviewer")
    def set_reviewer(request: Request, post: ReviewerPost) -> dict[str, str]:
        session, name = session_of(request), reviewer_name(post.name)
        if session.fixed and name != session.reviewer:
            raise EquicamError(
                "this link", needs=f"the name {session.reviewer}", got=name, fix="the link of that reviewer"
            )
        context.reviewer(session)  # the name so far may have shown verdicts
        session.reviewer = name
        context.reviewer(session, acts=True)
        return {"reviewer": name}


def _not_in_queue() -> Response:
    return json_error(404, "this image is not in the queue")
