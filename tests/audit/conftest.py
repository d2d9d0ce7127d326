"""StoredMaps patches, commands, and commands as processes of their own: what is killed here is really killed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.demo import synthetic_patches
from tests.conftest import recipe

COMMAND = [sys.executable, "-c", "from equicam.cli.app import app; app()"]
SOURCES = str(Path(__file__).parents[2] / "src")
PATCHES = 24
OPTIONS = ("--views", "6", *recipe("run.calibrate = 6", "run.shard_size = 4"))
ENV = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCES}


def equicam_process(*arguments: object, **options) -> subprocess.Popen:
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": ENV}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **(piped | options))


def equicam_command(*arguments: object, **options) -> tuple[int, str]:
    """A command to its end: in this process, which has torch already, unless its folder or environment is another."""
    if options:
        done = equicam_process(*arguments, **options)
        said, _ = done.communicate(timeout=300)
        return done.returncode, said
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ENV has it: sums in the same order
    try:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))
    finally:
        torch.set_num_threads(threads)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_command(*arguments: object, code: int = 0, **options) -> str:
    """What a command says, which must end with this code."""
    ended, said = equicam_command(*arguments, **options)
    assert ended == code, said
    return said


def equicam_answer(*arguments: object) -> dict:
    """The document that a command prints with --json, which its schema accepts."""
    text = run_command(*arguments, "--json", "--quiet")
    schema = Path(equicam.__file__).parent / "schemas" / f"{arguments[0]}.json"
    jsonschema.validate(found := json.loads(text), json.loads(schema.read_text()))
    return found


@pytest.fixture(scope="session")
def patches(tmp_path_factory) -> Path:
    """Twenty-four synthetic patches."""
    folder = tmp_path_factory.mktemp("patches")
    for i, patch in enumerate(synthetic_patches(PATCHES)):
        patch.save(folder / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="session")
def whole(patches, tmp_path_factory) -> Path:
    """A finished run that nothing disturbed; tests that change one copy it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    said = run_command("audit", patches, "--out", out, *OPTIONS)
    assert f"{PATCHES} images explained, 0 could not be" in said
    assert f"equicam triage {out}" in said
    return out


@pytest.fixture
def out(whole, tmp_path) -> Path:
    """A copy of the finished run, for a test that changes it."""
    return shutil.copytree(whole, tmp_path / "run")
