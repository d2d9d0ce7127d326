"""Images at a URL are found, opened, compared and explained like local ones."""

import io
import sys
import time

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import equicam
from equicam.demo import synthetic_patches
from equicam.errors import EquicamError
from equicam.images import files
from equicam.images.files import RemotePath, as_path, file_stat, is_url
from equicam.images.items import digest_items, open_item, read_item
from equicam.images.sources import find_items

FREE = ("seconds", "path", "mtime_ns")


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def both(memory, tmp_path):
    """The same six patches, in classes, on a disk and in memory; one is broken, one hidden."""
    for i, patch in enumerate(synthetic_patches(6)):
        buffer = io.BytesIO()
        patch.save(buffer, "PNG")
        name = f"{'ab'[i % 2]}/{i:02d}.png"
        _put(memory, tmp_path, name, buffer.getvalue())
    _put(memory, tmp_path, "a/broken.png", b"no image")
    _put(memory, tmp_path, ".hidden/x.png", b"")
    _put(memory, tmp_path, "a/notes.txt", b"")
    return "memory://bucket/set", tmp_path / "set"


def _put(memory, tmp_path, name, data):
    memory.pipe(f"/bucket/set/{name}", data)
    path = tmp_path / "set" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def comparable_rows(run: equicam.Run) -> list[dict]:
    """Rows without the columns that may differ; the values of a reason contain the path."""
    rows = run.items.to_pylist()
    for row in rows:
        row["reason_values"] = row["reason_values"] and row["reason_values"].replace(row["path"], "PATH")
    return [{k: v for k, v in row.items() if k not in FREE} for row in rows]


def test_a_folder_at_a_url_is_the_folder_on_the_disk(both):
    url, folder = both
    there, here = find_items(url), find_items(folder)
    assert len(there) == 7
    assert [(i.id, i.label) for i in there] == [(i.id, i.label) for i in here]
    assert digest_items(there) == digest_items(here)
    assert digest_items(find_items(f"file://{folder}")) == digest_items(here)
    assert [str(i.path) for i in there] == [f"{url}/{i.id}" for i in here]
    good = [(a, b) for a, b in zip(there, here, strict=True) if "broken" not in a.id]
    assert all(open_item(a).tobytes() == open_item(b).tobytes() for a, b in good)
    assert [i.id for i in find_items(url, split="b")] == [i.id for i in find_items(folder, split="b")]
    for pattern in ("*/0*.png", "**/*1.png"):
        found, expected = ([i.id for i in find_items(f"{root}/{pattern}")] for root in (url, folder))
        assert found == expected
    (one,) = find_items(f"{url}/a/00.png")
    assert one.id == "00.png"


def test_a_listing_saves_a_request_per_file(both, monkeypatch):
    items = find_items(both[0])
    monkeypatch.setattr(RemotePath, "_request", None)
    assert all(file_stat(item.path).bytes for item in items)
    assert all(file_stat(item.path).mtime_ns for item in items)


def test_lists_at_a_url(both, memory, monkeypatch):
    monkeypatch.setenv("EQUICAM_ALLOW_SCHEMES", "memory")  # for the list on the disk
    url, folder = both
    paths = ["a/00.png", f"{url}/b/01.png", "a/absent.png"]
    rows = {"path": paths, "id": ["x", "y", "z"], "label": [3, 4, 5]}
    pq.write_table(pa.table(rows), folder / "items.parquet")
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    memory.pipe("/bucket/set/items.parquet", (folder / "items.parquet").read_bytes())
    memory.pipe("/bucket/set/l.csv", "\n".join(lines).encode())
    for source in (url, f"{url}/items.parquet", f"{url}/l.csv", folder / "items.parquet"):
        items = find_items(source)
        assert [(i.id, i.label) for i in items] == [("x", 3), ("y", 4), ("z", 5)]
        assert open_item(items[0]).size == open_item(items[1]).size == (96, 96)
        with pytest.raises(EquicamError, match="an existing file"):
            open_item(items[2])


@pytest.mark.parametrize("path", ["/etc/x.png", "../x.png"])
def test_a_list_at_a_url_may_not_leave_its_folder(memory, path):
    memory.pipe("/bucket/items.csv", f"path\n{path}".encode())
    with pytest.raises(EquicamError, match="below the list's folder"):
        find_items("memory://bucket/items.csv")


def test_an_audit_of_a_url_is_that_of_the_folder(both, tmp_path):
    model = equicam.load("embedded")
    there = equicam.audit(both[0], model, tmp_path / "there", views=4, shard_size=3, calibrate=2)
    here = equicam.audit(both[1], model, tmp_path / "here", views=4, shard_size=3, calibrate=2)
    assert (len(comparable_rows(there)), comparable_rows(there)) == (7, comparable_rows(here))
    assert there.manifest.source == both[0]
    paths = there.items["path"].to_pylist()
    assert all(path.startswith("memory://bucket/set/") for path in paths)


def test_an_image_that_changed_at_its_url_is_refused(both, memory, tmp_path):
    model = equicam.load("embedded")
    run = equicam.audit(both[0], model, tmp_path / "run", views=4, shard_size=3)
    for kind in ("items", "maps"):
        run.store.path(kind, 2).unlink()
    same = memory.cat_file("/bucket/set/a/00.png")
    time.sleep(0.01)
    memory.pipe("/bucket/set/a/00.png", same)  # another time, the same content
    equicam.audit(both[0], model, tmp_path / "run", views=4, shard_size=3)
    run.store.path("items", 2).unlink()
    memory.pipe("/bucket/set/a/00.png", memory.cat_file("/bucket/set/a/02.png"))
    with pytest.raises(EquicamError, match=r"'a/00\.png' changed"):
        equicam.audit(both[0], model, tmp_path / "run", views=4, shard_size=3)


def test_an_evaluation_of_a_url_is_that_of_the_folder(both, memory, tmp_path):
    model = equicam.load("embedded")
    options = {"methods": ["grad-cam"], "angles": [45, 90]}
    there = equicam.evaluate(model, both[0], **options, out=tmp_path / "there.parquet")
    here = equicam.evaluate(model, both[1], **options)
    assert [r["id"] for r in there.to_pylist()] == [r["id"] for r in here.to_pylist()]
    both_say = zip(there.to_pylist(), here.to_pylist(), strict=True)
    assert all(repr(a["value"]) == repr(b["value"]) for a, b in both_say)
    memory.pipe("/bucket/set/a/02.png", memory.cat_file("/bucket/set/a/00.png"))
    with pytest.raises(EquicamError, match="content was"):
        equicam.evaluate(model, both[0], **options, out=tmp_path / "there.parquet")


def test_a_file_is_fetched_once(both, memory, monkeypatch):
    item = next(i for i in find_items(both[0]) if "broken" not in i.id)
    requests, usual = [], type(memory).cat_file
    counted = lambda self, path, **options: requests.append(path) or usual(self, path, **options)  # noqa: E731
    monkeypatch.setattr(type(memory), "cat_file", counted)
    content = read_item(item)
    assert content.decode().image.tobytes() == open_item(item).tobytes()
    assert content.sha256 == content.sha256
    assert len(requests) == 2, "one by read_item, one by open_item"
    assert "data" not in repr(content)


def test_a_failed_request_is_retried(both, memory, monkeypatch):
    monkeypatch.setattr(files, "RETRY_WAITS_S", (0, 0))
    item = next(i for i in find_items(both[0]) if "broken" not in i.id)
    usual, left = type(memory).cat_file, [2]

    def fails(self, path, **options):
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("slow down")
        return usual(self, path, **options)

    monkeypatch.setattr(type(memory), "cat_file", fails)
    assert open_item(item).size == (96, 96)
    left[0] = 3
    with pytest.raises(EquicamError, match="slow down"):
        open_item(item)


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs")])
def test_a_missing_package_is_named(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for known in ("s3", "gs"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, known, raising=False)
    with pytest.raises(EquicamError, match=f"pip install {package}"):
        find_items(url)


def test_urls_that_cannot_be(memory):
    with pytest.raises(EquicamError, match="a protocol that fsspec knows"):
        find_items("nonsense://x/y")
    with pytest.raises(EquicamError, match="no password") as refused:
        find_items("ftp://me:secret@host/x")
    assert "secret" not in str(refused.value)
    with pytest.raises(EquicamError, match="an existing file or folder"):
        find_items("memory://nowhere/at/all")
    assert not is_url("C:/x")
    assert as_path("a/b").name == "b"
    assert str(RemotePath("s3://b/c/d.png").parent / "e.png") == "s3://b/c/e.png"
