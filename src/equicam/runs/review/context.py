"""The state that all routes of the review page share, the reviewer behind a request, and the items a reviewer asks for."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from equicam.drawing.text import verdict_meanings
from equicam.errors import EquicamError
from equicam.runs.queue_files import SHA256, read_options
from equicam.runs.report.facts import load_templates
from equicam.runs.review.auth import TEMPLATES, Session
from equicam.runs.review.queue import Queue, QueueItem, QueueLoader
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog, Verdict

if TYPE_CHECKING:
    from equicam.runs.review.images import ImageRenderer

FILTERS = ("class", "flag", "verdict", "arm")
MAX_CACHED_SELECTIONS = 32


class ReviewContext:
    """A run, its queue and its review log, and the means to render pages and images of them."""

    def __init__(self, store: RunStore, *, blind: bool, blind_class: bool) -> None:
        self.store, self.blind, self.blind_class = store, blind, blind and blind_class
        self.manifest = store.manifest
        self.log = ReviewLog(store.folder)
        self.queues = QueueLoader(store, blind=blind)
        self.secret = self.queues.secret
        self.workers = ThreadPoolExecutor(2, "render")  # so that rendering never delays a verdict
        self.templates = load_templates(TEMPLATES)
        self._selections: dict[tuple[Any, ...], tuple[QueueItem, ...]] = {}
        self._remainder: tuple[tuple[str, int, int], str | None] | None = None

    @cached_property
    def images(self) -> "ImageRenderer":
        """The images; imported here, because it loads plots, which the first page does not need."""
        from equicam.runs.review.images import ImageRenderer

        return ImageRenderer(self.manifest.transforms, self.secret)

    def current_queue(self) -> Queue:
        """The present queue, with the log read to its end."""
        self.log.refresh()
        return self.queues.current()

    def find(self, key: str) -> tuple[Queue, QueueItem]:
        """The present queue and the item with this key; an error for the page's scripts if it has none."""
        queue = self.current_queue()
        item = queue.find(key)
        if item is None:
            raise HTTPException(404, "this image is not in the queue")
        return queue, item

    def reviewer(self, request: Request, *, acts: bool = False) -> str | None:
        """The name this session has now: that of its link, the last one of its browser, or the login name.

        None where another browser has taken the login name: there the page shows a form for a name.
        A name is registered with the browser when it acts (chooses it, posts), or can see what its verdicts revealed.
        """
        session = session_of(request)
        mark = self.secret.digest("browser", session.browser)[:16]
        if session.reviewer is None:
            offered = session.suggested
            free = offered if offered is not None and not self.log.is_registered(offered) else None
            session.reviewer = next(reversed(self.log.names(mark)), free)
        name = session.reviewer
        if name is not None and (acts or not self.blind or self.log.standing(name)):
            self.log.register(name, mark, blind=self.blind, blind_class=self.blind_class)
        return name

    def reviewer_of(self, request: Request, *, acts: bool = False) -> str:
        """The reviewer's name; refused where none was given yet."""
        reviewer = self.reviewer(request, acts=acts)
        if reviewer is None:
            raise EquicamError("a review", "a reviewer's name", "none", "giving your name at /reviewer")
        return reviewer

    def reveals_arms(self, queue: Queue, reviewer: str) -> bool:
        """Whether this reviewer may see arms: without blinding, or once no verdict is left that they could bias."""
        return not self.blind or queue.position_by_id.keys() <= self.log.standing(reviewer).keys()

    def awaits_second(self, name: str) -> bool:
        """Whether the only reviewer of an image, under whatever names, has requested a second one."""
        found = self.log.by_reviewer(name)
        requested = [v.reviewer for v in found.values() if v.verdict == "second-reviewer"]
        return bool(requested) and found.keys() <= self.log.same_person(requested[0])

    def remainder(self, queue: Queue) -> str | None:
        """What can be stated of the maps nobody opened; None while a triage is being written."""
        # imported here: it loads SciPy, which most pages do not need
        from equicam.runs.bounds import bound_unopened, count_verdicts

        path = self.store.folder / "triage.json"
        if not path.is_file():
            return None
        written = (queue.version, self.log.last_event, path.stat().st_mtime_ns)
        if self._remainder is None or self._remainder[0] != written:
            triage, sentence = read_options(self.store), None
            if triage.get(SHA256) == queue.sha256:
                sentence = bound_unopened(count_verdicts(self.log, queue.triage, triage["ok"])).sentence
            self._remainder = (written, sentence)
        return self._remainder[1]

    def select(self, queue: Queue, reviewer: str, filters: Mapping[str, str]) -> tuple[QueueItem, ...]:
        """The items that pass, in order. Under blinding, flags and hidden classes find only items with this reviewer's verdict."""
        if not filters:
            return queue.items
        if "arm" in filters and not self.reveals_arms(queue, reviewer):
            raise EquicamError(
                "the arm filter", "all verdicts given, or a review without blinding", "images without your verdict",
                "reviewing them first",
            )  # fmt: skip
        cached = (queue.version, reviewer, self.log.last_event, *sorted(filters.items()))
        selected = self._selections.get(cached)
        if selected is None:
            own, tests = self.log.standing(reviewer), filters.items()
            selected = tuple(
                item
                for item in queue.items
                if all(self._passes(item, own.get(item.id), *one) for one in tests)
            )
            if len(self._selections) > MAX_CACHED_SELECTIONS:
                self._selections = {}
            self._selections[cached] = selected
        return selected

    def _passes(self, item: QueueItem, own: Verdict | None, name: str, value: str) -> bool:
        """Whether an item passes one filter."""
        if name == "flag":
            return value in item.flags and (own is not None or not self.blind)
        if name == "class":
            return item.predicted == value and (own is not None or not self.blind_class)
        if name == "arm":
            return item.arm == value
        if own is None:
            return value == "unreviewed" or (value == "awaits-second" and self.awaits_second(item.id))
        return value in ("reviewed", own.verdict)

    def neighbours(
        self, queue: Queue, item: QueueItem, reviewer: str, filters: Mapping[str, str]
    ) -> dict[str, Any]:
        """The keys around an item in the filtered list, which need not contain it any more; and of the next item without
        this reviewer's verdict, after this one, then from the top, whatever verdict is filtered by.
        """
        place, own = attrgetter("position"), self.log.standing(reviewer)
        listed = self.select(queue, reviewer, filters)
        before, after = (f(listed, item.position, key=place) for f in (bisect_left, bisect_right))
        every = self.select(queue, reviewer, {k: v for k, v in filters.items() if k != "verdict"})
        start = bisect_right(every, item.position, key=place)
        ahead = chain(islice(every, start, None), islice(every, start))
        return {
            "index": before,
            "previous": listed[before - 1].key if before else None,
            "next": listed[after].key if after < len(listed) else None,
            "next_unreviewed": next(
                (one.key for one in ahead if one.id not in own and one.id != item.id), None
            ),
        }

    def render_page(
        self, template: str, request: Request, *, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """A page for the session of a request."""
        session = session_of(request)
        shared = {
            "csrf": session.csrf, "reviewer": session.reviewer, "blind": self.blind, "blind_class": self.blind_class,
            "verdicts": VERDICTS, "meanings": verdict_meanings(self.manifest.has_values),
            "run": self.store.folder.name, "run_id": self.secret.digest("run")[:24], "manifest": self.manifest,
            "fixed": session.fixed, "suggested": session.suggested,
        }  # fmt: skip
        return HTMLResponse(self.templates.get_template(template).render(shared | values), status)


def session_of(request: Request) -> Session:
    """The session that the middleware found."""
    session: Session = request.state.session
    return session


def filters_of(request: Request) -> dict[str, str]:
    """The filters in the query string."""
    found = {name: request.query_params.get(name, "")[:200] for name in FILTERS}
    return {name: value for name, value in found.items() if value}
