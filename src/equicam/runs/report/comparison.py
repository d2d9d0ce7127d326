"""Two runs compared: the answer in a sentence, as plain values, and as one HTML file that needs nothing else."""

import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.images.items import valid_utf8
from equicam.runs import comparison
from equicam.runs.comparison import MIN_PAIRS, Change, Difference, Direction, Pairs
from equicam.runs.report.facts import load_templates
from equicam.runs.report.render import ImageDrawing, colour_scale
from equicam.runs.store import RunStore
from equicam.shards import json_ready, write_atomic
from equicam.steadiness import STEADY_FROM, WORDS

TEMPLATES = Path(__file__).parent / "templates"
MAX_CHANGES = 20
"""Images that changed most, in the result and on the page."""
MAX_NAMES = 20
"""Images without a partner that a note names; the JSON has all."""


@dataclass(frozen=True)
class Comparison:
    """Two runs compared image by image; every difference is second − first, with its 95 % interval."""

    direction: Direction
    differences: dict[str, Difference]
    words: dict[str, dict[str, int]]  # of the first run, then of the second
    changes: tuple[Change, ...]  # the images that changed most
    other_targets: int  # images of which the runs explain different classes
    differing: dict[str, tuple[str, str]]  # what else differs between the networks
    pairs: Pairs
    stores: tuple[RunStore, RunStore]

    @property
    def images(self) -> int:
        """How many images are explained in both runs."""
        return len(self.pairs.first)

    @property
    def became_steady(self) -> int:
        """Maps that were unsteady and are steady."""
        return self.words["unsteady"]["steady"]

    @property
    def became_unsteady(self) -> int:
        """Maps that were steady and are unsteady."""
        return self.words["steady"]["unsteady"]

    @cached_property
    def _names(self) -> list[str]:
        """The runs, by their folders."""
        return [visible(valid_utf8(store.folder.resolve().name), 80) for store in self.stores]

    @cached_property
    def _lines(self) -> list[str]:
        """The answer, then the notes."""
        names = self._names
        pending = zip(names, (len(store.pending()) for store in self.stores), strict=True)
        text = load_templates(TEMPLATES).get_template("comparison.txt.j2").render(
            found=self, names=names, quoted=list(map(repr, names)), unfinished=[one for one in pending if one[1]],
            min_pairs=MIN_PAIRS, max_names=MAX_NAMES,
        )  # fmt: skip
        return text.strip().split("\n")

    @property
    def sentence(self) -> str:
        """The answer, with the numbers it rests on."""
        return self._lines[0]

    @property
    def notes(self) -> list[str]:
        """What else to know: images left out, classes that changed, what else differs between the networks."""
        return self._lines[1:]

    def __repr__(self) -> str:
        return f"Comparison({self.sentence!r})"

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        plain = {
            "direction": self.direction,
            "sentence": self.sentence,
            "runs": [
                {"folder": store.shown}
                | {name: getattr(store.manifest, name) for name in ("model", "weights", "layer", "images")}
                | {"pending_shards": len(store.pending())}
                for store in self.stores
            ],
            "images": self.images,
            "unmatched": {
                **{
                    name: getattr(self.pairs, name) for name in ("only_first", "only_second", "other_content")
                },
                **{name: [image for image, _ in getattr(self.pairs, name)] for name in ("lost", "gained")},
            },
            "other_targets": self.other_targets,
            "differing": self.differing,
            "differences": {name: asdict(one) for name, one in self.differences.items()},
            "words": self.words,
            "became_steady": self.became_steady,
            "became_unsteady": self.became_unsteady,
            "notes": self.notes,
            "changes": [asdict(one) | {"difference": one.difference} for one in self.changes],
        }
        found: dict[str, Any] = json_ready(plain)
        return found

    def report(self, path: str | Path = "compare.html") -> Path:
        """Write the page; returns its path."""
        page = Path(path)
        if page.suffix.lower() not in (".html", ".htm"):
            raise EquicamError(
                "the page of a comparison", "a name that ends in .html", valid_utf8(str(page)), "compare.html"
            )
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(page, _render(self).encode())
        return page


def compare_runs(first: RunStore, second: RunStore) -> Comparison:
    """Compare two runs; refused where they measured something else than each other, or share no image."""
    facts = comparison.compare_rows(first, second, MAX_CHANGES)
    if not facts["differences"]["stability"].difference.n:
        raise EquicamError(
            "two runs to compare", "images with a stability in both",
            f"{facts['pairs'].first.num_rows:,} images explained in both, none of them with a stability in both",
            "runs on the same images, by the same ids (paths within the source), with several views",
        )  # fmt: skip
    return Comparison(stores=(first, second), **facts)


def _render(found: Comparison) -> str:
    """The page, with the maps of both runs of the images that changed most."""
    from equicam.drawing import plots  # matplotlib loads slowly, and only the page needs it

    ids = [one.id for one in found.changes]
    stored = [(store, store.rows(ids), store.maps(ids)) for store in found.stores]
    cards = [
        (change, [ImageDrawing(rows[name], maps.get(name), store.manifest, name in store.moved) for store, rows, maps in stored])
        for change, name in zip(found.changes, ids, strict=True)
    ]  # fmt: skip
    return load_templates(TEMPLATES).get_template("comparison.html.j2").render(
        facts=found.to_json(), names=found._names, cards=cards,
        plot=Markup(plots.stability_against_stability(*comparison.stabilities(found.pairs))),  # noqa: S704  # no foreign text
        word_list=WORDS, min_pairs=MIN_PAIRS, steady_from=STEADY_FROM, manifest=found.stores[0].manifest, scale=colour_scale(),
        command=shlex.join(["equicam", "compare", *(store.shown for store in found.stores)]),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
