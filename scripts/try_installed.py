"""Try the installed package from outside the checkout: version, demonstration, report, and the review page answering.

python scripts/try_installed.py [--quick]     # only the version
"""

import subprocess
import sys
import tempfile
import urllib.request
from importlib import metadata
from pathlib import Path


def main() -> None:
    """Everything in a temporary folder, with the commands a user types."""
    import equicam

    home = Path(equicam.__file__).parent
    if "site-packages" not in home.parts:
        sys.exit(f"equicam comes from {home}, not from an installation")
    if metadata.version("equicam") != equicam.__version__:
        sys.exit(f"the metadata say {metadata.version('equicam')}, the code {equicam.__version__}")
    command = Path(sys.executable).parent / "equicam"
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run(
            [command, "--version"], check=True, capture_output=True, text=True, cwd=folder
        ).stdout
        if "--quick" in sys.argv:
            print(f"{said.strip()} from {home}")
            return
        subprocess.run([command, "demo", "--count", "12"], check=True, capture_output=True, cwd=folder)
        pages = list(Path(folder).rglob("report.html"))
        if len(pages) != 1:
            sys.exit(f"one report expected, found {len(pages)}")
        run = pages[0].parent
        answer = _first_page([str(command), "review", str(run), "--no-browser"])
    print(f"{said.strip()} from {home}: demo, report, review page ({answer})")


def _first_page(command: list[str]) -> int:
    """The status of the review page's own address."""
    page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in page.stdout or ():
            found = next((word for word in line.split() if word.startswith("http://127.0.0.1")), None)
            if found:
                # the token in the address becomes a cookie, and the page is behind that
                opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
                with opener.open(found, timeout=30) as answer:
                    return int(answer.status)
        sys.exit("the review page told no address")
    finally:
        page.terminate()
        page.wait(timeout=30)


if __name__ == "__main__":
    main()
