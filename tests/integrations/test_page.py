"""The code of docs/integrations.md, run by the programs it is about."""

import importlib.util
import re
from pathlib import Path

import pytest

import equicam
from equicam.demo import synthetic_patches

PAGE = (Path(__file__).parents[2] / "docs/integrations.md").read_text()


def blocks(heading: str) -> list[str]:
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict:
    """A folder with eight images, one of them damaged, and their run."""
    folder = tmp_path_factory.mktemp("integrations")
    for i, patch in enumerate(synthetic_patches(8)):
        patch.save(folder / f"{i}.png")
    photos = sorted(folder.glob("*.png"))
    photos[5].write_bytes(b"not an image")
    model = equicam.load("embedded", device="cpu")
    run = equicam.audit(folder, model, folder / "run", views=6)
    run.triage(budget=4)
    photos = [p for p in photos if p != photos[5]]
    return {"equicam": equicam, "model": model, "photos": photos, "home": folder}


def execute(block: str, names: dict) -> None:
    exec(compile(block, "integrations.md", "exec"), names)


def test_pandas_polars_and_duckdb_read_a_run(names, monkeypatch, capsys):
    monkeypatch.chdir(names["home"])
    rows = equicam.open_run("run").items.to_pylist()
    words = {word: sum(row["steadiness"] == word for row in rows) for word in ("steady", "unsteady")}
    assert sum(row["status"] == "ok" for row in rows) == 7
    pandas_code, polars_code, duckdb_code, join = blocks("pandas, polars, DuckDB")
    execute(pandas_code, names)
    assert (len(names["items"]), names["items"]["status"].eq("ok").sum()) == (8, 7)
    assert {word: names["items"]["steadiness"].eq(word).sum() for word in words} == words
    execute(polars_code, names)
    assert (names["items"].height, names["items"]["stability"].null_count()) == (8, 1)
    assert {word: (names["items"]["steadiness"] == word).sum() for word in words} == words
    execute(duckdb_code, names)
    duckdb = names["duckdb"]
    counted = duckdb.sql("SELECT steadiness, count(*) FROM 'run/items/*.parquet' GROUP BY ALL").fetchall()
    assert {word: dict(counted).get(word, 0) for word in words} == words
    execute(join, names)
    queue = equicam.open_run("run").queue()
    assert [rank for rank, _, _ in names["worst"].fetchall()] == [row["rank"] for row in queue]
    assert "steadiness" in capsys.readouterr().out


def test_a_saved_data_set_is_audited(names, monkeypatch):
    monkeypatch.chdir(names["home"])
    (code,) = blocks("Hugging Face datasets")
    execute(code, names)
    rows = names["run"].items.to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * 7
    e = equicam.explain(names["model"], names["data"][:2]["image"])
    assert e.stability.tolist() == pytest.approx([row["stability"] for row in rows[:2]], abs=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_gets_maps_and_numbers(names, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(names["home"])
    (code,) = blocks("TensorBoard")
    execute(code, names)
    read = EventAccumulator("logs")
    read.Reload()
    assert len(read.Tags()["images"]) == 7
    assert 0 <= read.Scalars("steady")[0].value <= 1
