"""The routes of the review page."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from equicam.auditing.csv_export import as_csv
from equicam.auditing.review_log import (
    COLUMNS,
    TRIAGE_COLUMNS,
    VERDICTS,
    ReviewLog,
    StaleError,
    reviewer_name,
    verdict_rows,
)
from equicam.auditing.store import RunStore
from equicam.errors import EquicamError
from equicam.report.text import FLAGS, visible
from equicam.review import images, visibility
from equicam.review.auth import Door, Guard, Session
from equicam.review.queue import A_PAGE, FILTERS, Entry, Shelf, Shelves, Sieve
from equicam.shards import json_ready

HERE = Path(__file__).parent
STATIC = {
    "review.css": "text/css; charset=utf-8",
    "review.js": "text/javascript; charset=utf-8",
    "queue.js": "text/javascript; charset=utf-8",
    "item.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
Mark = Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{8,64}$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{20}$")]
Words = Annotated[str, Field(max_length=4000)]


class Given(BaseModel):
    """A verdict as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Key
    verdict: Annotated[str, Field(max_length=40)]
    reason: Words = ""
    seen: Annotated[int, Field(ge=0)]
    mark: Mark


class Said(BaseModel):
    """A note as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: Key
    text: Words
    mark: Mark


class Named(BaseModel):
    """Who is reading."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(max_length=200)]


class Desk:
    """What the routes work on."""

    def __init__(self, run: RunStore, door: Door, *, blind: bool) -> None:
        self.run, self.door, self.blind = run, door, blind
        self.spec = run.manifest
        self.readings = ReviewLog(run.folder)
        self.shelves = Shelves(run, blind=blind)
        self.sieve = Sieve(self.shelves, self.readings)
        self.pictures = images.Pictures(self.spec.angles)
        self.hands = ThreadPoolExecutor(2, "drawing")  # so that drawing never keeps a verdict waiting
        self.pages = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        self.pages.filters["visible"] = visible

    def fresh(self) -> Shelf:
        """The newest queue, and the log read up to now."""
        self.readings.refresh()
        return self.shelves.newest()

    def render(self, name: str, session: Session, **values: Any) -> HTMLResponse:
        """A page."""
        told = {
            "csrf": session.csrf, "reviewer": session.reviewer, "blind": self.blind, "verdicts": VERDICTS,
            "run": self.run.folder.name, "run_id": f"{self.spec.data[:12]}{self.spec.weights[:12]}", "spec": self.spec,
        }  # fmt: skip
        return HTMLResponse(self.pages.get_template(name).render(told | values))


def make_app(run: RunStore, door: Door, *, blind: bool = True) -> ASGIApp:
    """The page over a run, behind a door."""
    desk = Desk(run, door, blind=blind)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.hands.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=running)
    _add_pages(app, desk)
    _add_answers(app, desk)
    _add_files(app, desk)
    _add_refusals(app)
    return Guard(app, door)


def _add_pages(app: FastAPI, desk: Desk) -> None:
    @app.get("/")
    def queue(request: Request) -> Response:
        session = _session(request)
        if session.reviewer is None:
            return RedirectResponse("/who", 303)
        shelf = desk.fresh()
        return desk.render(
            "queue.html.j2", session, progress=visibility.progress(shelf, desk.sieve, session.reviewer), flags=FLAGS,
            chosen={name: request.query_params.get(name, "") for name in FILTERS},
        )  # fmt: skip

    @app.get("/item/{key}")
    def item(request: Request, key: str) -> Response:
        session = _session(request)
        if session.reviewer is None:
            return RedirectResponse("/who", 303)
        shelf = desk.fresh()
        entry = shelf.find(key)
        if entry is None:
            page = desk.render("gone.html.j2", session)
            page.status_code = 404
            return page
        wanted = _wanted(request)
        facts = visibility.facts(shelf, entry, desk.sieve, session.reviewer, desk.spec)
        return desk.render(
            "item.html.j2", session, item=facts, around=_around(desk, shelf, entry, session.reviewer, wanted),
            wanted=wanted, flags=FLAGS,
            missing=desk.pictures.missing(shelf, entry),
        )  # fmt: skip

    @app.get("/who")
    def who(request: Request) -> Response:
        return desk.render("who.html.j2", _session(request))


def _add_answers(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/queue")
    def listed(request: Request, offset: int = 0, limit: int = 60) -> dict[str, Any]:
        reviewer = _reader(request)
        shelf = desk.fresh()
        passing = desk.sieve.passing(shelf, reviewer, _wanted(request))
        mine = desk.readings.standing(reviewer)
        start, most = max(0, offset), max(1, min(limit, A_PAGE))
        some = passing[start : start + most]
        return {
            "version": shelf.version,
            "matching": len(passing),
            "offset": start,
            "items": [visibility.listed(shelf, e, mine, desk.readings, blind=desk.blind) for e in some],
        }

    @app.get("/api/progress")
    def progress(request: Request) -> dict[str, Any]:
        reviewer = _reader(request)
        return visibility.progress(desk.fresh(), desk.sieve, reviewer)

    @app.get("/api/item/{key}")
    def item(request: Request, key: str) -> Response:
        reviewer = _reader(request)
        shelf = desk.fresh()
        entry = shelf.find(key)
        if entry is None:
            return _no(404, "this picture is not in the queue")
        return JSONResponse(visibility.facts(shelf, entry, desk.sieve, reviewer, desk.spec))

    @app.post("/api/verdict")
    def decide(request: Request, given: Given) -> Response:
        reviewer = _reader(request)
        shelf = desk.fresh()
        entry = shelf.find(given.key)
        if entry is None:
            return _no(404, "this picture is not in the queue")
        made = desk.readings.add_verdict(
            entry.id, reviewer, given.verdict, reason=given.reason, blind=desk.blind, previous=given.seen, mark=given.mark
        )  # fmt: skip
        around = _around(desk, shelf, entry, reviewer, _wanted(request))
        own = desk.readings.standing(reviewer)
        entry_now = visibility.listed(shelf, entry, own, desk.readings, blind=desk.blind)
        return JSONResponse({"number": made.number, "verdict": made.verdict, "entry": entry_now, **around})

    @app.post("/api/note")
    def remark(request: Request, said: Said) -> Response:
        reviewer = _reader(request)
        entry = desk.fresh().find(said.key)
        if entry is None:
            return _no(404, "this picture is not in the queue")
        return JSONResponse(
            {"number": desk.readings.add_note(entry.id, reviewer, said.text, mark=said.mark).number}
        )

    @app.post("/api/reviewer")
    def rename(request: Request, named: Named) -> dict[str, str]:
        session = _session(request)
        session.reviewer = reviewer_name(named.name)
        return {"reviewer": session.reviewer}


def _add_files(app: FastAPI, desk: Desk) -> None:
    @app.get("/picture/{key}/{kind}")
    async def picture(request: Request, key: str, kind: str) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(desk.hands, _picture, desk, request, key, kind)

    @app.get("/static/{name}")
    def static(request: Request, name: str) -> Response:
        if name not in STATIC:
            return _no(404, "there is no such file")
        data = (HERE / "static" / name).read_bytes()
        return _tagged(request, hashlib.sha256(data).hexdigest()[:32], lambda: (data, STATIC[name]))

    @app.get("/export/verdicts.{kind}")
    def export(request: Request, kind: str) -> Response:
        reviewer = _reader(request)
        shelf = desk.fresh()
        told = desk.sieve.told(shelf, reviewer)
        rows = verdict_rows(
            desk.readings, shelf.triage, reviewer=None if told else reviewer, with_triage=told
        )
        if kind == "csv":
            names = [*COLUMNS, *(TRIAGE_COLUMNS if told else ())]
            return _download(as_csv(names, rows), "text/csv; charset=utf-8", "verdicts.csv")
        if kind == "json":
            notes = [asdict(n) for n in desk.readings.notes() if told or n.reviewer == reviewer]
            found = json_ready({"complete": told, "verdicts": rows, "notes": notes})
            text = json.dumps(found, indent=1, allow_nan=False)
            return _download(text.encode(), "application/json", "verdicts.json")
        return _no(404, "verdicts are exported as csv or json")


def _picture(desk: Desk, request: Request, key: str, kind: str) -> Response:
    shelf = desk.shelves.newest()
    entry = shelf.find(key)
    if not desk.pictures.known(kind) or (entry is None) != (kind == "scale"):
        return _no(404, "there is no such picture")
    stamp = desk.pictures.stamp(shelf, entry, kind)
    return _tagged(request, stamp, lambda: desk.pictures.drawn(shelf, entry, kind))


def _tagged(request: Request, tag: str, make: Callable[[], tuple[bytes, str] | None]) -> Response:
    """Asked again, the same bytes are not sent again."""
    headers = {"etag": f'"{tag}"', "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    made = make()
    if made is None:
        return _no(404, "there is nothing to draw here")
    return Response(made[0], media_type=made[1], headers=headers)


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(EquicamError)
    def refused(_: Request, error: EquicamError) -> Response:
        return _no(409 if isinstance(error, StaleError) else 422, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        where = ", ".join(sorted({".".join(map(str, one["loc"][1:])) or "body" for one in error.errors()}))
        return _no(422, f"this request is not as the page sends it: {where[:200]}")

    @app.exception_handler(OSError)
    def broken(_: Request, error: OSError) -> Response:
        return _no(503, f"the run cannot be read or written now: {error.strerror or error}")


def _session(request: Request) -> Session:
    found: Session = request.state.session
    return found


def _reader(request: Request) -> str:
    reviewer = _session(request).reviewer
    if reviewer is None:
        raise EquicamError("a review", needs="a reviewer's name", got="none", fix="giving yours at /who")
    return reviewer


def _wanted(request: Request) -> dict[str, str]:
    found = {name: request.query_params.get(name, "")[:200] for name in FILTERS}
    return {name: value for name, value in found.items() if value}


def _around(desk: Desk, shelf: Shelf, entry: Entry, reviewer: str, wanted: dict[str, str]) -> dict[str, Any]:
    passing = desk.sieve.passing(shelf, reviewer, wanted)
    others = desk.sieve.passing(shelf, reviewer, {k: v for k, v in wanted.items() if k != "verdict"})
    mine = desk.readings.standing(reviewer)
    return visibility.around(shelf, passing, entry) | {
        "unread": visibility.unread(shelf, others, entry, mine)
    }


def _no(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)


def _download(data: bytes, kind: str, name: str) -> Response:
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})
