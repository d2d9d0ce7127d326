"""How long a user waits before anything happens: best of five, in processor time, so that neighbours do not count."""

import resource
import subprocess
import sys

import pytest

HELP = "import sys; sys.argv = ['equicam', '--help']; from equicam.cli.app import app; app()"


def best_of_five(code: str) -> float:
    """Seconds of user and system time of a new interpreter that runs the code."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


def test_importing_takes_a_tenth_of_a_second():
    assert best_of_five("import equicam") - best_of_five("pass") <= 0.1


def test_help_takes_six_tenths_of_a_second():
    assert best_of_five(HELP) <= 0.6


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("cli.app", {"torch", "pyarrow", "scipy", "matplotlib"}),
        ("runs.review.app", {"torch", "matplotlib", "scipy"}),
        ("runs.report.tables", {"torch"}),
        ("images.formats", {"torch"}),
        ("images.sources", {"torch", "h5py"}),
    ],
)
def test_a_module_loads_nothing_heavy_that_it_does_not_need(module, heavy):
    code = f"import sys; import equicam.{module}; sys.exit(', '.join({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
