"""What makes a run reproducible, as plain data: `manifest.json`."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from equicam.errors import EquicamError
from equicam.shards import differences

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Spec:
    """Everything that decides what the rows of a run are."""

    model: str | None  # what `load` was asked for; None: a module of the caller's
    weights: str  # SHA-256 over its tensors
    weights_from: str | None  # the file or name they came from
    layer: str
    layout: str
    preprocess: str
    classes: tuple[str, ...] | None
    method: str
    method_is: str  # reader, combine, angles, gate, in words
    angles: tuple[float, ...]
    fill: str
    as_published: bool
    dtype: str
    device: str  # its kind: cpu, cuda
    part: int  # pictures in a part
    calibrate: int  # pictures on which Eq is measured
    seed: int
    source: str
    split: str | None
    pictures: int
    data: str  # digest of ids, labels, boxes and order
    versions: tuple[tuple[str, str], ...]
    tau: float | None = None  # of a gate, where the caller set it
    gamma: float | None = None
    compiled: bool = False  # whether the network was
    schema: int = SCHEMA_VERSION

    def as_json(self) -> str:
        """Readable, and the same for the same run."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


def read_spec(text: str, *, where: str) -> Spec:
    """A manifest read back; one of another schema is refused."""
    try:
        found: dict[str, Any] = json.loads(text)
        if found.get("schema") != SCHEMA_VERSION:
            raise EquicamError(
                f"the run {where}", needs=f"schema version {SCHEMA_VERSION}", got=found.get("schema"),
                fix="the equicam that wrote it",
            )  # fmt: skip
        found["angles"] = tuple(found["angles"])
        found["classes"] = None if found["classes"] is None else tuple(found["classes"])
        found["versions"] = tuple((name, version) for name, version in found["versions"])
        return Spec(**{f.name: found[f.name] for f in fields(Spec)})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, EquicamError):
            raise
        raise EquicamError(
            f"the run {where}", needs="a manifest.json of ours", got=error, fix="another RUN"
        ) from error


def refuse_difference(before: Spec, now: Spec, *, where: str) -> None:
    """Another model, weights, method, option or set of pictures does not go on with this run."""
    old, new = json.loads(before.as_json()), json.loads(now.as_json())
    # where the same weights or pictures lie is not what they are
    for free in ("source", "weights_from"):
        old.pop(free), new.pop(free)
    if found := differences(old, new):
        raise EquicamError(
            f"resuming {where}",
            needs="what it was begun with",
            got="; ".join(found),
            fix="another --out, or those settings",
        )
