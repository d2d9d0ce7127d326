"""How long a user waits before anything happens: best of five, in processor time, so that neighbours do not count."""

import resource
import subprocess
import sys

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


def test_help_loads_neither_torch_nor_tables():
    heavy = "{'torch', 'pyarrow', 'scipy', 'matplotlib'}"
    code = f"import sys; import equicam.cli.app; sys.exit(', '.join(sorted({heavy} & sys.modules.keys())))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_the_review_server_loads_no_plots():
    code = "import sys; import equicam.runs.review.app; sys.exit(', '.join({'torch', 'matplotlib', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
