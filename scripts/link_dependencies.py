"""Fill a fresh virtual environment with the declared dependencies of a wheel, taken from this environment.

    .venv/bin/python scripts/link_dependencies.py dist/equicam-….whl .venv-dist [--extra review]

Only the requirements that the wheel's metadata declare, and theirs in turn, are linked: an undeclared import fails
there as it would after `pip install`, and nothing is downloaded twice.
"""

import argparse
import os
import shutil
import sysconfig
from collections import deque
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement


def main() -> None:
    """Link every file of every required distribution."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    args = parser.parse_args()
    info = next(p for p in ZipPath(args.wheel).iterdir() if p.name.endswith(".dist-info"))
    base = Path(sysconfig.get_path("purelib"))
    target = args.environment / base.relative_to(Path(sysconfig.get_path("data")))
    found = required(PathDistribution(info), args.extra)  # type: ignore[arg-type]
    for one in found:
        link(one, target)
    print(f"{len(found)} distributions linked into {target}")


def required(wheel: Distribution, extras: list[str]) -> list[Distribution]:
    """Everything the wheel requires with these extras, each distribution once."""
    found: dict[str, Distribution] = {}
    pending = deque((r, ("", *extras)) for r in wheel.requires or ())
    visited: set[tuple[str, tuple[str, ...]]] = set()
    while pending:
        line, chosen = pending.popleft()
        need = Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in chosen):
            continue
        if (key := (need.name, tuple(sorted(need.extras)))) in visited:
            continue
        visited.add(key)
        one = found.setdefault(need.name, distribution(need.name))
        if not need.specifier.contains(one.version, prereleases=True):
            raise SystemExit(f"{need} is declared, {one.version} is installed; try make setup")
        pending.extend((r, ("", *need.extras)) for r in one.requires or ())
    return list(found.values())


def link(one: Distribution, target: Path) -> None:
    """Hard links where the file system allows them, copies elsewhere; scripts stay behind."""
    for file in one.files or ():
        if ".." in file.parts:
            continue
        source, copy = Path(str(file.locate())), target / file
        if source.exists() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, copy)
            except OSError:
                shutil.copy2(source, copy)


if __name__ == "__main__":
    main()
