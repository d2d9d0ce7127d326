"""Sources: lists, folders, patterns and files, whatever their names are."""

import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from equicam import EquicamError
from equicam.images.items import Item, open_item
from equicam.images.sources import find_items


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def known(items: list[Item]) -> dict[str, int | str | None]:
    return {i.id: i.label for i in items}


def refused(source, match: str, *, find=find_items, **options) -> None:
    with pytest.raises(EquicamError, match=match) as caught:
        find(source, **options)
    # one error, not one in another; any terminal prints it
    assert str(caught.value).encode().count(b"; try ") == 1


LIST = """path,id,label,boxes,region,split
a.png,one,3,1 2 3 4;5 6 7 8.5,0 0 9 9,train
sub/b.png,,cat,,,test
/else/c.png,three, 007 ,0 0 1 1; ,,test
"""


def test_a_csv_list(tmp_path):
    (tmp_path / "any.csv").write_text(LIST)
    first, second, third = find_items(tmp_path / "any.csv")
    boxes = ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.5))
    assert first == Item("one", tmp_path / "a.png", 3, boxes, (0.0, 0.0, 9.0, 9.0))
    assert second == Item("sub/b.png", tmp_path / "sub/b.png", "cat")
    assert third == Item("three", Path("/else/c.png"), 7, ((0.0, 0.0, 1.0, 1.0),))
    assert find_items(str(tmp_path / "any.csv"), split="test") == [second, third]
    with pytest.raises(EquicamError, match="No such file"):
        open_item(first)  # a row with a reason, later


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_list_may_have_groups(tmp_path, kind):
    groups = {"group": ["s1", "s1", None], "patient": ["14-1", "14-2", "7"]}
    columns = {"path": ["a.png", "b.png", "c.png"], **groups}
    if kind == "parquet":
        pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    else:
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(columns), *(",".join(cell or "" for cell in row) for row in rows)]
        (tmp_path / "items.csv").write_text("\n".join(lines))
    assert [item.group for item in find_items(tmp_path)] == ["s1", "s1", None]
    assert [item.group for item in find_items(tmp_path, group_by="patient")] == ["14-1", "14-2", "7"]
    with pytest.raises(EquicamError, match="a column 'wsi'"):
        find_items(tmp_path, group_by="wsi")
    with pytest.raises(EquicamError, match=r"group_by 'patient' needs an image list"):
        find_items(touch(tmp_path / "images", "a.png"), group_by="patient")


def test_a_folder_with_a_list_is_that_list(tmp_path):
    touch(tmp_path, "cat/not listed.png")
    (tmp_path / "items.csv").write_text("\ufeffpath , label\nx.png,1\n\ny.png\nz.png, \n", encoding="utf-8")
    assert known(find_items(tmp_path)) == {"x.png": 1, "y.png": None, "z.png": None}


def test_a_parquet_list(tmp_path):
    columns = {"path": ["a.png", "b.png", "c.png"], "id": [7, 8, 9], "label": [1.0, None, 3.0]}
    columns |= {"boxes": ["1 2 3 4", None, ""], "split": pa.array(["x", "y", "y"]).dictionary_encode()}
    columns |= {"more": [[1], [], [2]]}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    assert known(find_items(tmp_path)) == {"7": 1, "8": None, "9": 3}
    assert find_items(tmp_path, split="x") == [Item("7", tmp_path / "a.png", 1, ((1.0, 2.0, 3.0, 4.0),))]
    pq.write_table(pa.table({"path": ["a", "b"], "label": ["12", "dog"]}), tmp_path / "items.parquet")
    assert known(find_items(tmp_path)) == {"a": 12, "b": "dog"}


BAD_LISTS = {
    "file,label\na.png,1\n": "a column 'path', got 'file', 'label'",
    "": "a column 'path', got none",
    "path,label,label\na,1,2\n": "each column once, got 'label' twice",
    "path\n": "at least one row",
    "path,boxes\na.png,\nb.png,1 2 3\n": "line 3, needs boxes of four numbers",
    "path,boxes\na.png,1 2 x 4\n": "line 2, needs boxes of four numbers",
    "path,region\na.png,9 0 1 1\n": "line 2, needs boxes of four numbers",
    "path,label\na.png,1\n,2\n": "line 3, needs a path",
    "path\na.png\nb.png\na.png\n": "line 4, needs a unique id, got 'a.png' as in line 2",
    "path,id\na.png,x\nb.png,x\n": "line 3, needs a unique id, got 'x' as in line 2",
    "path,boxes\na.png,1,2,3,4\n": "line 2, needs 2 cells, got 5",
    'path,label\n"a.png,1\nb.png,2\n': "needs well-formed CSV",
    f"path\n{'x' * 200_000}\n": "line 2, needs well-formed CSV, got field larger",
}


@pytest.mark.parametrize("text", BAD_LISTS, ids=range(len(BAD_LISTS)))
def test_a_bad_csv_list_is_refused_by_line(tmp_path, text):
    (tmp_path / "items.csv").write_text(text)
    refused(tmp_path, BAD_LISTS[text])
    refused(tmp_path / "items.csv", BAD_LISTS[text])


def test_a_bad_parquet_list_is_refused_by_line(tmp_path):
    file = tmp_path / "items.parquet"
    bad = {
        "a column 'path', got 'a'": {"a": [1]},
        "line 2, needs a path": {"path": ["a", None]},
        "line 1, needs text in column 'path', got 1": {"path": [1]},
        "needs numbers or text in column 'boxes'": {"path": ["a"], "boxes": [[1, 2, 3, 4]]},
        "line 2, needs an integer or a name as label, got 0.5": {"path": ["a", "b"], "label": [1.0, 0.5]},
        "line 2, needs a unique id": {"path": ["a", "b"], "id": ["c", "c"]},
        "whole Parquet file": {"path": pa.Array.from_buffers(pa.utf8(), 1, pa.array([b"\xff"]).buffers())},
    }
    for reason, columns in bad.items():
        pq.write_table(pa.table(columns), file)
        refused(file, reason)
    file.write_bytes(file.read_bytes()[:100])
    refused(file, "whole Parquet file")


def test_an_unknown_split_names_those_there_are(tmp_path):
    (tmp_path / "items.csv").write_text(LIST)
    refused(tmp_path, "rows of split 'val', got splits 'test', 'train'", split="val")
    (tmp_path / "items.csv").write_text("path\na.png\n")
    refused(tmp_path, "a column 'split'", split="val")


def test_a_folder_a_class(tmp_path):
    touch(tmp_path, "dog/2.PNG", "dog/deep/er/1.jpg", "cat/1.jpeg", "cat/notes.txt", "empty/readme.md")
    touch(tmp_path, ".hidden/1.png", "cat/.2.png", "cat/._1.jpeg")
    items = find_items(tmp_path)
    assert known(items) == {"cat/1.jpeg": "cat", "dog/2.PNG": "dog", "dog/deep/er/1.jpg": "dog"}
    assert items == sorted(items, key=lambda i: i.id)
    assert items[2].path == tmp_path / "dog/deep/er/1.jpg"


def test_a_flat_folder_has_no_labels_and_a_mixed_one_some(tmp_path):
    suffixes = ["png", "jpg", "jpeg", "tif", "tiff", "bmp", "webp", "gif", "jp2", "ppm", "pgm"]
    touch(tmp_path, *(f"a.{s}" for s in suffixes), *(f"b.{s.upper()}" for s in suffixes), "c.pdf", "png")
    assert known(find_items(tmp_path)) == {c: None for s in suffixes for c in (f"a.{s}", f"b.{s.upper()}")}
    touch(tmp_path, "more/d.png")
    found = known(find_items(tmp_path))
    assert (len(found), found["more/d.png"]) == (23, "more")
    assert found["a.png"] is None


def test_a_split_may_be_a_folder(tmp_path):
    touch(tmp_path, "train/a/1.png", "train/a/2.png", "val/b/1.png", "val/b/deep/2.png")
    assert known(find_items(tmp_path, split="val")) == {"b/1.png": "b", "b/deep/2.png": "b"}
    refused(tmp_path, "a split, got folders 'train', 'val'; try split=\"train\"")
    refused(tmp_path, "'test' needs a folder of that name in .*, got folders 'train', 'val'", split="test")
    refused(tmp_path / "val", "needs a folder of that name", split="../train")
    refused(tmp_path / "val/b", "needs a folder of that name", split=str(tmp_path / "train"))
    (tmp_path / "val/items.csv").write_text("path,label\nb/1.png,5\n")
    assert known(find_items(tmp_path, split="val")) == {"b/1.png": 5}


def test_train_is_a_class_among_others(tmp_path):
    touch(tmp_path, "train/1.png", "bus/1.png")
    assert known(find_items(tmp_path)) == {"bus/1.png": "bus", "train/1.png": "train"}


def test_nothing_found_says_what_was_looked_for(tmp_path):
    touch(tmp_path, "notes.txt", "sub/.png", "sub/.hidden.png", "table.h5", "no suffix")
    refused(tmp_path, r"images \(\.png \.jpg .*items.csv")
    refused(tmp_path / "nothing", "existing file or folder, got No such file")
    refused(tmp_path / "notes.txt", r"images \(\.png .*got a file .txt")
    refused(tmp_path / "no suffix", "got a file without suffix")
    refused(tmp_path / "table.h5", "got a file .h5")
    refused(tmp_path / "*.png", r"pattern .* needs images .* got none of 0")
    refused(tmp_path / "missing/*.png", "got none of 0")
    for strange in ("a\0b", "a\0*", "\ud800", "x" * 5000, "x" * 300 + "*"):
        refused(strange, "needs")


def test_one_image_and_patterns(tmp_path, monkeypatch):
    touch(tmp_path / "scans", "a.png", "b.PNG", "c.jpg", "x/a.png", "x/y/b.png", "z[1].png")
    monkeypatch.chdir(tmp_path)
    assert find_items("scans/a.png") == [Item("a.png", Path("scans/a.png"))]
    assert find_items("scans/z[1].png") == [Item("z[1].png", Path("scans/z[1].png"))]  # there, so no pattern
    patterns = {
        "scans/*.png": "a.png z[1].png",
        "scans/[ab].*": "a.png b.PNG",
        "scans/?.jpg": "c.jpg",
        "scans/*/*.png": "x/a.png",
        "scans/**/[ab].png": "a.png x/a.png x/y/b.png",
        "scans/**/y/*": "x/y/b.png",
        "s*/x/**": "scans/x/a.png scans/x/y/b.png",
    }
    for pattern, expected in patterns.items():
        assert known(find_items(pattern)) == dict.fromkeys(expected.split()), pattern
    assert find_items(tmp_path / "scans" / "*.jpg") == [Item("c.jpg", tmp_path / "scans/c.jpg")]
    refused("scans/a.png", "split 'test' needs a list or a folder", split="test")
    refused("scans/*.png", "split 'test' needs a list or a folder", split="test")


HOSTILE = [b"new\nline.png", b"q'u\"o,te.png", "🙂 é.png".encode(), b"\xff\xfe.png", b"\\udcff\\udcfe.png",
           b"<script>.png", b" .png", b"-rf.png", b"$(id).png", b"%s{0}.png", b"\xe2\x80\xae.png"]  # fmt: skip


def image(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (2, 3)).save(path, "PNG")


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_any_file_name_gives_a_valid_unique_id(tmp_path):
    for folder in (b"flat", b"cla\xffss", b"cla\\udcffss"):
        for name in HOSTILE:
            image(tmp_path / os.fsdecode(folder) / os.fsdecode(name))
    flat, below = find_items(tmp_path / "flat"), find_items(tmp_path)
    assert (len({i.id for i in flat}), len({i.id for i in below})) == (len(HOSTILE), 3 * len(HOSTILE))
    assert len({i.label for i in below}) == 3
    for item in flat + below + find_items(tmp_path / "*/*.png"):
        f"{item.id}{item.label}".encode()
        assert open_item(item).size == (2, 3)
    assert "\\udcff\\udcfe.png" in known(flat)


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_a_list_may_name_any_file(tmp_path):
    image(tmp_path / os.fsdecode(b"\xff") / 'a,"\n.png')
    row = b'label,path\n\xffx,"\xff/a,""\n.png"\n'
    (tmp_path / "items.csv").write_bytes(row + b"b,c.png\nc,\n")
    refused(tmp_path, "line 5, needs a path")  # the second row is two lines
    (tmp_path / "items.csv").write_bytes(row)
    [item] = find_items(tmp_path)
    assert ((item.id, item.label), open_item(item).size) == (('\\udcff/a,"\n.png', "\\udcffx"), (2, 3))


def test_links_are_followed_once_and_never_in_circles(tmp_path):
    outside = touch(tmp_path / "outside", "x/1.png", "2.png")
    root = touch(tmp_path / "root", "a/1.png", "z/1.png")
    (root / "a/linked.png").symlink_to(outside / "2.png")
    (root / "a/gone.png").symlink_to(tmp_path / "nothing.png")
    (root / "a/self.png").symlink_to(root / "a/self.png")
    (root / "b").symlink_to(outside / "x")
    (root / "c").symlink_to(root / "z")  # has its images already
    circles = {"up": tmp_path, "top": Path("/"), "here": root, "a/back": root, "z/other": root / "a"}
    for name, to in circles.items():
        (root / name).symlink_to(to)
    expected = {f"{name}.png": name[0] for name in ("a/1", "a/linked", "a/gone", "a/self", "b/1", "z/1")}
    assert known(find_items(root)) == expected
    assert known(find_items(root / "**/1.png")) == dict.fromkeys(["a/1.png", "b/1.png", "z/1.png"])
    with pytest.raises(EquicamError, match="No such file"):
        open_item(next(i for i in find_items(root) if i.id == "a/gone.png"))


def test_many_links_to_one_another_take_no_time(tmp_path):
    for i in range(40):
        touch(tmp_path, f"{i}/1.png")
        for j in range(40):
            (tmp_path / f"{i}/to{j}").symlink_to(tmp_path / str(j))
    assert len(find_items(tmp_path)) == len(find_items(tmp_path / "**/*.png")) == 40


def test_deep_folders_and_pipes(tmp_path):
    made = [tmp_path]
    for _ in range(1200):  # deeper than Python's stack
        made.append(made[-1] / "d")
        made[-1].mkdir()
    touch(made[-1], "1.png")
    os.mkfifo(tmp_path / "d/pipe.png")
    try:
        assert known(find_items(tmp_path)) == {f"{'d/' * 1200}1.png": "d", "d/pipe.png": "d"}
        with pytest.raises(EquicamError, match="a named pipe"):  # a row with a reason
            open_item(find_items(tmp_path / "d/*.png")[0])
    finally:
        (made[-1] / "1.png").unlink()
        (tmp_path / "d/pipe.png").unlink()
        for folder in made[:0:-1]:  # for whoever removes tmp_path recursively
            folder.rmdir()


def test_an_unreadable_folder_is_reported(tmp_path, monkeypatch):
    touch(tmp_path, "a/1.png")

    def locked(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", locked)
    refused(tmp_path, "folder .* needs to be readable, got Permission denied")
