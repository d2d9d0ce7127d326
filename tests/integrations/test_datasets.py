"""A data set that Hugging Face `datasets` saved is a source, and a hostile one is refused by name."""

import io
import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

import equicam
from equicam.demo import synthetic_patches
from equicam.errors import EquicamError
from equicam.images import arrow_streams, limited
from equicam.images.items import open_item, read_item
from equicam.images.sources import find_items

NAMES = ["negative", "positive"]
DATA = "data-00000-of-00001.arrow"


@pytest.fixture(scope="module")
def patches() -> list[Image.Image]:
    return synthetic_patches(6)


@pytest.fixture(scope="module")
def saved(patches, tmp_path_factory) -> Path:
    """A data set with two splits, one of them in three files, written by the library itself."""
    datasets = pytest.importorskip("datasets")
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=NAMES),
        "site": datasets.Value("string"),
    }
    columns = {"image": patches, "label": [0, 1, 1, 0, -1, None], "site": list("abcdef")}
    whole = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    folder = tmp_path_factory.mktemp("datasets") / "saved"
    splits = datasets.DatasetDict({"train": whole, "test": whole.select([4, 1])})
    splits.save_to_disk(folder, num_shards={"train": 3, "test": 1})
    return folder


def test_images_and_labels_are_those_of_the_library(saved, patches):
    items = find_items(saved, split="train")
    assert [item.id for item in items] == [f"{i:08}" for i in range(6)]
    assert [item.label for item in items] == [0, 1, 1, 0, None, None]
    assert len({item.path for item in items}) == 3
    for item, patch in zip(items, patches, strict=True):
        assert open_item(item).tobytes() == patch.tobytes()
    assert find_items(saved / "train") == items
    test = find_items(saved, split="test")
    assert [open_item(item).tobytes() for item in test] == [patches[i].tobytes() for i in (4, 1)]


def test_a_split_must_be_named(saved):
    with pytest.raises(EquicamError, match="needs a split, got none; try 'test', 'train'"):
        find_items(saved)
    with pytest.raises(EquicamError, match="needs a split, got 'val'"):
        find_items(saved, split="val")


def test_files_that_a_data_set_names_are_copied_into_it(tmp_path, patches):
    datasets = pytest.importorskip("datasets")
    patches[0].save(tmp_path / "a.png")
    named = datasets.Dataset.from_dict({"scan": [str(tmp_path / "a.png")]})
    named.cast_column("scan", datasets.Image()).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.png").unlink()
    (item,) = find_items(tmp_path / "saved")
    assert open_item(item).tobytes() == patches[0].tobytes()


def test_it_is_audited_evaluated_and_verified(saved, tmp_path):
    model = equicam.load("embedded", device="cpu")
    run = equicam.audit(saved, model, tmp_path / "run", split="train", views=4)
    rows = run.items.to_pylist()
    assert [row["label"] for row in rows] == ["0", "1", "1", "0", None, None]
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["sha256"] for row in rows}) == 6
    run.triage(budget=4)
    assert "<img" in run.report().read_text()
    assert run.verify(2, device="cpu").problems == ()
    options = {"methods": ["grad-cam"], "scores": ["insertion"], "n": 4}
    rows = equicam.evaluate(model, saved, split="train", **options).to_pylist()
    assert len({row["id"] for row in rows}) == 4


def png(patch: Image.Image) -> bytes:
    file = io.BytesIO()
    patch.save(file, "PNG")
    return file.getvalue()


IMAGES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_stream(folder: Path, table: pa.Table, **options) -> Path:
    """What `save_to_disk` writes, with any table."""
    folder.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(folder / DATA, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_table(table)
    features = {name: {"_type": "Image" if name == "image" else "ClassLabel"} for name in table.column_names}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": DATA}]}))
    return folder


def a_table(cells: list, **columns) -> pa.Table:
    return pa.table({"image": pa.array(cells, IMAGES), **columns})


def test_a_path_in_the_file_is_never_followed(tmp_path, patches):
    patches[0].save(tmp_path / "there.png")
    cells = [
        {"bytes": None, "path": str(tmp_path / "there.png")},
        {"bytes": None, "path": "../there.png"},
        None,
        {"bytes": png(patches[1]), "path": "/etc/passwd"},
    ]
    items = find_items(write_stream(tmp_path / "saved", a_table(cells)))
    for item, got in zip(items, ("a path", "a path", "none"), strict=False):
        with pytest.raises(EquicamError, match=f"needs the bytes of an image, got {got}"):
            open_item(item)
    assert open_item(items[3]).tobytes() == patches[1].tobytes()


def test_bytes_that_are_no_image_are_a_row_with_a_reason(tmp_path, patches):
    cells = [{"bytes": b"not an image", "path": None}, {"bytes": png(patches[0]), "path": None}]
    source = write_stream(tmp_path / "saved", a_table(cells, label=pa.array([0, 1])))
    run = equicam.audit(source, equicam.load("embedded", device="cpu"), tmp_path / "run", views=2)
    assert [row["status"] for row in run.items.to_pylist()] == ["bad", "ok"]


@pytest.mark.parametrize("name", ["../other.arrow", "/etc/passwd", "..", "", 7, None, "a\0b"])
def test_a_data_file_is_next_to_its_list(tmp_path, name):
    source = write_stream(tmp_path / "saved", a_table([{"bytes": b"x", "path": None}]))
    (source / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(EquicamError, match="needs plain names of files"):
        find_items(source)


STATES = ("", "[]", "[" * 100_000, '{"_data_files": 3}', '{"_data_files": []}', "\xff")


@pytest.mark.parametrize("text", STATES)
def test_a_hostile_list_of_files_is_refused(tmp_path, text):
    source = write_stream(tmp_path / "saved", a_table([{"bytes": b"x", "path": None}]))
    (source / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(EquicamError, match=r"state\.json"):
        find_items(source)


def test_streams_that_the_library_does_not_write_are_read_or_refused(tmp_path, monkeypatch):
    cells = [{"bytes": b"x" * 500, "path": None}] * 4
    words = pa.array(["a", "b", "a", "b"]).dictionary_encode()
    packed = write_stream(tmp_path / "compressed", a_table(cells, label=words), compression="zstd")
    for item in find_items(packed):
        assert read_item(item).data == b"x" * 500
    with pytest.raises(EquicamError, match="one column of images"):
        find_items(write_stream(tmp_path / "other", pa.table({"image": ["a.png"]})))
    monkeypatch.setattr(arrow_streams, "MAX_ROWS", 3)
    monkeypatch.setattr(limited, "inside", lambda: True)
    with pytest.raises(EquicamError, match="at most 3 rows, got 4"):
        find_items(write_stream(tmp_path / "many", a_table(cells)))


def test_offsets_outside_the_file_are_refused(tmp_path):
    """Without validation Arrow would read memory that is not the file's."""
    source = write_stream(tmp_path / "saved", a_table([{"bytes": b"abcdefgh" * 8, "path": None}] * 2))
    whole = (source / DATA).read_bytes()
    offsets = struct.pack("<iii", 0, 64, 128)
    assert whole.count(offsets) == 1
    (source / DATA).write_bytes(whole.replace(offsets, struct.pack("<iii", 0, 64, 2**30)))
    with pytest.raises(EquicamError, match="a whole Arrow stream"):
        find_items(source)


def test_damaged_streams_never_crash(tmp_path, patches):
    cells = [{"bytes": png(patch), "path": "a"} for patch in patches[:2]]
    source = write_stream(tmp_path / "saved", a_table(cells, label=pa.array([0, 1])))
    whole, chance = (source / DATA).read_bytes(), random.Random(0)
    assert len(find_items(source)) == 2
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(1200)] = chance.randrange(256)
        (source / DATA).write_bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))])
        arrow_streams._map.cache_clear()
        try:
            for item in find_items(source):
                open_item(item)
        except EquicamError:
            refused += 1
    assert refused > 100


IN_MEMORY = """
import sys
import datasets, equicam
from PIL import Image

data = datasets.Dataset.from_dict({"image": [Image.new("RGB", (96, 96))] * 3}).cast_column("image", datasets.Image())
model = equicam.load("embedded")
for given in (data, datasets.DatasetDict({"test": data}), data.to_iterable_dataset(), 3, None, [data]):
    for call in (
        lambda: equicam.audit(given, model, "run"),
        lambda: equicam.evaluate(model, given, methods=["grad-cam"]),
        lambda: equicam.explain(model, given),
    ):
        try:
            call()
        except equicam.EquicamError as error:
            print(error)
"""


def test_a_data_set_in_memory_is_refused_with_what_works(tmp_path):
    """In a process of its own: types are checked here, and callers' are not."""
    datasets = pytest.importorskip("datasets")
    command = [sys.executable, "-c", IN_MEMORY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 18, done.stderr
    advice = 'of Hugging Face; try data.save_to_disk("folder") and then "folder", or for explain its images'
    assert all(advice in line for line in lines[:9])
    assert not any(advice in line for line in lines[9:])
    assert lines[9].endswith('URL, got an object of type int; try "folder/"')
    assert not (tmp_path / "run").exists()
    data = datasets.Dataset.from_dict({"image": [Image.new("RGB", (96, 96))] * 3})
    data = data.cast_column("image", datasets.Image())
    data.save_to_disk(str(tmp_path / "folder"))
    model = equicam.load("embedded")
    assert len(equicam.audit(tmp_path / "folder", model, tmp_path / "run", views=2).items) == 3
    assert len(equicam.explain(model, data[:2]["image"], views=2)) == 2
