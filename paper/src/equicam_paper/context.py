"""An experiment, the network and images it runs on, and the evaluations kept between experiments."""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from equicam import __version__
from equicam.evaluate import summary
from equicam.evaluate.evaluate import evaluate
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate
from equicam.images.items import Item, digest_files, digest_groups, digest_items, open_item, sample_by_class
from equicam.methods import METHODS, Method, find_method
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.models.load import load
from equicam.models.weights import fingerprint
from equicam.protocol import find_protocol
from equicam.readers.masking import remember_masked_scores
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam.shards import write_atomic
from equicam_paper.benchmarks import find_items, is_cub
from equicam_paper.claims import MIN_IMAGES, NETWORKS, Claim, claims
from equicam_paper.provenance import commit, content_digest, draw_sample
from equicam_paper.rows import Both, Remark, Row, not_run, note, only_of_the_papers

if TYPE_CHECKING:
    from equicam_paper.plots import Scatter

FORWARD_PASSES = {"score-cam": 2048, "aug-score-cam": 6 * 2048, "rise": 8000, "recipro-cam": 50}
"""Forward passes per map of the methods that run only with --costly."""
FIRST_CLASSES_SHARE = 0.2  # of the images: 2,000 of the paper's 10,000
Methods = Sequence[str] | Mapping[str, Method]


@dataclass(frozen=True)
class Evaluation:
    """The table of one evaluation, and the protocol it follows."""

    table: pa.Table
    protocol: str = "ours"

    @property
    def region(self) -> str:
        """Where its protocol compares maps."""
        return find_protocol(self.protocol).region

    def mean(self, metric: str, method: str | None = None, region: str | None = None) -> Estimate:
        """The mean over images with its interval."""
        return summary.mean_of(summary.pick(self.table, metric, method, region))

    def eq(self, method: str) -> Estimate:
        """Mean Eq by its protocol."""
        return self.mean("eq", method, self.region)

    def eq_above(self, method: str, other: str) -> Estimate:
        """Eq of one method minus that of another by its protocol, paired by image."""
        return summary.contrast(self.table, method, other, region=self.region).difference

    def column(self, metric: str, method: str, *, each_angle: bool = False) -> MetricColumn:
        """A metric of maps by its protocol, a value for every image, or for every image and angle."""
        return summary.pick(self.table, metric, method, self.region, each_angle=each_angle)

    def of_items(self, items: Sequence[Item]) -> "Evaluation":
        """The rows of some of the images."""
        wanted = pa.array([item.id for item in items])
        return replace(self, table=self.table.filter(pc.is_in(self.table["id"], value_set=wanted)))


class Evaluated(NamedTuple):
    """The weights and images of an evaluation, by their SHA-256."""

    weights: str
    images: str
    n: int


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
    draw: str = ""  # `authors`, or a class-spread sample
    group_by: str | None = None  # the column of an image list that holds the group of each image
    costly: bool = False
    max_passes: int | None = None  # of one map by a costly method
    progress: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # dtype, compiled, …: passed to `evaluate`
    extra: dict[str, Path] = field(default_factory=dict)  # more weights of the same architecture, by name
    evaluated: set[Evaluated] = field(default_factory=set, repr=False)  # by evaluations, for their provenance

    @property
    def claimed_domain(self) -> str:
        """The domain as claims name it; they are about ResNet-50, another network's rows stand alone."""
        return self.domain if self.backbone == "resnet50" else f"{self.domain} by {self.backbone}"

    @cached_property
    def listing(self) -> list[Item]:
        """Every image of the source, listed once."""
        return find_items(self.data, split=self.split, group_by=self.group_by)

    @cached_property
    def sample(self) -> list[Item]:
        """The sample of `n` images, or all of them, in the order of the draw."""
        return draw_sample(self.listing, self.n, self.draw)

    @cached_property
    def of_cub(self) -> bool:
        """Whether the images are those of CUB-200-2011, as it is unpacked."""
        return is_cub(Path(self.data))

    @property
    def labelled(self) -> bool:
        """Whether every image of the sample has a label."""
        return all(item.label is not None for item in self.sample)

    @cached_property
    def by_class(self) -> list[Item]:
        """The sample in the order of its classes."""
        return sorted(self.sample, key=_by_class)

    @cached_property
    def first_images(self) -> list[Item]:
        """Images of the first fifth of the classes: the sample's, and others of the source where those decide nothing."""
        own = _first_fifth(self.by_class)
        taken = {item.id for item in own}
        others = [item for item in _first_fifth(sorted(self.listing, key=_by_class)) if item.id not in taken]
        missing = min(MIN_IMAGES - len(own), len(others))
        return [*own, *(sample_by_class(others, missing) if missing > 0 else ())]

    def on_first_classes(self, found: Both[Evaluation]) -> Both[Evaluation]:
        """An evaluation on the first fifth of the images by class, as some published numbers are; without labels on all."""
        return found.map(Evaluation.of_items, _first_fifth(self.by_class)) if self.labelled else found

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 of the network's tensors."""
        return fingerprint(self.model.module)

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of the sample: ids, annotations and contents."""
        return content_digest(self.sample)

    @cached_property
    def groups(self) -> int | None:
        """How many groups the sample comes from, an image without one being its own; None if no image has a group."""
        named = {item.group for item in self.sample} - {None}
        return len(named) + sum(item.group is None for item in self.sample) if named else None

    @cached_property
    def _setting(self) -> dict[str, Any]:
        """Everything but the method and the metrics that decides the rows of an evaluation."""
        return {
            "model": self.model.name, "weights": self.weights_digest, "layer": self.model.layer,
            "images": [digest_items(self.sample), digest_files(self.sample)],
            "version": __version__, "commit": commit(),
        } | ({} if self.groups is None else {"groups": digest_groups(self.sample)})  # fmt: skip

    def with_weights(self, weights: Path) -> "Context":
        """The same with other weights, and evaluations in a folder of their own."""
        old = self.model
        model = load(old.name or "", weights=weights, classes=old.classes, layer=old.layer, device=old.device)
        return replace(self, model=model, out=self.out / f"{weights.parent.name}-{weights.stem}")

    def evaluate(
        self,
        methods: Methods,
        metrics: Sequence[str] = ("eq",),
        *,
        protocol: str = "ours",
        items: Sequence[Item] | None = None,
    ) -> Evaluation:
        """Evaluate the sample, or these items; a kept evaluation with all the methods and metrics is reused.

        Methods of many forward passes are evaluated and kept each on its own.
        """
        if isinstance(methods, Mapping):  # kept tables go by name
            known, of = METHODS.keys() & methods.keys(), find_protocol(protocol)
            if taken := [name for name in known if find_method(name, of) != methods[name]]:
                raise ValueError(f"names of other methods: {', '.join(taken)}")
            sets: list[Methods] = [methods]
        else:
            few = [m for m in methods if not _many_passes(m)]
            sets = [*([few] if few else []), *([m] for m in methods if _many_passes(m))]
        found = [self._evaluate(one, metrics, protocol, items) for one in sets]
        # rows of the images and of the model alone are the same in each
        more = [table.filter(pc.is_valid(table["method"])) for table in found[1:]]
        return Evaluation(pa.concat_tables([found[0], *more]), protocol)

    def _evaluate(
        self, methods: Methods, metrics: Sequence[str], protocol: str, items: Sequence[Item] | None
    ) -> pa.Table:
        options = self.options
        given = methods.values() if isinstance(methods, Mapping) else methods
        if self.costly and not any(map(_many_passes, given)):  # compiling would take longer than it saves
            options = options | {"compiled": False}
        setting = self._setting | {"protocol": protocol, "options": str(options)}
        of = (self.data_digest, len(self.sample)) if items is None else (content_digest(items), len(items))
        self.evaluated.add(Evaluated(self.weights_digest, *of))
        if items is not None:
            setting |= {"images": [digest_items(items), digest_files(items)]}
        self.out.mkdir(parents=True, exist_ok=True)
        index = self.out / "evaluations.json"
        known: dict[str, Any] = json.loads(index.read_text()) if index.is_file() else {}
        for key, entry in known.items():
            enough = set(methods) <= set(entry["methods"]) and set(metrics) <= set(entry["metrics"])
            if enough and entry["setting"] == setting and not isinstance(methods, Mapping):
                return _of_methods(pq.read_table(self._file(key)), methods)
        entry = {"setting": setting, "methods": list(methods), "metrics": list(metrics)}
        key = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:12]
        table = evaluate(
            self.model, list(self.sample if items is None else items), methods=methods, scores=metrics,
            recipe=Recipe(protocol=protocol), out=self._file(key), progress=self.progress, **options,
        )  # fmt: skip
        write_atomic(index, json.dumps(known | {key: entry}, indent=1).encode())
        return table

    def evaluate_both(
        self, methods: Sequence[str], metrics: Sequence[str] = ("eq",), *, items: Sequence[Item] | None = None
    ) -> Both[Evaluation]:
        """The same evaluation by our protocol and by the authors'."""
        with self.masked_scores():
            return Both.of(lambda protocol: self.evaluate(methods, metrics, items=items, protocol=protocol))

    @contextmanager
    def masked_scores(self) -> Iterator[None]:
        """Inside, scores of masked images are computed once; with `costly` they are kept, for this code and its options."""
        if not self.costly:
            with remember_masked_scores():
                yield
            return
        of = (self.weights_digest, __version__, commit(), str(self.options))
        folder = self.out / "scores" / hashlib.sha256(repr(of).encode()).hexdigest()[:16]
        with ScoreFiles(folder) as files, remember_masked_scores(self.model.module, files):
            yield

    def open(self, items: Sequence[Item]) -> Float[Tensor, "b c H W"]:
        """These images as the model's input."""
        inputs = [preprocess_image(self.model, open_item(item)) for item in items]
        return as_batch(self.model, stack_images(inputs))

    def open_some(self, count: int) -> Float[Tensor, "b c H W"]:
        """A class-spread handful of the sample as the model's input."""
        return self.open(sample_by_class(self.sample, count))

    def affordable(self, methods: Sequence[str]) -> list[str]:
        """The methods that run: those of many forward passes only with `costly`, up to `max_passes`."""
        most = (self.max_passes or math.inf) if self.costly else 0
        return [m for m in dict.fromkeys(methods) if FORWARD_PASSES.get(m, 0) <= most]

    def _file(self, key: str) -> Path:
        return self.out / f"evaluation-{key}.parquet"


class ScoreFiles(dict[str, Tensor]):
    """Tensors by name, each also a file that a later process takes; one is written while the next is computed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._writer, self._writing = folder, ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)

    def __enter__(self) -> "ScoreFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last tensor is written; if it could not be, an error that is on its way goes first."""
        self._writer.shutdown()
        if kind is None:
            self._writing.result()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._file(str(name)).is_file()

    def __missing__(self, name: str) -> Tensor:
        found: Tensor = torch.load(self._file(name), map_location="cpu", weights_only=True)
        super().__setitem__(name, found)
        return found

    def __setitem__(self, name: str, scores: Tensor) -> None:
        self._writing.result()
        self._writing = self._writer.submit(self._write, name, scores.cpu())
        super().__setitem__(name, scores)

    def _write(self, name: str, scores: Tensor) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.save(scores, content := io.BytesIO())
        write_atomic(self._file(name), content.getvalue())

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.pt"


def _by_class(item: Item) -> tuple[bool, Any, str]:
    return isinstance(item.label, str), item.label, item.id


def _first_fifth(by_class: Sequence[Item]) -> list[Item]:
    return list(by_class[: round(FIRST_CLASSES_SHARE * len(by_class))])


def _many_passes(method: str | Method) -> bool:
    """Whether a map takes more than a pass for each view."""
    known = METHODS.get(method) if isinstance(method, str) else method
    return known is not None and not known.reader.one_pass


def _of_methods(table: pa.Table, methods: Sequence[str]) -> pa.Table:
    wanted = pc.is_in(table["method"], value_set=pa.array(list(methods)))
    return table.filter(pc.or_(pc.is_null(table["method"]), wanted))


def another_network(context: Context, claim: Claim) -> Remark:
    """Why a claim about another network or domain is not answered, with the option that names it."""
    about = next((network for network in NETWORKS if network in claim.id), claim.of)
    known = not about or about in (context.backbone, context.domain, "all")
    return note("not answered by this run") if known else Remark("network", {"network": about})


@dataclass(frozen=True)
class Experiment:
    """`measure` yields the rows that a context allows; every other claim that it answers is listed as not run."""

    title: str
    answers: tuple[str, ...]  # prefixes of its claims' ids
    measure: Callable[[Context], Iterator[Row]] = field(repr=False)
    needs: str
    missing: Callable[[Context, Claim], Remark] = field(default=another_network, repr=False)
    # the context that it is run in, and whose provenance its rows carry
    prepare: Callable[[Context], Context] = field(default=lambda context: context, repr=False)
    # panels of single images or pairs, read from its kept evaluation
    scatters: Callable[[Context], "Sequence[Scatter]"] = field(default=lambda _context: (), repr=False)

    @property
    def claims(self) -> dict[str, Claim]:
        """The claims it answers, by id."""
        return {name: claim for name, claim in claims().items() if name.startswith(self.answers)}

    def run(self, context: Context) -> Iterator[Row]:
        """Every claim once: measured, or not run with the reason."""
        answered = set()
        for row in self.measure(context):
            answered.add(row.claim)
            yield row
        for name, claim in self.claims.items():
            if name not in answered:
                yield not_run(name, self.missing(context, claim))

    def rows(self, context: Context) -> Iterator[Row]:
        """`run`, except that a number published for one network and its images is not a claim about others."""
        for row in self.run(context):
            yield from only_of_the_papers(row, context.backbone, context.domain, cub=context.of_cub)
