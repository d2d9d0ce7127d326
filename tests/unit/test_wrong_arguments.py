"""Arguments of the wrong kind are refused in our form, with what would have been right."""

import subprocess
import sys

import numpy as np
import pytest

import equicam
from equicam import EquicamError
from tests.hostile.generate import encode

CALLS = {
    'equicam.Run("run")': "try equicam.open_run(folder)",
    "equicam.open_run(3)": "needs the path of its folder, got 3",
    "equicam.compare(3, 4)": "needs the path of its folder, got 3",
    'equicam.explain("embedded", torch.zeros(1, 3, 8, 8))': "try equicam.load('embedded')",
    'equicam.wrap(torch.nn.Sequential(torch.nn.Flatten()), layer="0", task="regresion")': 'try task="regression"',
    'equicam.audit(".", equicam.load("embedded"), "run", target=len)': "needs a class by name or number, got builtin_function_or_method",
}
"""Calls, and a part of their error."""
SCRIPT = """
import sys
import torch, equicam

for call in sys.argv[1:]:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""


def test_the_error_says_what_to_write(tmp_path):
    """In a process of its own: under pytest the types are checked first."""
    (tmp_path / "a.png").write_bytes(encode("png"))
    command = [sys.executable, "-c", SCRIPT, *CALLS]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for line, advice in zip(found.stdout.splitlines(), CALLS.values(), strict=True):
        assert line.startswith("EquicamError ")
        assert advice in line
    assert not (tmp_path / "run").exists()


def test_pixels_of_an_array_get_advice_for_arrays():
    with pytest.raises(EquicamError, match=r"x\.astype\(np\.uint8\) of an array"):
        equicam.explain(equicam.load("embedded"), np.full((1, 3, 96, 96), 200.0, np.float32))


def test_a_run_of_one_view_has_no_report_and_says_so(tmp_path):
    (tmp_path / "a.png").write_bytes(encode("png"))
    run = equicam.audit(tmp_path, equicam.load("embedded"), tmp_path / "run", views=1, workers=1)
    with pytest.raises(EquicamError, match="several views of each image") as refused:
        run.report()
    assert "triage" not in str(refused.value)
