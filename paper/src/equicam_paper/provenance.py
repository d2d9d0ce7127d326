"""Where rows come from: version, commit, weights, images, device and precision, kept once in every file of rows."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import equicam
from equicam import __version__
from equicam.errors import EquicamError
from equicam.images.items import Item, digest_items, item_digest
from equicam_paper.draws import describe_draw

if TYPE_CHECKING:
    from equicam_paper.context import Context

COMMIT = "EQUICAM_COMMIT"
"""An environment variable: the commit of a copy of the source that is no clone."""


def provenance(context: "Context") -> dict[str, Any]:
    """Everything that another person needs to check that they ran the same thing."""
    # weights of --extra, and images other than the sample, as an experiment used them
    own = (context.weights_digest, context.data_digest, len(context.sample))
    others = sorted(one for one in context.evaluated if one != own)
    found: dict[str, Any] = {
        "version": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "model": Path(context.model.name or "").name,
        "weights": context.weights_digest,
        "data": Path(context.data).name,
        "split": context.split,
        "images": context.data_digest,
        "n": len(context.sample),
        "groups": context.groups,
        "drawn": describe_draw(context.listing, context.sample, context.draw),
        "device": device_name(context.model.device),
        "dtype": _dtype(context),
        "compiled": bool(context.options.get("compiled", False)),
        "date": datetime.now(UTC).date().isoformat(),
    }
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
    given = context.options.get("dtype")
    if given is not None:
        return str(given).removeprefix("torch.")
    own = str(context.model.dtype).removeprefix("torch.")
    tf32 = context.model.device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return f"{own} (TF32)" if tf32 and own == "float32" else own


def describe(provenance: Mapping[str, Any]) -> str:
    """Where rows come from, on one line; the date is that of the newest."""
    p = provenance
    commit = f" at {p['commit']}" if p.get("commit") else ""
    compiled = ", compiled" if p.get("compiled") else ""
    groups = f" from {p['groups']} groups" if p.get("groups") else ""
    model = f"`{p['model']}`, " if p.get("model") else ""
    split = f", split {p['split']}" if p.get("split") else ""
    return (
        f"{model}equicam {p.get('version')}{commit}, torch {p.get('torch')}, {p.get('device')}, {p.get('dtype')}{compiled}; weights {_weights(p)}; "
        f"`{p.get('data')}`{split}: {p.get('drawn')}{groups}, digest `{str(p.get('images'))[:12]}`{_parts(p)}; {p.get('date')}"
    )


def _weights(provenance: Mapping[str, Any]) -> str:
    """The digests of all weights that were evaluated."""
    own = [provenance.get("weights")] if provenance.get("with_own", True) else []
    every = dict.fromkeys([*own, *(one["weights"] for one in provenance.get("evaluated", ()))])
    return ", ".join(f"`{str(one)[:12]}`" for one in every)


def _parts(provenance: Mapping[str, Any]) -> str:
    """The other images that were evaluated, by number and digest."""
    others = {
        one["images"]: one["n"]
        for one in provenance.get("evaluated", ())
        if one["images"] != provenance.get("images")
    }
    return "".join(f", and {n} with digest `{digest[:12]}`" for digest, n in others.items())
