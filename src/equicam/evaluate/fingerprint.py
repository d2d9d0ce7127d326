"""What identifies an evaluation: everything that decides its rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from equicam import __version__
from equicam.evaluate.loading import Sample, load_or_reason
from equicam.evaluate.spec import COVERAGE, EvaluationSpec, MapSpec
from equicam.explain import equivariant
from equicam.images.items import digest_groups, digest_items
from equicam.models.images import as_batch, preprocess_image
from equicam.models.weights import fingerprint
from equicam.readers.model import Model


def fingerprint_evaluation(
    model: Model, sample: Sample, spec: EvaluationSpec, map_specs: Sequence[MapSpec]
) -> dict[str, Any]:
    """Everything that decides the rows, by name, as JSON values."""
    options = {name: value for name, value in spec.recipe.to_json().items() if name != "method"}
    return {
        "model": model.name,
        "weights": fingerprint(model.module),
        "layer": model.layer,
        "preprocessing": _digest_preprocessing(model),
        "classes": model.classes,
        "methods": {one.name: _describe(one) for one in map_specs},
        "scores": list(spec.scores),
        "angles": [one.to_plain() for one in spec.presentations],
        "group": spec.group,
        "task": model.task,
        **options,
        "fill": spec.fill,
        "images": len(sample.items),
        "sample": digest_items(sample.items),
        "content": sample.content_digest(),
        "groups": digest_groups(sample.items),
        "equicam": __version__,
        "torch": torch.__version__,
    }


def digest_explainers(model: Model, sample: Sample, map_specs: Sequence[MapSpec]) -> dict[str, str]:
    """Digests of the maps that the caller's explainers give for the first readable image.

    Nothing else distinguishes one function from another.
    """
    explainers = {one.name: one.explainer for one in map_specs if one.explainer is not None}
    if not explainers:
        return {}
    loaded = (load_or_reason(sample.load, item).x for item in sample.items)
    first = next((x for x in loaded if x is not None), None)
    if first is None:
        return dict.fromkeys(explainers, "no image")
    x = as_batch(model, first[None])
    maps = {name: equivariant(fn, views=1)(x, 0).map for name, fn in explainers.items()}
    return {name: hashlib.sha256(m.half().cpu().numpy().tobytes()).hexdigest() for name, m in maps.items()}


def _digest_preprocessing(model: Model) -> str:
    """Digest of a synthetic image after preprocessing, which changes with any of its steps."""
    ramp = np.add.outer(np.arange(300) * 3, np.arange(260) * 5)[..., None] + np.array([0, 80, 160])
    found = preprocess_image(model, Image.fromarray((ramp % 256).astype(np.uint8)))
    return hashlib.sha256(found.contiguous().float().numpy().tobytes()).hexdigest()


def _describe(spec: MapSpec) -> str:
    """A description of a method that is the same from run to run, for fingerprints."""
    if spec.method is None:
        return COVERAGE
    m, f = spec.method, spec.method.fusion
    parts = [
        _name(spec.explainer or m.reader.read),
        _name(m.combine),
        f"{list(f.views.to_plain())}",
        f"{f.align_at}→{f.mean_at}",
        _name(f.weigh),
        *([] if m.stretched else ["not stretched"]),
    ]
    return " · ".join([*parts, spec.condition, f"coverage={spec.times_coverage}", f"blur={spec.blur}"])


def _name(fn: Any) -> str:
    """The name of a function with its options; an object of the caller's by the name of its class."""
    if isinstance(fn, partial):
        options = (f"{k}={_name(v) if callable(v) else repr(v)}" for k, v in fn.keywords.items())
        return f"{_name(fn.func)}({', '.join(options)})"
    return repr(fn) if is_dataclass(fn) else getattr(fn, "__qualname__", type(fn).__qualname__)
