"""Items: samples against an obvious twin, digests that show every change."""

import hashlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equicam import EquicamError
from equicam.images.items import Item, digest_items, open_item, parse_box, sample_by_class, valid_utf8


def item(name: str, label: int | str | None = None) -> Item:
    return Item(name, Path(name), label)


def ids(items: list[Item]) -> str:
    return " ".join(i.id for i in items)


def slow_sample(items: list[Item], n: int | None) -> list[Item]:
    """The rule word by word: take the smallest remaining id of each class, one class after the other, until there are enough."""
    numbers = sorted({i.label for i in items if isinstance(i.label, int)})
    names = sorted({i.label for i in items if isinstance(i.label, str)})
    labels = [*numbers, *names, *([None] if any(i.label is None for i in items) else [])]
    if labels == [None]:
        everything = sorted(items, key=lambda i: i.id)
        count = len(everything)
        return everything if n is None or n >= count else [everything[round(k * count / n)] for k in range(n)]
    if n is not None and n < len(labels):
        labels, n = [labels[round(k * len(labels) / n)] for k in range(n)], n
    left, taken = list(items), []
    while left and (n is None or len(taken) < n):
        for label in labels:
            mine = sorted((i for i in left if i.label == label), key=lambda i: i.id)
            if mine and (n is None or len(taken) < n):
                taken.append(mine[0])
                left.remove(mine[0])
    return taken


LABELS = {
    "numbers": [10, 9, 2, 100],
    "names": ["b", "a", "10", "9"],
    "both": [3, "a", 1],
    "some without": [1, "z", None],
    "none": [None],
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_sample_is_its_twin_in_any_order(labels):
    rng = random.Random(1)
    items = [item(f"{rng.randrange(10**6):06}-{i}", rng.choice(labels)) for i in range(40)]
    for n in (None, 1, 2, 3, 4, 5, 17, 39, 40, 41, 1000):
        expected = slow_sample(items, n)
        assert len(expected) == min(n or 40, 40)
        for _ in range(3):
            rng.shuffle(items)
            assert sample_by_class(items, n) == expected


def test_sample_by_hand():
    items = [item(f"{label}{slot}", label) for label in "cab" for slot in "21"] + [item("a0", "a")]
    assert ids(sample_by_class(items, 5)) == "a0 b1 c1 a1 b2"
    assert ids(sample_by_class(items, None)) == "a0 b1 c1 a1 b2 c2 a2"
    assert ids(sample_by_class(items, 2)) == "a0 c1"  # round(3/2) is 2
    assert ids(sample_by_class([item(c) for c in "gfedcba"], 3)) == "a c f"  # 0, 2.33, 4.67
    twins = [Item("a", Path(name), 1) for name in "xy"]
    assert sample_by_class(twins, 1) == sample_by_class(twins[::-1], 1) == twins[:1]
    # without a label: one more class
    assert ids(sample_by_class([item("x"), item("b", 1), item("a", 1)], 2)) == "a x"


def test_sample_of_300_of_1000_classes_is_the_papers():
    items = [item(f"{label:04}/{slot}", label) for label in range(1000) for slot in range(2)]
    sample = sample_by_class(items, 300)
    assert [i.label for i in sample] == [round(k * 1000 / 300) for k in range(300)]
    assert len({i.label for i in sample}) == 300
    assert all(i.id.endswith("/0") for i in sample)
    counts = Counter(i.label for i in sample_by_class(items, 1500))
    assert counts == {c: 2 if c < 500 else 1 for c in range(1000)}


def test_sample_of_nothing_and_of_less_than_one():
    assert sample_by_class([], None) == sample_by_class([], 3) == []
    for n in (0, -1):
        with pytest.raises(EquicamError, match="at least 1 image"):
            sample_by_class([item("a")], n)


def test_a_digest_shows_every_change_but_not_where_the_files_are():
    one = Item("a", Path("a"), 1, ((0.0, 0.0, 1.0, 1.0),), (0.0, 0.0, 2.0, 2.0))
    pair = [one, item("b")]
    more, swapped = (*one.boxes, (2.0, 2.0, 3.0, 3.0)), {"boxes": (one.region,), "region": one.boxes[0]}
    changes = [{"id": "c"}, {"label": "1"}, {"label": None}, {"boxes": ()}, {"boxes": more}, {"region": None}]
    changes.append(swapped)
    changed = [[replace(one, **change), pair[1]] for change in changes]
    changed += [pair[::-1], pair[:1], [one, item('b", null, [], null]\n["c')], []]
    assert len({digest_items(items) for items in [pair, *changed]}) == len(changed) + 1
    assert digest_items([replace(one, path=Path("elsewhere")), pair[1]]) == digest_items(pair)
    loose = replace(one)
    object.__setattr__(loose, "boxes", ((0, 0, 1, 1),))  # integers, where nobody checks types
    assert digest_items([loose, pair[1]]) == digest_items(pair)
    written = '["a", 1, [[0.0, 0.0, 1.0, 1.0]], [0.0, 0.0, 2.0, 2.0]]\n["b", null, [], null]\n'
    # runs are resumed by it: it stays
    assert digest_items(pair) == hashlib.sha256(written.encode()).hexdigest()
    assert len(digest_items([item("\udcff")])) == 64


ODD_BOXES = ("1 2 3", "1 2 3 4 5", "a b c d", "", "3 0 1 1", "0 3 1 1", "0 0 nan 1", "0 0 inf 1")


@pytest.mark.parametrize("numbers", ODD_BOXES)
def test_what_is_no_box_is_refused(numbers):
    with pytest.raises(EquicamError, match="line 7 needs boxes of four numbers"):
        parse_box(numbers.split(), what="line 7")


def test_parse_box_and_valid_utf8():
    assert parse_box(["0", "1.5", "0", "2"], what="") == (0.0, 1.5, 0.0, 2.0)
    assert valid_utf8("caf\udce9 🙂\n") == "caf\\udce9 🙂\n"


PIXELS = np.random.default_rng(1).integers(0, 255, (20, 8, 9, 3), dtype=np.uint8)


def test_an_image_file_is_opened(tmp_path):
    Image.fromarray(PIXELS[0]).save(tmp_path / "a.png")
    assert np.array_equal(open_item(Item("a", tmp_path / "a.png")), PIXELS[0])
    with pytest.raises(EquicamError, match="No such file"):
        open_item(Item("b", tmp_path / "b.png"))
    with pytest.raises(EquicamError, match="can be read whole"):
        open_item(Item("c", Path("a\0b.png")))


def test_a_small_sample_has_images_of_many_groups():
    items = [
        Item(f"{label}/{group}/{i}.png", Path(), label=label, group=group)
        for label in ("a", "b") for group in ("p1", "p2", "p3") for i in range(4)
    ]  # fmt: skip
    plain = [replace(item, group=None) for item in items]
    found = [item.id for item in sample_by_class(items[::-1], 6)]
    assert found == [f"{label}/{group}/0.png" for group in ("p1", "p2", "p3") for label in ("a", "b")]
    expected = [f"{label}/p1/{i}.png" for i in range(3) for label in ("a", "b")]
    assert [item.id for item in sample_by_class(plain, 6)] == expected
    assert sorted(item.id for item in sample_by_class(items, None)) == sorted(item.id for item in items)
    unlabelled = [replace(item, label=None) for item in items]
    assert {item.group for item in sample_by_class(unlabelled, 24)[:6]} == {"p1", "p2", "p3"}
