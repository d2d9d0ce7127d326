"""The network and images an experiment runs on, and the evaluations kept between experiments."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float
from torch import Tensor

from equicam.core.views import Views
from equicam.data.items import Item, digest_files, digest_items, open_item, sample_by_class
from equicam.data.sources import find_items
from equicam.evaluation import statistics, summary
from equicam.evaluation.evaluate import evaluate
from equicam.evaluation.statistics import Estimate
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.models.load import load
from equicam.models.weights import fingerprint
from equicam.paper.rows import Both
from equicam.readers.model import Model
from equicam.shards import write_atomic

FORWARD_PASSES = {"score-cam": 2048, "aug-score-cam": 6 * 2048, "rise": 8000, "recipro-cam": 50}
"""Forward passes per map of the methods that run only with --costly."""


@dataclass(frozen=True)
class Evaluation:
    """The table of one evaluation, and whether it follows the authors' protocol."""

    table: pa.Table
    as_published: bool = False

    @property
    def region(self) -> str:
        """Where its protocol compares maps."""
        return "full" if self.as_published else "disc"

    def mean(self, metric: str, method: str | None = None, region: str | None = None) -> Estimate:
        """The mean over images with its interval."""
        found = summary.pick(self.table, metric, method, region)
        return statistics.bootstrap(statistics.mean, found.value, cluster=found.ids)

    def eq(self, method: str) -> Estimate:
        """Mean Eq by its protocol."""
        return self.mean("eq", method, self.region)


@dataclass(frozen=True)
class Context:
    """A network in the place of one of the paper's, images, and the folder that keeps evaluations and figures."""

    model: Model
    data: str | Path
    out: Path
    backbone: str = "resnet50"  # the network whose published numbers to compare with
    domain: str = ""  # PatchCamelyon or RESISC45, where the images come from one
    n: int | None = None
    split: str | None = None
    costly: bool = False
    progress: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # dtype, compiled, …: passed to `evaluate`
    extra: dict[str, Path] = field(default_factory=dict)  # more weights of the same architecture, by name

    @property
    def claimed_domain(self) -> str:
        """The domain as claims name it; they are about ResNet-50, another network's rows stand alone."""
        return self.domain if self.backbone == "resnet50" else f"{self.domain} by {self.backbone}"

    @cached_property
    def listing(self) -> list[Item]:
        """Every image of the source, listed once."""
        return find_items(self.data, split=self.split)

    @cached_property
    def sample(self) -> list[Item]:
        """The class-spread sample of `n` images, or all of them."""
        return sample_by_class(self.listing, self.n)

    @cached_property
    def _setting(self) -> dict[str, Any]:
        """Everything but the method and the metrics that decides the rows of an evaluation."""
        return {
            "model": self.model.name, "weights": fingerprint(self.model.module), "layer": self.model.layer, "n": self.n,
            "images": [digest_items(self.listing), digest_files(self.listing)], "options": str(self.options),
        }  # fmt: skip

    def with_weights(self, weights: Path) -> "Context":
        """The same with other weights, and evaluations in a folder of their own."""
        old = self.model
        model = load(old.name or "", weights=weights, classes=old.classes, layer=old.layer, device=old.device)
        return replace(self, model=model, out=self.out / f"{weights.parent.name}-{weights.stem}")

    def evaluate(
        self,
        methods: Sequence[str] | Mapping[str, Any],
        metrics: Sequence[str] = ("eq",),
        *,
        as_published: bool = False,
        views: int | Views | None = None,
        items: Sequence[Item] | None = None,
    ) -> Evaluation:
        """Evaluate the sample, or these items; a kept evaluation with all the methods and metrics is reused."""
        setting = self._setting | {"as_published": as_published, "views": str(views)}
        if items is not None:
            setting |= {"n": None, "images": [digest_items(items), digest_files(items)]}
        self.out.mkdir(parents=True, exist_ok=True)
        index = self.out / "evaluations.json"
        known: dict[str, Any] = json.loads(index.read_text()) if index.is_file() else {}
        for key, entry in known.items():
            enough = set(methods) <= set(entry["methods"]) and set(metrics) <= set(entry["metrics"])
            if enough and entry["setting"] == setting and not isinstance(methods, Mapping):
                return Evaluation(_of_methods(pq.read_table(self._file(key)), methods), as_published)
        entry = {"setting": setting, "methods": list(methods), "metrics": list(metrics)}
        key = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:12]
        table = evaluate(
            self.model, list(self.listing if items is None else items), methods=methods, scores=metrics,
            as_published=as_published, views=views, n=self.n if items is None else None, out=self._file(key),
            progress=self.progress, **self.options,
        )  # fmt: skip
        write_atomic(index, json.dumps(known | {key: entry}, indent=1).encode())
        return Evaluation(table, as_published)

    def evaluate_both(
        self,
        methods: Sequence[str],
        metrics: Sequence[str] = ("eq",),
        *,
        views: int | None = None,
        items: Sequence[Item] | None = None,
    ) -> Both[Evaluation]:
        """The same evaluation by our protocol and by the authors'."""
        return Both(
            self.evaluate(methods, metrics, views=views, items=items),
            self.evaluate(methods, metrics, views=views, items=items, as_published=True),
        )

    def open(self, items: Sequence[Item]) -> Float[Tensor, "b c H W"]:
        """These images as the model's input."""
        return as_batch(
            self.model, stack_images([preprocess_image(self.model, open_item(item)) for item in items])
        )

    def open_some(self, count: int) -> Float[Tensor, "b c H W"]:
        """A class-spread handful of the sample as the model's input."""
        return self.open(sample_by_class(self.sample, count))

    def affordable(self, methods: Sequence[str]) -> list[str]:
        """The methods that run: those of many forward passes only with `costly`."""
        return [m for m in dict.fromkeys(methods) if self.costly or m not in FORWARD_PASSES]

    def _file(self, key: str) -> Path:
        return self.out / f"evaluation-{key}.parquet"


def _of_methods(table: pa.Table, methods: Sequence[str]) -> pa.Table:
    wanted = pc.is_in(table["method"], value_set=pa.array(list(methods)))
    return table.filter(pc.or_(pc.is_null(table["method"]), wanted))
