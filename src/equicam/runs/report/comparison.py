"""Two runs compared: the answer in a sentence, as plain values, and as one HTML file that needs nothing else."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.images.items import valid_utf8
from equicam.overlay import overlay
from equicam.runs import comparison
from equicam.runs.comparison import MIN_PAIRS, Change, Difference, Direction, Pairs
from equicam.runs.report import render
from equicam.runs.store import RunStore, StoredMaps
from equicam.shards import json_ready, write_atomic
from equicam.steadiness import STEADY_FROM, WORDS

MAX_CHANGES = 20
"""Images that changed most, in the result and on the page."""
MAX_NAMES = 20
"""Images without a partner that a note names; the JSON has all."""
METRICS = {
    "stability": ("Stability", "mean correlation of the presented view’s own map with every other view’s, aligned; 1 is best"),
    "steady": ("Share of steady maps", "maps whose stability is surely above the limit"),
    "peum": ("PEUM (per-image explanation uncertainty)", "variance between the aligned views’ maps; it depends on the number of views; lower is better"),
    "flip_rate": ("Flips", "share of views that predict another class; lower is better"),
}  # fmt: skip


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

    @property
    def sentence(self) -> str:
        """The answer, with the numbers it rests on."""
        found = self.differences["stability"]
        estimate, (first, second) = found.difference, map(_name, self.stores)
        answer = {
            "steadier": f"The maps of {second!r} are steadier than those of {first!r}",
            "less steady": f"The maps of {second!r} are less steady than those of {first!r}",
            "no difference shown": f"No difference shown between the maps of {first!r} and of {second!r}",
            "does not compare": f"The runs explain different classes in {self.other_targets:,} of {self.images:,} images, so most maps of "
            f"{first!r} and of {second!r} do not compare",
        }[self.direction]
        steady = self.differences["steady"]
        few = f"; {MIN_PAIRS} images are needed to say more" if estimate.n < MIN_PAIRS else ""
        return (
            f"{answer}: mean stability {found.first:.3f} before and {found.second:.3f} after, a difference of "
            f"{_interval(estimate)} over {estimate.n:,} images of both{few}. Share of steady maps {steady.first:.0%} before and "
            f"{steady.second:.0%} after, {_interval(steady.difference)}; maps that went from unsteady to steady: "
            f"{self.became_steady:,}, from steady to unsteady: {self.became_unsteady:,}."
        )

    @property
    def notes(self) -> list[str]:
        """What else to know: images left out, classes that changed, what else differs between the networks."""
        pairs, names = self.pairs, [_name(store) for store in self.stores]
        left_out = [
            (f"only in {names[0]}", pairs.only_first),
            (f"only in {names[1]}", pairs.only_second),
            ("another image under the same name", pairs.other_content),
        ]
        found = [f"left out, {why}: {_named(ids)}" for why, ids in left_out if ids]
        for one, names_of, name in ((pairs.lost, names[1], names[0]), (pairs.gained, names[0], names[1])):
            if one:
                ids = [image for image, _ in one]
                found.append(
                    f"{names_of} could not explain images that {name} explains, which count as not steady: {_named(ids)}"
                )
        if self.other_targets:
            found.append(
                f"the runs explain different classes in {self.other_targets:,} of {self.images:,} images"
            )
        for name, (first, second) in self.differing.items():
            found.append(f"the runs also differ in {name}: {visible(first, 80)} and {visible(second, 80)}")
        for store, name in zip(self.stores, names, strict=True):
            if pending := len(store.pending()):
                found.append(f"{name} is not finished: {pending} shards to go")
        return found

    def __repr__(self) -> str:
        return f"Comparison({self.sentence!r})"

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        pairs = self.pairs
        plain = {
            "direction": self.direction,
            "sentence": self.sentence,
            "runs": [_run_facts(store) for store in self.stores],
            "images": self.images,
            "unmatched": {
                "only_first": list(pairs.only_first),
                "only_second": list(pairs.only_second),
                "other_content": list(pairs.other_content),
                "lost": [name for name, _ in pairs.lost],
                "gained": [name for name, _ in pairs.gained],
            },
            "other_targets": self.other_targets,
            "differing": {name: list(both) for name, both in self.differing.items()},
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


def _name(store: RunStore) -> str:
    return visible(valid_utf8(store.folder.resolve().name), 80)


def _named(ids: Sequence[str]) -> str:
    """How many, and the first of them by name."""
    more = ", …" if len(ids) > MAX_NAMES else ""
    return f"{len(ids):,} ({', '.join(visible(name, 80) for name in ids[:MAX_NAMES])}{more})"


def _interval(found: Any, form: str = "+.3f") -> str:
    value, low, high = (round(v, 3) + 0.0 for v in (found.value, found.low, found.high))  # no −0.000
    return f"{value:{form}} [{low:{form}}, {high:{form}}]" if np.isfinite(low) else f"{value:{form}}"


def _run_facts(store: RunStore) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "folder": store.shown,
        "model": manifest.model,
        "weights": manifest.weights,
        "layer": manifest.layer,
        "images": manifest.images,
        "pending_shards": len(store.pending()),
    }


def _render(found: Comparison) -> str:
    from equicam.drawing import plots  # matplotlib loads slowly, and only the page needs it
    from equicam.runs.report.page import environment

    return environment().get_template("comparison.html.j2").render(
        found=found, facts=found.to_json(), names=[_name(store) for store in found.stores], cards=_cards(found),
        plot=Markup(plots.stability_against_stability(*comparison.stabilities(found.pairs))),  # noqa: S704  # no foreign text
        metrics=METRICS, word_list=WORDS, min_pairs=MIN_PAIRS, steady_from=STEADY_FROM,
        manifest=found.stores[0].manifest, scale=render.data_url(render.colour_scale()),
        command=shlex.join(["equicam", "compare", *(store.shown for store in found.stores)]),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def _cards(found: Comparison) -> list[dict[str, Any]]:
    """The images that changed most, with the maps of both runs."""
    ids = [one.id for one in found.changes]
    stored = [(store, store.rows(ids), store.maps(ids)) for store in found.stores]
    cards = []
    for change in found.changes:
        overlays = [_overlays(store, rows[change.id], maps.get(change.id)) for store, rows, maps in stored]
        shown = next((one for one in overlays if one["image"]), overlays[0])
        cards.append(
            {"change": change, "image": shown["image"], "missing": shown["missing"], "maps": overlays}
        )
    return cards


def _overlays(store: RunStore, row: Mapping[str, Any], maps: StoredMaps | None) -> dict[str, str | None]:
    """The image as the model saw it, the map and the spread of its views, or why they cannot be shown."""
    grid = (1, 1) if maps is None else (maps.map.shape[0], maps.map.shape[1])
    size = render.fit(grid, render.IMAGE_PX)
    image = render.read_input(row, size, store.manifest, fetch=row["id"] in store.moved)
    readable = not isinstance(image, str)
    under = render.background(image, size)
    planes = {} if maps is None else {
        "map": render.stretch(maps.map, size), "spread": render.deviation(maps.peum, size)
    }  # fmt: skip
    urls = {name: render.data_url(overlay(under, plane)) for name, plane in planes.items()}
    return {
        "image": render.data_url(under) if readable else None,
        "missing": None if readable else str(image),
        "map": urls.get("map"),
        "spread": urls.get("spread"),
    }
