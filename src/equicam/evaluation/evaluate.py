"""The paper's protocol on anybody's pictures: every method on the same pictures and views, every score a row.

The unit of work is a part, a fixed run of the sample: floors compare pictures of one part, and an evaluation that is
cut off goes on at the first part that is not there.
"""

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from equicam import __version__
from equicam.core.views import Degrees, Fill
from equicam.data.image_files import to_rgb
from equicam.data.items import Item, digest_files, digest_items, sample_by_class, valid_utf8
from equicam.data.remote import as_path
from equicam.data.sources import find_items
from equicam.engines.devices import Devices
from equicam.engines.worker import Home, Part, Sent
from equicam.errors import EquicamError
from equicam.evaluation.equivariance import ANGLES
from equicam.evaluation.metrics import SCORES, Truth
from equicam.evaluation.spec import Asked, Count, Foreign, Methods, described
from equicam.evaluation.worker import PLACED, Evaluating, Scoring, ahead, opened, scored
from equicam.explain import equivariant
from equicam.models.images import Images, as_batch, input_bytes, preprocess_image
from equicam.models.weights import fingerprint
from equicam.models.wrap import wrap
from equicam.readers.model import Model
from equicam.shards import FINGERPRINT, Parts, plain, refuse_another, write_table

if TYPE_CHECKING:
    from equicam.engines.ray import Cluster

A_PART = 16
"""Pictures in a part."""
KEY = b"equicam"
"""Where a file of rows keeps what it is of."""


def evaluate(
    model: Model | nn.Module,
    images: Images | Sequence[Item],
    *,
    methods: Methods = ("grad-cam", "equigrad-cam"),
    scores: Sequence[str] = ("eq",),
    n: int | None = None,
    split: str | None = None,
    views: Count = None,
    angles: Sequence[Degrees] = ANGLES,
    fill: Fill | None = None,
    as_published: bool = False,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    engine: "Devices | Cluster | None" = None,
    progress: bool = False,
) -> pa.Table:
    """Score methods on pictures: one row an image, method, score, angle and region.

    `images` is a folder or manifest, pictures, paths, items or a preprocessed batch; `n` a class-spread sample of
    them; `methods` names, or a dict of names and methods, fusions or explainers `(x, target) → map` of yours. With
    `out` (a Parquet file) an evaluation that was cut off goes on where it stopped, and `engine` may be several devices
    or a Ray cluster.
    """
    if not isinstance(model, Model):
        model = wrap(model, example=as_batch(None, images) if isinstance(images, Tensor) else None)
    model = replace(model, compiled=True) if compiled else model
    sample = _sample(model, images, n, split, placed=bool(PLACED & set(scores)))
    scoring = Scoring(
        methods=methods,
        scores=tuple(scores),
        views=views,
        angles=tuple(angles),
        fill=fill or ("zeros" if as_published else "reflect"),
        as_published=as_published,
        dtype=dtype,
        chunk=chunk,
        seed=seed,
        compiled=model.compiled,
        names=sample.names,
    )
    wanted = scoring.asked()
    _check(scores, wanted, angles)
    about = {
        "model": model.name,
        "weights": fingerprint(model.module),
        "layer": model.layer,
        "preprocessing": _probe(model),
        "classes": model.classes,
        "methods": {one.name: described(one) for one in wanted},
        "scores": list(scores),
        "angles": [float(a) for a in angles],
        "fill": scoring.fill,
        "as_published": as_published,
        "dtype": str(dtype),
        "compiled": model.compiled,
        "seed": seed,
        "pictures": len(sample.items),
        "sample": digest_items(sample.items),
        "content": sample.content(),
        "equicam": __version__,
        "torch": torch.__version__,
    }
    if out is not None:
        about["explainers"] = _probed(model, sample, wanted)
    parts = _even(sample.items)

    with _bar(len(sample.items), progress) as done:
        if out is not None:
            kept = (
                partial(_dealt, engine, model, sample, scoring)
                if engine
                else partial(_here, model, sample, scoring)
            )
            return _kept(Path(out), parts, about, kept, done)
        if engine is not None:
            raise EquicamError(
                "an engine", needs="a file for the rows", got="out=None", fix="--out rows.parquet"
            )
        tables = [rows for _, rows in _computed(model, sample, scoring, list(enumerate(parts)), done)]
        return _stamped(pa.concat_tables(tables), about)


def _computed(
    model: Model, sample: "Sample", scoring: Scoring, parts: Sequence[Part], done: Callable[[float], None]
) -> Iterator[tuple[int, pa.Table]]:
    """Parts computed in this process, the next one's pictures opened meanwhile."""
    plan = scoring.plan(model)
    with ThreadPoolExecutor(8) as pool:
        for (number, _), loaded in zip(parts, ahead(pool, [p for _, p in parts], sample.load), strict=True):
            yield number, scored(plan, model, scoring.names, scoring.scores, loaded, done)


def _here(
    model: Model,
    sample: "Sample",
    scoring: Scoring,
    parts: Parts,
    pending: Sequence[Part],
    done: Callable[[float], None],
) -> None:
    for number, rows in _computed(model, sample, scoring, pending, done):
        parts.write(number, rows)


def _dealt(
    engine: "Devices | Cluster",
    model: Model,
    sample: "Sample",
    scoring: Scoring,
    parts: Parts,
    pending: Sequence[Part],
    done: Callable[[float], None],
) -> None:
    """Parts computed and written by the engine's workers."""
    if len(sample.given):
        raise EquicamError(
            "an engine",
            needs="pictures in files",
            got="pictures in memory",
            fix="a folder, a list or their paths",
        )
    made = engine.made or Sent.copy_of(model)
    job = Evaluating(
        home=Home.at(parts.folder / FINGERPRINT),
        made=made,
        blind=made.blind(model),
        weights=fingerprint(model.module),
        scoring=scoring,
        part_bytes=A_PART * input_bytes(model),
    )
    sizes = {number: len(items) for number, items in pending}
    with closing(engine.work(job, pending)) as written:  # type: ignore[type-var]
        for number in written:
            done(sizes[number])


@dataclass(frozen=True)
class Sample:
    """The pictures of an evaluation, in its order, and what opens one."""

    items: list[Item]
    load: Callable[[Item], tuple[Float[Tensor, "c H W"], Truth]]
    names: tuple[str, ...] = ()  # the labels of the whole source, where they are words
    given: Sequence[Any] | Tensor = ()  # pictures or a batch in memory

    def content(self) -> str:
        """What tells these pictures from others of the same names: their files' size and time, or their pixels."""
        if not len(self.given):
            return digest_files(self.items)
        found = hashlib.sha256()
        for item in self.items:
            one = self.given[item.index or 0]
            found.update(
                one.cpu().contiguous().numpy().tobytes() if isinstance(one, Tensor) else one.tobytes()
            )
        return found.hexdigest()


def _even(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Parts of even size, so that no picture is left without others to compare it with."""
    count = -(-len(items) // A_PART)
    edges = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def _probe(model: Model) -> str:
    """What preprocessing makes of one drawn picture: tells any change in it, whatever it is made of."""
    ramp = np.add.outer(np.arange(300) * 3, np.arange(260) * 5)[..., None] + np.array([0, 80, 160])
    seen = preprocess_image(model, Image.fromarray((ramp % 256).astype(np.uint8)))
    return hashlib.sha256(seen.contiguous().float().numpy().tobytes()).hexdigest()


def _probed(model: Model, sample: Sample, wanted: Sequence[Asked]) -> dict[str, str]:
    """What explainers of the caller's say of the first picture that opens: they have no other fingerprint."""
    foreign = {
        o.name: o.method.reader.fn for o in wanted if o.method and isinstance(o.method.reader, Foreign)
    }
    if not foreign:
        return {}
    for item in sample.items:
        try:
            x = as_batch(model, sample.load(item)[0][None])
            break
        except EquicamError:
            continue
    else:
        return dict.fromkeys(foreign, "no picture")
    fused = {name: equivariant(fn, views=1)(x, 0).map for name, fn in foreign.items()}
    return {name: hashlib.sha256(m.half().cpu().numpy().tobytes()).hexdigest() for name, m in fused.items()}


def _kept(
    out: Path,
    all_parts: Sequence[Sequence[Item]],
    about: dict[str, Any],
    compute: Callable[[Parts, Sequence[Part], Callable[[float], None]], None],
    done: Callable[[float], None],
) -> pa.Table:
    """Parts beside the file until all are there, then the file."""
    fix = f"another --out, or deleting {out} and {out}.parts"
    if out.is_file():
        refuse_another(str(out), _about(out), about, fix=fix)
        shutil.rmtree(
            f"{out}.parts", ignore_errors=True
        )  # a process killed right after writing the file left them
        return pq.read_table(out)
    if out.exists() or not out.absolute().parent.is_dir():
        raise EquicamError(
            f"out {str(out)!r}", needs="a file in a folder that is there", got="a folder" if out.exists() else "no such folder",
            fix="rows.parquet",
        )  # fmt: skip
    parts = Parts(Path(f"{out}.parts"), about, fix=fix)
    count = len(all_parts)
    pending = [(number, all_parts[number]) for number in parts.pending(count)]
    done(sum(map(len, all_parts)) - sum(len(items) for _, items in pending))
    if pending:
        compute(parts, pending, done)
    whole = _stamped(parts.read(count), about)
    write_table(out, whole)
    shutil.rmtree(parts.folder)
    return whole


def _about(out: Path) -> dict[str, Any]:
    """What a file of rows says it is of; nothing, if it is no such file."""
    try:
        found: dict[str, Any] = json.loads((pq.read_schema(out).metadata or {}).get(KEY, b"{}"))
    except (pa.ArrowInvalid, ValueError):
        return {"file": "not one of ours"}
    return found


def _stamped(rows: pa.Table, about: dict[str, Any]) -> pa.Table:
    return rows.replace_schema_metadata({KEY: json.dumps(plain(about))})


def _sample(model: Model, images: Any, n: int | None, split: str | None, *, placed: bool) -> Sample:
    if isinstance(images, str | Path) or (
        isinstance(images, list | tuple) and images and isinstance(images[0], Item)
    ):
        found = find_items(images, split=split) if isinstance(images, str | Path) else list(images)
        names = tuple(sorted({i.label for i in found if isinstance(i.label, str)}))
        return Sample(sample_by_class(found, n), lambda item: opened(model, item, placed=placed), names)
    if split is not None:
        raise EquicamError("split", needs="a folder or manifest", got=type(images).__name__, fix="split=None")
    if isinstance(images, Tensor):
        batch = as_batch(model, images)
        return Sample(
            sample_by_class(_numbered(len(batch)), n),
            lambda item: (batch[item.index or 0], Truth()),
            given=batch,
        )
    given = [images] if isinstance(images, Image.Image) else list(images)
    paths = [p for p in given if isinstance(p, str | Path)]
    if paths and len(paths) == len(given):
        items = [Item(id=valid_utf8(str(p)), path=as_path(p)) for p in paths]
        _refuse_twice("images", [item.id for item in items])
        return Sample(sample_by_class(items, n), lambda item: opened(model, item, placed=placed))
    if not given or not all(isinstance(p, Image.Image) for p in given):
        kinds = sorted({type(p).__name__ for p in given}) or "nothing"
        raise EquicamError(
            "images",
            needs="a folder, a manifest, pictures, paths, items or a batch",
            got=kinds,
            fix='"folder/"',
        )
    return Sample(
        sample_by_class(_numbered(len(given)), n),
        lambda item: (preprocess_image(model, given[item.index or 0]), Truth()),
        given=[to_rgb(picture) for picture in given],
    )


def _numbered(count: int) -> list[Item]:
    return [Item(id=f"{i:0{len(str(count - 1))}d}", path=Path(), index=i) for i in range(count)]


def _check(scores: Sequence[str], wanted: Sequence[Asked], angles: Sequence[Degrees]) -> None:
    if isinstance(scores, str) or not scores or (unknown := [s for s in scores if s not in SCORES]):
        got = repr(scores) if isinstance(scores, str) or not scores else ", ".join(map(repr, unknown))
        raise EquicamError("scores", needs=f"a list of {', '.join(SCORES)}", got=got, fix='["eq"]')
    _refuse_twice("scores", scores)
    for name in scores:
        if SCORES[name].of == "one view" and not any(one.staged for one in wanted):
            raise EquicamError(
                f"score {name!r}",
                needs="a method of one view that starts at features",
                got="none",
                fix='adding "grad-cam"',
            )
        if SCORES[name].of == "several views" and not any(one.several for one in wanted):
            raise EquicamError(
                f"score {name!r}", needs="a method of several views", got="none", fix='adding "equigrad-cam"'
            )
    if not angles or not all(map(math.isfinite, angles)) or any(a % 360 == 0 for a in angles):
        raise EquicamError("angles", needs="turns other than 0°", got=list(angles), fix="angles=[15, 45, 90]")
    _refuse_twice("angles", [a % 360 for a in angles])


def _refuse_twice(what: str, given: Sequence[Any]) -> None:
    twice = [one for i, one in enumerate(given) if one in given[:i]]
    if twice:
        raise EquicamError(what, needs="each one once", got=f"{twice[0]!r} twice", fix="leaving one out")


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[float], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not shown) as bar:
        task = bar.add_task("evaluating", total=total)
        yield lambda pictures: bar.advance(task, pictures)
