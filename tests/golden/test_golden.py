"""What the program did when the recording was made, it does still."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "options", [["--fast"], pytest.param([], marks=pytest.mark.slow)], ids=["fast", "whole"]
)
def test_the_program_does_what_was_recorded(options):
    """In a process of its own, with one thread and without the checks of shapes."""
    command = [sys.executable, str(Path(__file__).with_name("record.py")), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
