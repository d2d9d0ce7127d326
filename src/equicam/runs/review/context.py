"""The state that all routes of the review page share, and the reviewer behind a request."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from equicam.drawing.text import verdict_meanings, visible
from equicam.drawing.view_curve import curve_order, view_curve
from equicam.errors import EquicamError
from equicam.runs.review import visibility
from equicam.runs.review.auth import Session
from equicam.runs.review.images import ImageRenderer
from equicam.runs.review.queue import FILTERS, Queue, QueueFilter, QueueItem, QueueLoader
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog


class ReviewContext:
    """A run, its queue and its review log, and the means to render pages and images of them."""

    def __init__(self, store: RunStore, *, blind: bool, blind_class: bool) -> None:
        self.store, self.blind, self.blind_class = store, blind, blind and blind_class
        self.manifest = store.manifest
        self.log = ReviewLog(store.folder)
        self.queues = QueueLoader(store, blind=blind, blind_class=blind_class)
        self.secret = self.queues.secret
        self.filter = QueueFilter(self.queues, self.log)
        self.images = ImageRenderer(self.manifest.transforms, self.secret)
        self.workers = ThreadPoolExecutor(2, "render")  # so that rendering never delays a verdict
        self.templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self.templates.filters |= {"visible": visible, "view_curve": view_curve, "curve_order": curve_order}

    def current_queue(self) -> Queue:
        """The present queue, with the log read to its end."""
        self.log.refresh()
        return self.queues.current()

    def reviewer(self, session: Session, *, acts: bool = False) -> str | None:
        """The name this session has now: that of its link, the last one of its browser, or the login name.

        None where another browser has taken the login name: there the page shows a form for a name.
        A name is registered with the browser when it acts (chooses it, posts), or can see what its verdicts revealed.
        """
        mark = self._browser_mark(session)
        if session.reviewer is None:
            offered = session.suggested
            free = offered if offered is not None and not self.log.is_registered(offered) else None
            session.reviewer = next(reversed(self.log.names(mark)), free)
        name = session.reviewer
        if name is not None and (acts or not self.blind or self.log.standing(name)):
            self.log.register(name, mark, blind=self.blind, blind_class=self.blind_class)
        return name

    def _browser_mark(self, session: Session) -> str:
        return self.secret.digest("browser", session.browser)[:16]

    def reveals(self, item: QueueItem, reviewer: str | None) -> bool:
        """Whether this reviewer may see what blinding hides of an image until the verdict."""
        if not self.blind:
            return True
        if reviewer is not None and item.id not in self.log.standing(reviewer):
            self.log.refresh()  # another server may have stored the verdict
        return reviewer is not None and item.id in self.log.standing(reviewer)

    def render_page(
        self, template: str, session: Session, *, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """A page for this session."""
        shared = {
            "csrf": session.csrf, "reviewer": session.reviewer, "blind": self.blind, "blind_class": self.blind_class,
            "verdicts": VERDICTS, "meanings": verdict_meanings(self.manifest.has_values),
            "run": self.store.folder.name, "run_id": self.secret.digest("run")[:24], "manifest": self.manifest,
            "fixed": session.fixed, "suggested": session.suggested,
        }  # fmt: skip
        return HTMLResponse(self.templates.get_template(template).render(shared | values), status)

    def reviewer_of(self, request: Request, *, acts: bool = False) -> str:
        """The reviewer's name; refused where none was given yet."""
        reviewer = self.reviewer(session_of(request), acts=acts)
        if reviewer is None:
            raise EquicamError(
                "a review", needs="a reviewer's name", got="none", fix="giving your name at /reviewer"
            )
        return reviewer

    def neighbours(
        self, queue: Queue, item: QueueItem, reviewer: str, filters: dict[str, str]
    ) -> dict[str, Any]:
        """The items around one in the filtered list, and the next without a verdict whatever verdict is filtered by."""
        selected = self.filter.select(queue, reviewer, filters)
        without = self.filter.select(queue, reviewer, {k: v for k, v in filters.items() if k != "verdict"})
        own = self.log.standing(reviewer)
        return visibility.neighbours(selected, item) | {
            "next_unreviewed": visibility.next_unreviewed(without, item, own)
        }


def session_of(request: Request) -> Session:
    """The session that the middleware found."""
    session: Session = request.state.session
    return session


def filters_of(request: Request) -> dict[str, str]:
    """The filters in the query string."""
    found = {name: request.query_params.get(name, "")[:200] for name in FILTERS}
    return {name: value for name, value in found.items() if value}
