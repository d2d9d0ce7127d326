"""The state that all routes of the review page share, and the reviewer behind a request."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from equicam.auditing.review_log import VERDICTS, ReviewLog
from equicam.auditing.store import RunStore
from equicam.errors import EquicamError
from equicam.report.text import visible
from equicam.review import visibility
from equicam.review.auth import Session
from equicam.review.images import ImageRenderer
from equicam.review.queue import FILTERS, Queue, QueueFilter, QueueItem, QueueLoader


class ReviewContext:
    """A run, its queue and its review log, and the means to render pages and images of them."""

    def __init__(self, store: RunStore, *, blind: bool) -> None:
        self.store, self.blind = store, blind
        self.manifest = store.manifest
        self.log = ReviewLog(store.folder)
        self.queues = QueueLoader(store, blind=blind)
        self.filter = QueueFilter(self.queues, self.log)
        self.images = ImageRenderer(self.manifest.angles)
        self.workers = ThreadPoolExecutor(2, "render")  # so that rendering never delays a verdict
        self.templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self.templates.filters["visible"] = visible

    def current_queue(self) -> Queue:
        """The present queue, with the log read to its end."""
        self.log.refresh()
        return self.queues.current()

    def render_page(
        self, template: str, session: Session, *, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """A page for this session."""
        shared = {
            "csrf": session.csrf, "reviewer": session.reviewer, "blind": self.blind, "verdicts": VERDICTS,
            "run": self.store.folder.name, "run_id": f"{self.manifest.data[:12]}{self.manifest.weights[:12]}",
            "manifest": self.manifest,
        }  # fmt: skip
        return HTMLResponse(self.templates.get_template(template).render(shared | values), status)

    def neighbours(
        self, queue: Queue, item: QueueItem, reviewer: str, filters: dict[str, str]
    ) -> dict[str, Any]:
        """The items around one in the filtered list, and the next without a verdict whatever verdict is filtered by."""
        selected = self.filter.select(queue, reviewer, filters)
        without = self.filter.select(queue, reviewer, {k: v for k, v in filters.items() if k != "verdict"})
        own = self.log.standing(reviewer)
        return visibility.neighbours(queue, selected, item) | {
            "next_unreviewed": visibility.next_unreviewed(queue, without, item, own)
        }


def session_of(request: Request) -> Session:
    """The session that the middleware found."""
    session: Session = request.state.session
    return session


def reviewer_of(request: Request) -> str:
    """The reviewer's name; refused where none was given yet."""
    reviewer = session_of(request).reviewer
    if reviewer is None:
        raise EquicamError(
            "a review", needs="a reviewer's name", got="none", fix="giving your name at /reviewer"
        )
    return reviewer


def filters_of(request: Request) -> dict[str, str]:
    """The filters in the query string."""
    found = {name: request.query_params.get(name, "")[:200] for name in FILTERS}
    return {name: value for name, value in found.items() if value}
