"""Published data sets in the layout they are published in, on small files of our own."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from time import process_time

import h5py
import numpy as np
import pytest
import scipy.io

from equicam import EquicamError
from equicam.images.items import Item, open_item
from equicam_paper.benchmarks import find_items
from equicam_paper.imagenet import MAX_ANNOTATION_BYTES, read_boxes
from tests.unit import test_sources
from tests.unit.test_sources import known, touch

refused = partial(test_sources.refused, find=find_items)

FISH, SHARK, CAR = "n01440764", "n01484850", "n02974003"
XML = """<annotation><filename>x</filename><size><width>500<unit>px</unit></width></size>
<object><name>fish</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40.5</ymax></bndbox>
<part><bndbox><xmin>7</xmin></bndbox></part></object>
<object><bndbox><ymax> 4 </ymax><xmax>3</xmax><ymin>2</ymin><xmin>1</xmin></bndbox></object></annotation>"""
BOXES = ((1.0, 2.0, 30.0, 40.5), (1.0, 2.0, 3.0, 4.0))


def annotate(root: Path, *names: str, xml: str | bytes = XML) -> None:
    touch(root, *names)
    for name in names:
        (root / name).write_bytes(xml if isinstance(xml, bytes) else xml.encode())


@pytest.mark.parametrize("folder", ["", "val", "ILSVRC2012_img_val"])
def test_imagenet_in_a_thousand_folders_has_the_usual_numbers(tmp_path, folder):
    synsets = [f"n{10_000_000 - i:08}" for i in range(1000)]
    touch(tmp_path / folder, *(f"{s}/ILSVRC2012_val_{i:08}.JPEG" for i, s in enumerate(synsets)))
    image = "ILSVRC2012_val_0000000{}.xml".format
    annotate(tmp_path, f"bbox/val/{image(3)}", f"Annotations/{synsets[5]}/{image(5)}")
    items = {i.path.stem[-8:]: i for i in find_items(tmp_path)}
    assert [items[f"{i:08}"].label for i in range(1000)] == list(range(999, -1, -1))
    assert {number for number, i in items.items() if i.boxes == BOXES} == {"00000003", "00000005"}
    assert items["00000003"].id == f"{synsets[3]}/ILSVRC2012_val_00000003.JPEG"
    assert find_items(tmp_path, split="val") == find_items(tmp_path)


def test_imagenet_in_fewer_folders_is_labelled_by_synset(tmp_path):
    touch(tmp_path, *(f"val/{synset}/img_0.JPEG" for synset in (FISH, SHARK)))
    touch(tmp_path, *(f"train/{synset}/t.JPEG" for synset in (FISH, CAR)))
    # the same stem in another synset is another image
    annotate(tmp_path, f"val_annotations/{SHARK}/img_0.xml")
    fish, shark = find_items(tmp_path)
    assert (fish.id, fish.label, fish.boxes) == (f"{FISH}/img_0.JPEG", FISH, ())
    assert (shark.label, shark.boxes) == (SHARK, BOXES)
    assert known(find_items(tmp_path, split="train")) == {f"{FISH}/t.JPEG": FISH, f"{CAR}/t.JPEG": CAR}
    touch(tmp_path, "val/cats/1.png")  # not ImageNet any more
    refused(tmp_path, "needs a split, got folders .*'train', 'val'")


def devkit(root: Path, *, images="val", kit="ILSVRC2012_devkit_t12/data", truth="2\n3\n1\n") -> Path:
    touch(root / images, *(f"ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 2, 3)), "thumbs.png")
    touch(root / kit, "ILSVRC2012_validation_ground_truth.txt", "meta.mat")
    (root / kit / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    rows = [(1, SHARK, "shark"), (2, CAR, "car"), (3, FISH, "fish"), (1001, "n00001740", "entity")]
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    scipy.io.savemat(root / kit / "meta.mat", {"synsets": np.array(rows, dtype=fields)[:, None]})
    return root


@pytest.mark.parametrize("images", ["", "val", "ILSVRC2012_img_val"])
@pytest.mark.parametrize("kit", ["", "data", "ILSVRC2012_devkit_t12/data"])
def test_imagenet_with_its_devkit(tmp_path, images, kit):
    devkit(tmp_path, images=images, kit=kit)
    annotate(tmp_path, "bbox/ILSVRC2012_val_00000002.xml")
    items = find_items(tmp_path)
    assert [i.id for i in items] == [f"ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 2, 3)]
    assert [i.label for i in items] == [2, 0, 1]  # car, fish, shark by synset
    assert [i.boxes for i in items] == [(), BOXES, ()]
    assert items[0].path == tmp_path / images / items[0].id


def test_a_broken_devkit_is_reported(tmp_path):
    for truth, got in {"2\n3\n": "no such line", "2\n3\n1001\n": "1001", "2\n3\nx\n": "x"}.items():
        needs = "a class of meta.mat in line 3"
        refused(devkit(tmp_path, truth=truth), f"00000003.JPEG' needs {needs} .* got '{got}'")
    meta = tmp_path / "ILSVRC2012_devkit_t12/data/meta.mat"
    scipy.io.savemat(meta, {"other": 1})
    refused(tmp_path, "meta.mat' needs synsets with ILSVRC2012_ID and WNID")
    for junk in (b"", b"junk" * 100, b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\0" * 64):
        meta.write_bytes(junk)
        refused(tmp_path, "meta.mat' needs synsets")
    meta.unlink()
    refused(tmp_path, "needs meta.mat next to ILSVRC2012_validation_ground_truth.txt, got none")
    for image in (tmp_path / "val").glob("ILSVRC*"):
        image.unlink()
    refused(devkit(tmp_path / "b", images="elsewhere"), "needs images ILSVRC2012_val_00000001.JPEG")


LAUGHS = "<!DOCTYPE lolz [<!ENTITY a 'lol'>"
LAUGHS += "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in pairwise("abcdefghi"))
BAD_XML = {
    "laughs": (f"{LAUGHS}]><annotation>&i;</annotation>", "without a DTD"),
    "file": ('<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]><a>&e;</a>', "without a DTD"),
    "dtd": ('<!DOCTYPE a SYSTEM "http://localhost/a.dtd"><a/>', "without a DTD"),
    "utf-16": (f"{LAUGHS}]><a>&i;</a>".encode("utf-16"), "without a DTD"),
    "open": ("<annotation><object>", "well-formed XML"),
    "empty": ("", "well-formed XML"),
    "binary": (b"\xff\xd8\xff\xe0", "well-formed XML"),
    "encoding": ('<?xml version="1.0" encoding="no-such"?><a/>', "well-formed XML"),
    "entity": ("<a>&unknown;</a>", "well-formed XML"),
    "corner": ("<a><object><bndbox><xmin>1</xmin></bndbox></object></a>", "four numbers"),
    "number": (XML.replace("40.5", "tall"), "four numbers"),
    "reversed": (XML.replace("40.5", "1"), "four numbers"),
    "large": ("<a>" + " " * MAX_ANNOTATION_BYTES + "</a>", f"at most {MAX_ANNOTATION_BYTES:,} bytes"),
}


@pytest.mark.parametrize("name", BAD_XML)
def test_bad_xml_is_refused_by_name(tmp_path, name):
    xml, reason = BAD_XML[name]
    touch(tmp_path, f"{FISH}/1.JPEG")
    annotate(tmp_path, "bbox/1.xml", xml=xml)
    refused(tmp_path, f"annotation '.*1.xml' needs .*{reason}")


def test_deep_xml_takes_no_time(tmp_path):
    annotate(tmp_path, "deep.xml", xml="<a>" * 149_000 + "</a>" * 149_000)
    before = process_time()
    assert read_boxes(tmp_path / "deep.xml") == ()
    assert process_time() - before < 5


CUB = {
    "images.txt": "1 001.Black_Bird/one.jpg\n2 001.Black_Bird/two.jpg\n3 002.Red bird/three.jpg\n",
    "image_class_labels.txt": "1 1\n2 1\n3 2\n",
    "bounding_boxes.txt": "1 60.0 27.0 325.0 304.0\n2 0 0 10 20\n3 1.0 2.0 3.0 4.0\n",
    "train_test_split.txt": "1 0\n2 1\n3 0\n",
    "classes.txt": "1 001.Black_Bird\n2 002.Red bird\n",
}


def birds(root: Path, **changed: str) -> Path:
    touch(root, *CUB, "images/001.Black_Bird/one.jpg")
    for name, text in CUB.items():
        (root / name).write_text(changed.get(name[:-4], text))
    return root


@pytest.mark.parametrize("folder", ["", "CUB_200_2011"])
def test_cub(tmp_path, folder):
    root = birds(tmp_path / folder)
    one, three = find_items(tmp_path)
    path = root / "images/001.Black_Bird/one.jpg"
    assert one == Item("001.Black_Bird/one.jpg", path, 0, ((60.0, 27.0, 385.0, 331.0),))
    assert (three.id, three.label, three.boxes) == ("002.Red bird/three.jpg", 1, ((1.0, 2.0, 4.0, 6.0),))
    assert find_items(tmp_path, split="test") == [one, three]
    assert known(find_items(tmp_path, split="train")) == {"001.Black_Bird/two.jpg": 0}
    assert len(find_items(tmp_path, split="all")) == 3
    refused(tmp_path, "needs an existing split, got 'val'; try 'all', 'test', 'train'", split="val")


BAD_CUB = [
    ({"bounding_boxes": "1 1 2 3\n2 0 0 1 1\n3 0 0 1 1\n"}, "image 1 in .*boxes.txt' needs x y width height"),
    ({"bounding_boxes": "1 1 2 -3 4\n2 0 0 1 1\n3 0 0 1 1\n"}, "image 1 in .*boxes.txt' needs boxes"),
    ({"bounding_boxes": "1 1 2 3 4\n"}, "bounding_boxes.txt' needs a line for image 3"),
    ({"image_class_labels": "1 0\n2 1\n3 2\n"}, "image 1 in .*labels.txt' needs a class from 1 on, got '0'"),
    ({"image_class_labels": "1 x\n2 1\n3 2\n"}, "a class from 1 on, got 'x'"),
    ({"images": "1 a.jpg\n2\n"}, "images.txt', line 2, needs a new image number"),
    ({"images": "1 a.jpg\n1 b.jpg\n"}, "images.txt', line 2, needs a new image number"),
    ({"images": "1 a.jpg\n3 a.jpg\n"}, "one image per line, each once, got 2 lines of 1 images"),
    ({"train_test_split": "1 0\n"}, "split.txt' needs a line for image 2"),
]


@pytest.mark.parametrize(("changed", "reason"), BAD_CUB)
def test_a_broken_cub_is_reported(tmp_path, changed, reason):
    refused(birds(tmp_path, **changed), reason)
    (birds(tmp_path) / "bounding_boxes.txt").unlink()
    refused(tmp_path, "bounding_boxes.txt' needs an existing file")


PATCHES = np.random.default_rng(1).integers(0, 255, (5, 96, 96, 3), dtype=np.uint8)


def pcam(root: Path, split: str = "test", labels: object = (0, 1, 1, 0, 1), **options) -> Path:
    root.mkdir(exist_ok=True)
    stem = f"camelyonpatch_level_2_split_{split}"
    with h5py.File(root / f"{stem}_x.h5", "w") as x, h5py.File(root / f"{stem}_y.h5", "w") as y:
        x["x"] = PATCHES
        y["y"] = np.asarray(labels, **options).reshape(-1, 1, 1, 1)
    return root / f"{stem}_x.h5"


def test_patch_camelyon(tmp_path):
    file = pcam(tmp_path)
    items = find_items(tmp_path)
    assert [i.id for i in items] == [f"test-00000{i}" for i in range(5)]
    assert [i.label for i in items] == [0, 1, 1, 0, 1]
    assert {(i.label, i.region) for i in items} == {(0, None), (1, (32.0, 32.0, 64.0, 64.0))}
    assert all(np.array_equal(open_item(i), PATCHES[i.index]) for i in items[::-1])
    assert find_items(file) == find_items(file, split="test") == find_items(tmp_path, split="test") == items


def test_patch_camelyons_splits(tmp_path):
    file = pcam(tmp_path / "pcam", "valid")
    assert find_items(tmp_path, split="valid")[4].id == "valid-000004"
    refused(tmp_path, "PatchCamelyon needs an existing split, got 'test'; try 'valid'")
    refused(file, "got 'train'; try 'valid'", split="train")


def test_a_broken_patch_camelyon_is_reported(tmp_path):
    for labels in ((0, 1), (0.0, 1.0, 1.0, 0.0, 1.0)):
        refused(pcam(tmp_path / str(len(labels)), labels=labels), "_y.h5' needs 5 integers in 'y'")
    file = pcam(tmp_path / "without")
    file.with_name(file.name.replace("_x", "_y")).unlink()
    refused(file, "test_y.h5' needs an existing file")


def test_resisc45_as_it_unpacks(tmp_path):
    touch(tmp_path, *(f"NWPU-RESISC45/{c}/{c}_00{i}.jpg" for c in ("beach", "river") for i in (1, 2)))
    expected = {f"{c}/{c}_00{i}.jpg": c for c in ("beach", "river") for i in (1, 2)}
    assert known(find_items(tmp_path)) == known(find_items(tmp_path / "NWPU-RESISC45")) == expected
    with pytest.raises(EquicamError, match="needs a folder of that name"):
        find_items(tmp_path, split="test")
