"""Two runs compared: the answer in a sentence, as plain values, and as one HTML file that needs nothing else."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.evaluate.statistics import Estimate
from equicam.images.items import valid_utf8
from equicam.runs import comparison
from equicam.runs.comparison import MIN_PAIRS, Change, Difference, Direction, Pairs
from equicam.runs.report.facts import load_templates
from equicam.runs.report.render import DrawnImage, colour_scale
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
        pairs, (first, second) = self.pairs, map(_name, self.stores)
        named = [
            (f"left out, only in {first}", pairs.only_first),
            (f"left out, only in {second}", pairs.only_second),
            ("left out, another image under the same name", pairs.other_content),
        ]
        for able, unable, images in ((first, second, pairs.lost), (second, first, pairs.gained)):
            why = f"{unable} could not explain images that {able} explains, which count as not steady"
            named.append((why, tuple(name for name, _ in images)))
        found = [f"{why}: {_list_names(ids)}" for why, ids in named if ids]
        if self.other_targets:
            count = f"{self.other_targets:,} of {self.images:,}"
            found.append(f"the runs explain different classes in {count} images")
        for name, both in self.differing.items():
            found.append(f"the runs also differ in {name}: {' and '.join(visible(one, 80) for one in both)}")
        for name, store in zip((first, second), self.stores, strict=True):
            if pending := len(store.pending()):
                found.append(f"{name} is not finished: {pending} shards to go")
        return found

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
    manifests = first.manifest, second.manifest
    comparison.refuse_other_recipe(*manifests)
    pairs = comparison.pair_rows(first, second)
    found = comparison.differences(pairs)
    if not found["stability"].difference.n:
        raise EquicamError(
            "two runs to compare", "images with a stability in both",
            f"{pairs.first.num_rows:,} images explained in both, none of them with a stability in both",
            "runs on the same images, by the same ids (paths within the source), with several views",
        )  # fmt: skip
    other = comparison.other_targets(pairs, *manifests)
    return Comparison(
        direction=comparison.direction(found, other_targets=other, images=pairs.first.num_rows),
        differences=found,
        words=comparison.word_changes(pairs),
        changes=tuple(comparison.most_changed(pairs, manifests, MAX_CHANGES)),
        other_targets=other,
        differing=comparison.differing_fields(*manifests),
        pairs=pairs,
        stores=(first, second),
    )


def _name(store: RunStore) -> str:
    return visible(valid_utf8(store.folder.resolve().name), 80)


def _list_names(ids: Sequence[str]) -> str:
    """How many, and the first of them by name."""
    more = ", …" if len(ids) > MAX_NAMES else ""
    return f"{len(ids):,} ({', '.join(visible(name, 80) for name in ids[:MAX_NAMES])}{more})"


def _interval(found: Estimate, form: str = "+.3f") -> str:
    value, low, high = (round(v, 3) + 0.0 for v in (found.value, found.low, found.high))  # no −0.000
    return f"{value:{form}} [{low:{form}}, {high:{form}}]" if np.isfinite(low) else f"{value:{form}}"


def _render(found: Comparison) -> str:
    """The page, with the maps of both runs of the images that changed most."""
    from equicam.drawing import plots  # matplotlib loads slowly, and only the page needs it

    ids = [one.id for one in found.changes]
    stored = [(store, store.rows(ids), store.maps(ids)) for store in found.stores]
    cards = [
        (change, [DrawnImage(rows[name], maps.get(name), store.manifest, name in store.moved) for store, rows, maps in stored])
        for change, name in zip(found.changes, ids, strict=True)
    ]  # fmt: skip
    return load_templates(TEMPLATES).get_template("comparison.html.j2").render(
        facts=found.to_json(), names=[_name(store) for store in found.stores], cards=cards,
        plot=Markup(plots.stability_against_stability(*comparison.stabilities(found.pairs))),  # noqa: S704  # no foreign text
        word_list=WORDS, min_pairs=MIN_PAIRS, steady_from=STEADY_FROM, manifest=found.stores[0].manifest, scale=colour_scale(),
        command=shlex.join(["equicam", "compare", *(store.shown for store in found.stores)]),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
