"""The benchmark of a million rows on a few hundred, so that it keeps running; and what a large run must not need."""

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "million.py"
FIRST_PAGE = """
import sys; from pathlib import Path
from equicam.runs.store import RunStore
from equicam.runs.review.queue import QueueLoader
queue = QueueLoader(RunStore(Path(sys.argv[1])), blind=True).current()
queue.row(queue.items[0]), queue.maps(queue.items[0])
sys.exit(", ".join({"torch", "scipy", "matplotlib"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def million():
    spec = importlib.util.spec_from_file_location("million", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its processes find it
    spec.loader.exec_module(module)
    module.CALIBRATION, module.SHARD_SIZE, module.PENDING_EVERY, module.TOP = 0, 64, 3, 2
    module.REVIEWED, module.LISTED = 3, 2
    return module


@pytest.mark.slow  # it starts servers, and waits for them
def test_every_measurement_runs_and_the_first_page_loads_little(million, tmp_path):
    million.link_images(tmp_path / "images", 400)
    figures = {}
    for name, step in million.STEPS.items():
        found = step(tmp_path)
        assert found, name
        figures |= found
        if name == "triage":
            command = [sys.executable, "-c", FIRST_PAGE, tmp_path / "run"]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert done.stderr.strip() == ""
    assert all(figure >= 0 for figure in figures.values())
    assert set(million.LIMITS) <= set(figures)


def test_the_body_of_an_answer_does_not_wait_for_its_header():
    from equicam.runs.review.server import listen

    with listen(None, 0) as listener, socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        with connection:
            assert connection.getpeername() == client.getsockname()
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
