import subprocess
import sys
import time

from PIL import Image
from typer.testing import CliRunner

import equicam
from equicam.cli import app


def test_methods_are_listed():
    result = CliRunner().invoke(app, ["methods"])
    assert result.exit_code == 0
    assert all(name in result.output for name in equicam.methods())


def test_the_demo_writes_overlays_and_says_where(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "made"), "--count", "2"])
    assert result.exit_code == 0, result.output
    pictures = sorted((tmp_path / "made").glob("*.png"))
    assert len(pictures) == 2
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.width > 800
            assert len(set(picture.convert("L").tobytes())) > 100


def test_importing_the_package_does_not_import_torch():
    code = "import sys, equicam; assert equicam.__version__; assert 'torch' not in sys.modules"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.perf_counter() - start < 5


def test_drawing_needs_no_torch():
    code = "import sys, equicam.report.overlay, equicam.data.synthetic; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
