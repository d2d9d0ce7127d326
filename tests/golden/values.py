"""How what the program does is kept, and compared: numbers, and documents without what varies."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

RENAMED = {
    "more_reviews": "more_readings",
    "outside_both_samples": "elsewhere",
    "wrong_outside_both_samples": "wrong_elsewhere",
}
"""A field's or file's name in the program, and ours where it is another."""
VARIES = """browser bytes digests equicam file hash json last_hash mark mtime_ns out page path report run seconds
    source version versions worst"""
TEXTS = "about description error needs reason_values sentence text title"
GOES = """as_published comparison differences disagreement doubt evidence exposed exports.json median_disagreement
    median_doubt median_peum_reference median_signal peak-jumps peum_reference protocol ranked_by sanity scales schema signal
    triage.json values"""
"""Fields, codes and files that the redesign may take away, or show in another scale."""


def project(values: Any, digits: int = 6) -> Any:
    """A few numbers as they are; of more, what tells two arrays apart."""
    array = np.asarray(values, dtype=np.float64)
    if array.size <= 10:
        return rounded(array.tolist(), digits)
    flat = np.nan_to_num(array.ravel())
    weights = np.random.default_rng(flat.size).standard_normal((8, flat.size)) / flat.size**0.5
    numbers = rounded([flat.mean(), flat.std(), *(weights @ flat)], digits)
    return {"shape": list(array.shape), "undefined": int(np.isnan(array).sum()), "numbers": numbers}


def rounded(value: Any, digits: int = 6) -> Any:
    if isinstance(value, list):
        return [rounded(one, digits) for one in value]
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.{digits}g}")
    return value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


PATTERNS = {
    "[0-9a-f]{64}": "digest",
    "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "id",
    r"\d{4}-\d\d-\d\dT.*": "time",
    r"(\S+\s+){5,}\S+": "sentence",
    "/.*/(.*)": r"\1",
    r"(\w+) \d+\.[\d.]+.*": r"\1",
}
"""Texts that vary, and what is kept of them: of a path its last name, of a reader with its version the reader."""


def left_out() -> list[str]:
    return f"{VARIES} {GOES} {TEXTS}".split()


def plain(value: Any) -> Any:
    """A document without what varies or goes; of sentences only whether there are any."""
    if isinstance(value, dict):
        kept = [name for name, one in value.items() if name not in left_out() and not is_said(name, one)]
        return {RENAMED.get(name, name): plain(value[name]) for name in kept}
    if isinstance(value, list):
        return [plain(one) for one in value if not (isinstance(one, dict) and one.get("code") in left_out())]
    if isinstance(value, str):
        kept = [re.sub(one, text, value) for one, text in PATTERNS.items() if re.fullmatch(one, value)]
        return kept[0] if kept else value
    return rounded(value)


def is_said(name: str, value: Any) -> bool:
    """Whether these are reasons in sentences, not as codes."""
    return name == "reasons" and isinstance(value, list) and {*map(type, value)} <= {str}


def differences(name: str, was: Any, now: Any, tolerance: float) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            drawn = key in ("low", "high")  # of an interval, from resamples
            if key in was and key in now:
                yield from differences(f"{name}/{key}", was[key], now[key], 0.1 if drawn else tolerance)
            else:
                yield f"{name}/{key}: {'new' if key in now else 'gone'}"
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, pair in enumerate(zip(was, now, strict=True)):
            yield from differences(f"{name}[{i}]", *pair, tolerance)
    elif (
        not (type(was) is type(now) is float and abs(was - now) <= tolerance * max(abs(was), 0.1))
        and was != now
    ):
        yield f"{name}: {str(was)[:90]} → {str(now)[:90]}"
