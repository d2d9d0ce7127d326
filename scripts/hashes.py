"""Write requirements-hashed.txt: every package that `make setup` installs, with the SHA-256 of its file.

    python -m pip install --dry-run --ignore-installed --report report.json -c constraints.txt '.[dev]' ./paper
    python scripts/hashes.py report.json

The report is pip's own account of what it would install here; only names, versions and hashes are kept.
"""

import json
import platform
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "requirements-hashed.txt"


def main() -> None:
    """Write the file."""
    installed = json.loads(Path(sys.argv[1]).read_text())["install"]
    lines = []
    for one in installed:
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest:  # the project itself has none
            lines.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{digest}")
    machine = (
        f"{platform.system()} {platform.machine()}, Python {'.'.join(platform.python_version_tuple()[:2])}"
    )
    head = (
        f"# What `make setup` installs on {machine}, by SHA-256. Made by scripts/hashes.py.\n"
        "# pip install --require-hashes -r requirements-hashed.txt && pip install --no-deps -e .\n"
    )
    TARGET.write_text(head + "\n".join(sorted(lines)) + "\n")
    print(f"{len(lines)} packages in {TARGET.name}")


if __name__ == "__main__":
    main()
