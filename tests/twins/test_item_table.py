"""Items as columns against items as objects, the slow way: the same items, order, sample, digest and texts."""

import pickle
import random
from pathlib import Path

import pytest

from equicam.images.files import FileStat, RemotePath, file_stats
from equicam.images.item_table import Items
from equicam.images.items import Item, _scan_order, digest_items, sample_by_class, valid_utf8
from equicam.images.sources import SUFFIXES, list_items
from equicam.rasters.options import RasterWindow, Tiling, window_id

NAMES = ("a", "a-b", "a.b", "ä", "𝔸", "z\\q", "A", "0", "a b", "byte\udcff")


def random_items(rng, count):
    """Items with every kind of path, label and annotation, in no order."""
    found = []
    for i in range(count):
        name = f"{rng.choice(NAMES)}/{rng.choice(NAMES)}{i}.png"
        path = rng.choice([Path(name), Path("/root") / name, RemotePath(f"s3://bucket/{name}")])
        if isinstance(path, RemotePath) and rng.random() < 0.5:
            stat = FileStat(i, rng.choice([None, 10**18 + i]))
            path = RemotePath(path.url, stat, allowed=rng.random() < 0.5)
        label = rng.choice([None, 7, -(10**17), "7", 'a "quoted" ü'])
        boxes = ((0.1, 2.0, 3.25, 1e300),) * rng.randrange(3)
        region, index = rng.choice([None, (0.0, 1 / 3, 2.0, 3.0)]), rng.choice([None, 0, 5])
        found.append(Item(valid_utf8(name.replace("\\", "\\\\")), path, label, boxes, region, index))
    rng.shuffle(found)
    return found


def random_windows(rng, count):
    tiling = Tiling(200)
    windows = [RasterWindow(rng.randrange(9) * 100.5, i * 7.25, 200.0, tiling, 31) for i in range(count)]
    found = [
        Item(window_id(rasters, one), Path("/slides") / rasters, "tumour", window=one)
        for one, rasters in ((one, rng.choice(["b.svs", "a.svs", "a#x=1.svs"])) for one in windows)
    ]
    found.append(Item("broken.svs", Path("/slides/broken.svs"), window=RasterWindow(0.0, 0.0, 0.0, tiling)))
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("make", [random_items, random_windows])
def test_columns_hold_what_objects_hold(make):
    items = make(random.Random(4), 300)
    found = Items.of(items)
    assert list(found) == items
    assert [found[0], found[-1]] == [items[0], items[-1]]
    assert [*found[5:8], *found[::-100]] == [*items[5:8], *items[::-100]]
    assert list(pickle.loads(pickle.dumps(found[20:40]))) == items[20:40]
    assert found.labels() == [item.label for item in items]
    assert found.digest() == digest_items(items)
    ordered = sorted(items, key=_scan_order)
    assert ordered != items
    assert list(found.in_scan_order()) == ordered
    assert found.path_texts().to_pylist() == [valid_utf8(str(item.path)) for item in items]
    texts = [None if item.label is None else str(item.label) for item in items]
    assert found.label_texts().to_pylist() == texts
    for n in (None, 1, 3, 7, 100, 299):
        assert list(found.sample(n)) == sorted(sample_by_class(items, n), key=_scan_order), n
    with pytest.raises(IndexError):
        found[len(items)]


def test_a_slice_is_pickled_alone():
    found = Items.of(random_items(random.Random(1), 2000))
    assert len(pickle.dumps(found[:10])) < len(pickle.dumps(found)) / 20


def test_a_folder_is_listed_as_a_walk_finds_it(tmp_path):
    rng = random.Random(3)
    for i in range(150):
        folder = tmp_path.joinpath(*rng.choices(NAMES, k=rng.randrange(3)))
        folder.mkdir(parents=True, exist_ok=True)
        suffix = rng.choice([".png", ".JPG", ".txt", ".tiff"])
        (folder / f"{rng.choice(NAMES)}{i}{suffix}").write_bytes(b"x" * i)
    expected = []
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            parts = [valid_utf8(part.replace("\\", "\\\\")) for part in path.relative_to(tmp_path).parts]
            expected.append(Item("/".join(parts), path, parts[0] if len(parts) > 1 else None))
    expected.sort(key=lambda item: item.id)
    found = list_items(tmp_path)
    assert len(expected) > 80
    assert any(str(item.path) != str(tmp_path / item.id) for item in expected)
    assert list(found) == expected
    assert found.stats() == file_stats([item.path for item in expected])
    assert found.digest() == digest_items(expected)
    plain = Items(found.table.select(["id", "label"]).filter(found.column("path").is_null()), tmp_path)
    assert plain.stats() == file_stats([item.path for item in plain])
