"""What is pinned by version and what is pinned by hash agree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HASHED = re.compile(r"^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}$")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pinned_version_has_a_hash():
    lines = [x for x in (ROOT / "requirements-hashed.txt").read_text().splitlines() if not x.startswith("#")]
    hashed = {normal(found[1]): found[2] for line in lines if (found := HASHED.match(line))}
    assert len(hashed) == len(lines)  # nothing but names, versions and hashes: no host, no address
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(name): version for name, at, version in (x.partition("==") for x in constraints) if at}
    assert len(pinned) > 50
    assert {name: hashed.get(name) for name in pinned} == pinned
