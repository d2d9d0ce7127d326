"""The paper's protocol on anybody's pictures: every method on the same pictures and views, every score a row.

The unit of work is a part, a fixed run of the sample: floors compare pictures of one part, and an evaluation that is
cut off goes on at the first part that is not there.
"""

import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from equicam import __version__
from equicam.data.items import Item, digest, open_item, readable, spread, upright_box
from equicam.data.pictures import rgb
from equicam.data.sources import find_items
from equicam.errors import EquicamError
from equicam.explain import equivariant, with_engine
from equicam.geometry import Degrees, Fill, Views
from equicam.models.images import Images, as_batch, framed, preprocessed, stacked
from equicam.models.model import Engine, Model, wrap
from equicam.models.weights import fingerprint
from equicam.parts import Parts, plain, refuse_another, write_table
from equicam.scores.asked import Asked, Foreign, Methods, World, asked, described
from equicam.scores.controls import randomised
from equicam.scores.equivariance import ANGLES
from equicam.scores.look import Plan, look
from equicam.scores.protocol import SCORES, Found, Truth, predictions
from equicam.scores.rows import table, unread

A_PART = 16
"""Pictures in a part."""
PLACED = {"energy", "pointing", "box-iou"}
"""Scores that ask where the object is."""
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
    views: int | Views | None = None,
    angles: Sequence[Degrees] = ANGLES,
    fill: Fill | None = None,
    as_published: bool = False,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    engine: Engine | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = False,
) -> pa.Table:
    """Score methods on pictures: one row an image, method, score, angle and region.

    `images` is a folder or manifest, pictures, paths, items or a preprocessed batch; `n` a class-spread sample of
    them; `methods` names, or a dict of names and methods, fusions or explainers `(x, target) → map` of yours. With
    `out` (a Parquet file) an evaluation that was cut off goes on where it stopped.
    """
    if not isinstance(model, Model):
        model = wrap(model, example=as_batch(None, images) if isinstance(images, Tensor) else None)
    model = with_engine(model, engine)
    placed = bool(PLACED & set(scores))
    sample = _sample(model, images, n, split, placed)
    wanted = asked(methods, views=views, as_published=as_published)
    _check(scores, wanted, angles)
    models: dict[World, Model] = {"plain": model, "shuffled": model}
    if any(one.world == "random-weights" for one in wanted):
        models["random-weights"] = randomised(model, seed=seed)
    plan = Plan(
        models=models,
        asked=wanted,
        angles=tuple(angles),
        fill=fill or ("zeros" if as_published else "reflect"),
        as_published=as_published,
        traced="stages" in scores,
        several=bool({"peum", "disagreement", "calibration"} & set(scores)),
        dtype=dtype,
        chunk=chunk,
        seed=seed,
    )
    about = {
        "model": model.name,
        "weights": fingerprint(model.module),
        "layer": model.layer,
        "preprocessing": _probe(model),
        "classes": model.classes,
        "methods": {one.name: described(one) for one in wanted},
        "scores": list(scores),
        "angles": [float(a) for a in angles],
        "fill": plan.fill,
        "as_published": as_published,
        "dtype": str(dtype),
        "engine": model.engine,
        "seed": seed,
        "pictures": len(sample.items),
        "sample": digest(sample.items),
        "content": sample.content(),
        "equicam": __version__,
        "torch": torch.__version__,
    }
    if out is not None:
        about["explainers"] = _probed(model, sample, wanted)
    parts = _even(sample.items)

    def computed(pending: Sequence[int], done: Callable[[float], None]) -> Iterator[tuple[int, pa.Table]]:
        with ThreadPoolExecutor(8) as pool:
            opened = [parts[number] for number in pending]
            for number, loaded in zip(pending, _ahead(pool, opened, sample.load), strict=True):
                yield number, _part(plan, model, sample, scores, loaded, done)

    with _bar(len(sample.items), progress) as done:
        if out is None:
            tables = [rows for _, rows in computed(range(len(parts)), done)]
            return _stamped(pa.concat_tables(tables), about)
        return _kept(Path(out), len(parts), about, computed, done)


@dataclass(frozen=True)
class Sample:
    """The pictures of an evaluation, in its order, and what opens one."""

    items: list[Item]
    load: Callable[[Item], tuple[Float[Tensor, "c H W"], Truth]]
    names: tuple[str, ...] = ()  # the labels of the whole source, where they are words
    given: Sequence[Any] | Tensor = ()  # pictures or a batch in memory

    def content(self) -> str:
        """What tells these pictures from others of the same names: their files' size and time, or their pixels."""
        found = hashlib.sha256()
        for item in self.items:
            if len(self.given):
                one = self.given[item.index or 0]
                found.update(
                    one.cpu().contiguous().numpy().tobytes() if isinstance(one, Tensor) else one.tobytes()
                )
            else:
                try:
                    there = item.path.stat()
                    found.update(f"{item.id}\0{there.st_size}\0{there.st_mtime_ns}\0".encode())
                except (OSError, ValueError):
                    found.update(f"{item.id}\0absent\0".encode())
        return found.hexdigest()


def _even(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Parts of even size, so that no picture is left without others to compare it with."""
    count = -(-len(items) // A_PART)
    edges = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def _probe(model: Model) -> str:
    """What preprocessing makes of one drawn picture: tells any change in it, whatever it is made of."""
    ramp = np.add.outer(np.arange(300) * 3, np.arange(260) * 5)[..., None] + np.array([0, 80, 160])
    seen = preprocessed(model, Image.fromarray((ramp % 256).astype(np.uint8)))
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


@torch.no_grad()
def _part(
    plan: Plan,
    model: Model,
    sample: Sample,
    scores: Sequence[str],
    loaded: Sequence[tuple[Item, Tensor | None, Truth, str]],
    done: Callable[[float], None],
) -> pa.Table:
    bad = [(item.id, reason) for item, tensor, _, reason in loaded if tensor is None]
    good = [(item, tensor, truth) for item, tensor, truth, _ in loaded if tensor is not None]
    done(len(bad))
    if not good:
        return unread(bad)
    device = model.device
    # inference tensors cannot join a backward pass, and our own algebra is never autocast
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        x = as_batch(model, stacked([tensor for _, tensor, _ in good]))
        ids = [item.id for item, _, _ in good]
        truth = [_on(t, device) for _, _, t in good]
        found = look(plan, ids, x, truth, lambda share: done(share * len(good)))
        found = replace(found, truth=_labelled(found, [item for item, _, _ in good], model, sample))
        tables = [table(ids, predictions(found))]
        tables += [table(ids, SCORES[name].rows(found)) for name in scores]
    return pa.concat_tables([*tables, unread(bad)])


def _kept(
    out: Path,
    count: int,
    about: dict[str, Any],
    computed: Callable[[Sequence[int], Callable[[float], None]], Iterator[tuple[int, pa.Table]]],
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
    pending = parts.pending(count)
    done((count - len(pending)) * A_PART)
    for number, rows in computed(pending, done):
        parts.write(number, rows)
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


def _sample(model: Model, images: Any, n: int | None, split: str | None, placed: bool) -> Sample:
    if isinstance(images, str | Path) or (
        isinstance(images, list | tuple) and images and isinstance(images[0], Item)
    ):
        found = find_items(images, split=split) if isinstance(images, str | Path) else list(images)
        names = tuple(sorted({i.label for i in found if isinstance(i.label, str)}))
        return Sample(spread(found, n), lambda item: _opened(model, item, placed), names)
    if split is not None:
        raise EquicamError("split", needs="a folder or manifest", got=type(images).__name__, fix="split=None")
    if isinstance(images, Tensor):
        batch = as_batch(model, images)
        return Sample(
            spread(_numbered(len(batch)), n), lambda item: (batch[item.index or 0], Truth()), given=batch
        )
    given = [images] if isinstance(images, Image.Image) else list(images)
    paths = [p for p in given if isinstance(p, str | Path)]
    if paths and len(paths) == len(given):
        items = [Item(id=readable(str(p)), path=Path(p)) for p in paths]
        _refuse_twice("images", [item.id for item in items])
        return Sample(spread(items, n), lambda item: _opened(model, item, placed))
    if not given or not all(isinstance(p, Image.Image) for p in given):
        kinds = sorted({type(p).__name__ for p in given}) or "nothing"
        raise EquicamError(
            "images",
            needs="a folder, a manifest, pictures, paths, items or a batch",
            got=kinds,
            fix='"folder/"',
        )
    return Sample(
        spread(_numbered(len(given)), n),
        lambda item: (preprocessed(model, given[item.index or 0]), Truth()),
        given=[rgb(picture) for picture in given],
    )


def _numbered(count: int) -> list[Item]:
    return [Item(id=f"{i:0{len(str(count - 1))}d}", path=Path(), index=i) for i in range(count)]


def _opened(model: Model, item: Item, placed: bool = True) -> tuple[Float[Tensor, "c H W"], Truth]:
    """A picture as the model's input, and its boxes and label region in the same frame where a score asks for them."""
    picture = open_item(item)
    if not placed:
        return preprocessed(model, picture), Truth()
    size = (picture.width, picture.height)
    by_area = sorted(item.boxes, key=lambda b: -(b[2] - b[0]) * (b[3] - b[1]))
    marked = [framed(model, size, upright_box(item, size, b)) for b in by_area]
    boxes = [mask for mask in (m >= 0.5 for m in marked) if mask.any()]
    region = None if item.region is None else framed(model, size, upright_box(item, size, item.region))
    if region is not None and region.sum() < 1:
        region = None
    cropped = (bool(item.boxes) and not boxes) or (item.region is not None and region is None)
    truth = Truth(boxes=torch.stack(boxes) if boxes else None, region=region, cropped=cropped)
    return preprocessed(model, picture), truth


def _labelled(found: Found, items: Sequence[Item], model: Model, sample: Sample) -> list[Truth]:
    """Labels as class numbers: numbers themselves, the model's own names, or names in order where it has none.

    In order of name is how folders of classes are trained on; it is used for ImageNet's synsets too, and only where
    there are as many names as classes.
    """
    outputs = found.said.probs.shape[-1]
    names = sample.names if len(sample.names) == outputs else ()
    synsets = bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)
    order = names if synsets or not model.classes else model.classes
    made = []
    for item, truth in zip(items, found.truth, strict=True):
        label = item.label
        if isinstance(label, str):
            label = order.index(label) if label in order else int(label) if label.isdecimal() else label
        if isinstance(label, int) and 0 <= label < outputs:
            made.append(replace(truth, label=label))
        elif label is not None:
            made.append(
                replace(truth, unknown=f"label {item.label!r} is none of the model's {outputs} classes")
            )
        else:
            made.append(truth)
    return made


def _on(truth: Truth, device: torch.device) -> Truth:
    boxes, region = truth.boxes, truth.region
    return replace(
        truth,
        boxes=None if boxes is None else boxes.to(device),
        region=None if region is None else region.to(device),
    )


def _ahead(
    pool: ThreadPoolExecutor, parts: Sequence[Sequence[Item]], load: Callable[[Item], tuple[Tensor, Truth]]
) -> Iterator[list[tuple[Item, Tensor | None, Truth, str]]]:
    """Parts with their pictures opened, the next one while this one is worked on; a bad picture has a reason."""

    def tried(item: Item) -> tuple[Item, Tensor | None, Truth, str]:
        try:
            return (item, *load(item), "")
        except (
            EquicamError,
            OSError,
            ValueError,
            ArithmeticError,
            MemoryError,
            RuntimeError,
            SystemError,
        ) as error:
            return item, None, Truth(), str(error) or type(error).__name__

    waiting: list[list[Future[tuple[Item, Tensor | None, Truth, str]]]] = []
    for part in parts:
        waiting.append([pool.submit(tried, item) for item in part])
        if len(waiting) > 1:
            yield [opened.result() for opened in waiting.pop(0)]
    for rest in waiting:
        yield [opened.result() for opened in rest]


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
