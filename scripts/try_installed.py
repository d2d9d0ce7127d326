"""Try the installed package outside the checkout: the version, the demo with its report, and the review page.

python scripts/try_installed.py [--quick]     # --quick checks only the version
"""

import subprocess
import sys
import tempfile
import urllib.request
from importlib import metadata
from pathlib import Path


def main() -> None:
    """Run the commands a user types, in a temporary folder."""
    import equicam

    home = Path(equicam.__file__).parent
    if "site-packages" not in home.parts:
        sys.exit(f"equicam comes from {home}, not from an installation")
    if metadata.version("equicam") != equicam.__version__:
        sys.exit(f"the metadata has {metadata.version('equicam')}, the code has {equicam.__version__}")
    command = Path(sys.executable).parent / "equicam"
    with tempfile.TemporaryDirectory() as folder:
        version = subprocess.run(
            [command, "--version"], check=True, capture_output=True, text=True, cwd=folder
        ).stdout
        if "--quick" in sys.argv:
            print(f"{version.strip()} from {home}")
            return
        subprocess.run([command, "demo", "--count", "12"], check=True, capture_output=True, cwd=folder)
        pages = list(Path(folder).rglob("report.html"))
        if len(pages) != 1:
            sys.exit(f"expected one report, found {len(pages)}")
        run = pages[0].parent
        status = _review_page_status([str(command), "review", str(run), "--no-browser"])
    print(f"{version.strip()} from {home}: demo, report, review page ({status})")


def _review_page_status(command: list[str]) -> int:
    """HTTP status of the address that `equicam review` prints."""
    page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in page.stdout or ():
            found = next((word for word in line.split() if word.startswith("http://127.0.0.1")), None)
            if found:
                # the page sets a cookie from the token in the address and needs it from then on
                opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
                with opener.open(found, timeout=30) as response:
                    return int(response.status)
        sys.exit("equicam review printed no address")
    finally:
        page.terminate()
        page.wait(timeout=30)


if __name__ == "__main__":
    main()
