"""Which images are drawn, and where rows come from: version, commit, weights, images, device and precision."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import equicam
from equicam import __version__
from equicam.errors import EquicamError
from equicam.images.items import Item, digest_items, item_digest, sample_by_class

if TYPE_CHECKING:
    from equicam_paper.context import Context

AUTHORS_SEED = 42
FILES_PER_CLASS, TAKEN_PER_CLASS = 15, 10  # the first validation images of every class; those drawn of them
COMMIT = "EQUICAM_COMMIT"  # in the environment: the commit of a copy of the source that is no clone


def authors_slots(classes: int) -> list[list[int]]:
    """The positions that the authors' loader draws in the sorted files of each class, in the order drawn."""
    rng = np.random.RandomState(AUTHORS_SEED)
    return [rng.choice(FILES_PER_CLASS, TAKEN_PER_CLASS, replace=False).tolist() for _ in range(classes)]


def authors_draw(items: Sequence[Item]) -> list[Item]:
    """The authors' 10,000 images, first slot of every class first, from a source with 15 images of each class."""
    by_class: dict[int | str | None, list[Item]] = {}
    for item in items:
        by_class.setdefault(item.label, []).append(item)
    sizes = {len(files) for files in by_class.values()}
    if sizes != {FILES_PER_CLASS}:
        needs = f"{FILES_PER_CLASS} images of every class, a folder each, as the authors' download keeps them"
        got = f"{len(by_class)} classes of {min(sizes, default=0)} to {max(sizes, default=0)}"
        raise EquicamError("--draw authors", needs, got, "no --draw: a class-spread sample")
    order = sorted(by_class, key=lambda name: (str(type(name)), name))
    files = [sorted(by_class[name], key=lambda item: item.id) for name in order]
    slots_of = [[of[i] for i in slots] for of, slots in zip(files, authors_slots(len(files)), strict=True)]
    return [item for slot in zip(*slots_of, strict=True) for item in slot]


def draw_sample(items: Sequence[Item], n: int | None, draw: str = "") -> list[Item]:
    """`n` images in the order of the draw; `draw` is `authors`, or empty for a class-spread sample."""
    if draw == "authors":
        chosen, classes = authors_draw(items), len(items) // FILES_PER_CLASS
        if n is not None and n < classes:  # the first slot of evenly spaced classes
            return [chosen[round(k * classes / n)] for k in range(n)]
        return chosen[:n]
    if draw:
        raise EquicamError("--draw", "authors", repr(draw), "--draw authors, or none")
    return sample_by_class(items, n)


def describe_draw(items: Sequence[Item], sample: Sequence[Item], draw: str = "") -> str:
    """How the sample was drawn, in words."""
    if draw == "authors":
        each = f"{TAKEN_PER_CLASS} per class that their loader takes with seed {AUTHORS_SEED}"
        return f"the authors' draw: {len(sample):,} of the {each}"
    if len(sample) == len(items):
        return f"all {len(items):,} images of the source; not the authors' draw"
    how = "evenly" if all(item.label is None for item in items) else "spread over classes, by name"
    return f"{len(sample):,} of {len(items):,} images, {how}; not the authors' draw"


def provenance(context: "Context") -> dict[str, Any]:
    """Everything that another person needs to check that they ran the same thing."""
    # weights of --extra, and images other than the sample, as an experiment used them
    own = (context.weights_digest, context.data_digest, len(context.sample))
    others = sorted(one for one in context.evaluated if one != own)
    found: dict[str, Any] = {
        "version": __version__, "commit": commit(), "torch": torch.__version__, "model": Path(context.model.name or "").name,
        "weights": context.weights_digest, "data": Path(context.data).name, "split": context.split,
        "images": context.data_digest, "n": len(context.sample), "groups": context.groups,
        "drawn": describe_draw(context.listing, context.sample, context.draw),
        "device": device_name(context.model.device), "dtype": _dtype(context),
        "compiled": bool(context.options.get("compiled", False)), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    if others:
        found["evaluated"] = [one._asdict() for one in others]
        found["with_own"] = own in context.evaluated
    return found


@cache
def commit() -> str | None:
    """The commit of the source, marked where files of either package differ from it; None outside of a clone."""
    if given := os.environ.get(COMMIT):
        return given
    git, packages = shutil.which("git"), [Path(equicam.__file__).parent, Path(__file__).parent]
    if git is None:
        return None

    def run_git(*words: str) -> str | None:
        command = [git, "-C", str(packages[0]), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        return done.stdout.strip() if done.returncode == 0 else None

    modules = [str(package / "__init__.py") for package in packages]
    if run_git("ls-files", "--error-unmatch", *modules) is None:  # a copy inside somebody else's repository
        return None
    found = run_git("rev-parse", "--short=12", "HEAD")
    changed = run_git("status", "--porcelain", "--", *map(str, packages))
    return f"{found} with changes" if found and changed else found


def content_digest(items: Sequence[Item]) -> str:
    """SHA-256 of ids, annotations and the contents of the files, in order."""
    total = hashlib.sha256(digest_items(items).encode())
    for item in items:
        try:
            total.update(item_digest(item).encode())
        except EquicamError:
            total.update(b"unreadable")
    return total.hexdigest()


def device_name(device: torch.device) -> str:
    """A GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def _dtype(context: "Context") -> str:
    own = str(context.options.get("dtype") or context.model.dtype).removeprefix("torch.")
    tf32 = context.model.device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return f"{own} (TF32)" if tf32 and own == "float32" and not context.options.get("dtype") else own


def describe(provenance: Mapping[str, Any]) -> str:
    """Where rows come from, on one line; the date is that of the newest."""
    p = provenance
    commit = f" at {p['commit']}" if p.get("commit") else ""
    compiled = ", compiled" if p.get("compiled") else ""
    groups = f" from {p['groups']} groups" if p.get("groups") else ""
    model = f"`{p['model']}`, " if p.get("model") else ""
    split = f", split {p['split']}" if p.get("split") else ""
    own = [p.get("weights")] if p.get("with_own", True) else []
    every = dict.fromkeys([*own, *(one["weights"] for one in p.get("evaluated", ()))])
    weights = ", ".join(f"`{str(one)[:12]}`" for one in every)
    others = {one["images"]: one["n"] for one in p.get("evaluated", ()) if one["images"] != p.get("images")}
    parts = "".join(f", and {n} with digest `{digest[:12]}`" for digest, n in others.items())
    return (
        f"{model}equicam {p.get('version')}{commit}, torch {p.get('torch')}, {p.get('device')}, {p.get('dtype')}{compiled}; "
        f"weights {weights}; `{p.get('data')}`{split}: {p.get('drawn')}{groups}, digest `{str(p.get('images'))[:12]}`{parts}; {p.get('date')}"
    )
