"""Findings follow the numbers of kept rows, and can say no."""

from dataclasses import replace

import numpy as np
import pytest

from equicam.evaluate.statistics import Estimate
from equicam_paper import plots
from equicam_paper.equivariance import (
    CHANGE_BY_BLUR,
    CHANGE_BY_GATE,
    CHANGE_ON_FIRST,
    COVERAGE,
    SKILL,
    UNALIGNED,
)
from equicam_paper.findings import findings
from equicam_paper.rows import Both, Remark, compare
from equicam_paper.signals import CONSTANT
from equicam_paper.trainings import ALIGNED_ABOVE_TRAINED, ALIGNED_AND_TRAINED, TRAINED_ABOVE_PLAIN
from stand_ins import kept, measured

AERIAL = "aerial-resnet50"
TENTH = "worst tenth found in a tenth"


def levels(**values):
    """Rows by label, whose interval is a hundredth wide."""
    return [measured("", value, label) for label, value in values.items()]


def difference(label, value, half=0.004, n=1000):
    found = Estimate(value, value - half, value + half, n)
    return compare("", Both(found, found), label=label)


def found_in(folder="resnet50", **experiments):
    """The findings of one network's rows."""
    rows = {name.replace("_", "-"): of for name, of in experiments.items()}
    return list(findings({folder: {name: kept(name, *of) for name, of in rows.items()}}))


@pytest.mark.parametrize(("unaligned", "said"), [(0.05, True), (0.002, False), (-0.05, False)])
def test_averaging_without_alignment_follows_the_paired_interval(unaligned, said):
    skill = {"grad-cam": 0.6, "aug-cam": 0.5 if said else 0.599, "equigrad-cam": 0.97}
    rows = levels(**{"grad-cam": 0.7, "aug-cam": 0.75, "equigrad-cam": 0.98})
    rows += levels(**{SKILL.format(name): value for name, value in skill.items()})
    (text,) = found_in("mobilenet_v2", alignment=[*rows, difference(UNALIGNED, unaligned)])
    assert ("By raw Eq, averaging without alignment is above Grad-CAM with MobileNetV2" in text) == said
    assert ("By skill it is worse than not averaging with MobileNetV2" in text) == said


@pytest.mark.parametrize(("as_it_is", "word"), [(0.42, "higher"), (0.712, ""), (0.9, "lower")])
def test_rise_follows_its_intervals(as_it_is, word):
    first, stretched = measured("", 0.5, "rise"), measured("", 0.715, "rise, stretched to [0, 1]")
    alone = measured("", as_it_is, "rise")
    (text,) = found_in("resnet50-costly", main=[first, alone, stretched])
    for one in ("higher", "lower"):
        assert (f"Stretched, its Eq by their protocol is {one} with ResNet-50" in text) == (one == word)
    assert ("part of what is published as drift of RISE" in text) == (word == "higher")
    assert ("changes its Eq with no network" in text) == (not word)
    assert f"| ResNet-50 | {as_it_is:.3f} | 0.715 | 0.715 |" in text  # of two rows the one on all classes
    assert found_in("resnet50-costly", main=[first, alone]) == []


def rotated_training(raises, ahead, adds):
    """Each difference with its value for every fine-tune, and their mean."""
    labels = {TRAINED_ABOVE_PLAIN: raises, ALIGNED_ABOVE_TRAINED: ahead, ALIGNED_AND_TRAINED: adds}
    rows = levels(**{"GC Eq no aug": 0.6, "GC Eq rot aug": 0.59, "EG Eq no aug": 0.9, "EG Eq rot aug": 0.95})
    for label, values in labels.items():
        rows.append(difference(label, float(np.mean(values))))
        if len(values) > 1:
            rows += [difference(f"{label}, seed {i}", one) for i, one in enumerate(values)]
    if len(raises) > 1:
        rows += [measured("", 0.5 + 0.1 * i, f"GC Eq no aug, seed {i}") for i in range(len(raises))]
    return rows


def test_rotated_training_follows_every_fine_tune():
    for changes, (raises, ahead, adds) in {
        ((-0.01, -0.02), (0.3, 0.2), (0.05, 0.1)): (0, 1, 1),
        ((0.1, 0.2), (-0.1, -0.2), (0.05, 0.0)): (1, 0, 0),
        ((0.1, -0.02), (0.3, -0.1), (0.2, 0.3)): (0, 0, 1),
    }.items():
        (text,) = found_in(AERIAL, rotation_augmentation=rotated_training(*changes))
        assert f"rotated training raises Grad-CAM's own Eq in {raises} of 1. " in text
        where = "" if ahead else " (not on ResNet-50, aerial)"
        assert f"stays below EquiGrad-CAM without it in {ahead} of 1{where}. " in text
        assert f"EquiGrad-CAM adds to rotated training in {adds} of 1; " in text
        assert "| ResNet-50, aerial | 2 | 0.600 (0.500–0.600) | 0.590 |" in text


SEVERAL = rotated_training((0.1, 0.2), (0.3, 0.2), (0.1, 0.1))


def test_rotated_training_says_where_maps_are_constant():
    for share in (0.05, 0.28):
        text, _ = found_in(AERIAL, rotation_augmentation=SEVERAL, triage=[measured("", share, CONSTANT)])
        assert ("without rotated training, ResNet-50, aerial: 28%" in text) == (share > 0.1)
        assert "were not counted" not in text
    (text,) = found_in(AERIAL, rotation_augmentation=SEVERAL)
    assert "Constant maps were not counted in these tables on ResNet-50, aerial." in text


def test_one_fine_tune_is_listed_and_counted_nowhere():
    one = rotated_training((-0.1,), (-0.3,), (-0.1,))
    sources = {AERIAL: SEVERAL, "aerial-vgg16": one}
    name = "rotation-augmentation"
    (text,) = findings({folder: {name: kept(name, *rows)} for folder, rows in sources.items()})
    assert "stays below EquiGrad-CAM without it in 1 of 1. " in text
    assert "listed and not counted" in text
    assert "(VGG-16, aerial)." in text
    assert "| VGG-16, aerial | 1 | 0.600 |" in text


def test_a_difference_that_was_not_measured_is_no_finding():
    unknown = Estimate(0.0, float("nan"), float("nan"), 1000)
    for more in ([], [compare("", Both(unknown, None), label=TRAINED_ABOVE_PLAIN)]):
        (text,) = found_in(AERIAL, rotation_augmentation=[*SEVERAL[:4], *more])
        assert "does not raise" not in text
        assert "stays below" not in text


GIVEN, RANDOM = "equigrad-cam, weights as given: Eq", "equigrad-cam, all random: Eq"


def test_random_weights_follow_the_numbers():
    networks = Remark("networks", {"by_seed": [0.5, 0.6], "floor": 0.1, "constant": 0.0})
    without = [measured("", 0.7, GIVEN)]
    for random, words in ((0.98, "1 of 1, up to 0.980"), (0.5, "none of 1, at most 0.500")):
        row = replace(measured("", random, RANDOM), reason=networks)
        sane = {"vgg16": without, "resnet50": [measured("", 0.97, GIVEN), row]}
        (text,) = findings({folder: {"sanity": kept("sanity", *rows)} for folder, rows in sane.items()})
        assert f"by intervals that do not overlap, in {words} (ResNet-50, ImageNet, trained 0.970)" in text
        assert "the mean of 2 random networks." in text
        assert "constant, which count 0" not in text
    assert found_in("vgg16", sanity=without) == []


@pytest.mark.parametrize(("change", "beyond"), [(-0.02, True), (-0.006, False), (0.02, True)])
def test_the_soft_gate_follows_the_paired_interval(change, beyond):
    (text,) = found_in(soft_gate=[difference(CHANGE_BY_GATE, change), difference(CHANGE_ON_FIRST, 0.001)])
    moved = "ResNet-50" if beyond else "no network"
    assert "at most 0.004 on the first 200 classes" in text
    assert f"with no network on the first fifth of the classes, and with {moved} on all classes." in text
    assert ("is load-bearing with ResNet-50." in text) == beyond
    assert ("is not shown to be load-bearing." in text) == (not beyond)
    both = [f"{v:+.3f} [{v - 0.004:+.3f}, {v + 0.004:+.3f}]" for v in (0.001, 0.001, change, change)]
    assert f"| ResNet-50 | {' | '.join(both)} |" in text


def test_findings_need_images_groups_and_changes():
    """A change on few images or a thousand images of few patients say nothing, nor does a table without changes."""
    level = measured("", 0.96, "γ = 0")
    for n, moved in ((12, "no network"), (200, "ResNet-50")):
        (text,) = found_in(soft_gate=[difference(CHANGE_ON_FIRST, -0.02, n=n), level])
        assert f"with {moved} on the first fifth of the classes." in text
        assert "on all classes" not in text
    assert found_in(soft_gate=[level]) == []
    assert found_in(alignment=[difference(UNALIGNED, 0.3, n=4), measured("", 0.7, "grad-cam", n=4)]) == []
    row = difference(UNALIGNED, 0.3)
    for groups, expected in ((5, 0), (24, 1)):
        some = replace(row, clean=replace(row.clean, groups=groups), as_published=None)
        assert len(found_in(alignment=[some])) == expected


@pytest.mark.parametrize(("change", "beyond"), [(0.02, True), (0.005, False), (-0.02, True)])
def test_blur_follows_the_paired_interval(change, beyond):
    rows = [difference(CHANGE_BY_BLUR.format(s), change if s == 16 else 0.001) for s in (4, 16, 32)]
    main = levels(**{"grad-cam": 0.7, "equigrad-cam": 0.95})
    (text,) = [one for one in found_in(blur=rows, main=main) if "smoothing" in one]
    assert f"with the whole interval, with {'ResNet-50' if beyond else 'no network'}." in text
    assert "flat, within 0.002" in text
    assert text.rstrip().endswith("| 0.250 |")
    assert found_in(blur=main[:1]) == []


def test_signals_have_angles_off_the_grid():
    ends = ("", ", by disagreement of the views", ", by 1 − stability")
    rows = [measured("", 0.6, "r of PEUM with 1 − Eq")]
    rows += [measured("", 0.2 + i / 10, TENTH + end) for i, end in enumerate(ends)]
    rows += [measured("", 0.5 + i / 10, f"{TENTH}{end}, off the grid") for i, end in enumerate(ends)]
    (text,) = found_in(AERIAL, triage=rows)
    assert "| ResNet-50, aerial | 1 | 0.60 | 20% | 30% | 40% | 50% | 60% | 70% |" in text
    panels = plots.panels_of(kept("triage", *rows, measured("", 0.1, f"{TENTH}, seed 0")))
    drawn = [[name for name, _ in panel.rows] for panel in panels]
    assert drawn == [[f"found in a tenth{end}" for end in ends]] * 2


@pytest.mark.parametrize(("found", "constant"), [(0.05, 0.25), (0.099, 0.05), (0.3, 0.0)])
def test_signals_name_chance_and_constant_maps(found, constant):
    rows = levels(**{TENTH: found, CONSTANT: constant})
    (text,) = found_in(AERIAL, triage=rows)
    where = " (below chance)" if found == 0.05 else ""
    assert (f"not with every fine-tune, on ResNet-50, aerial{where}. " in text) == (found < 0.1)
    assert ("(ResNet-50, aerial: 25% are)" in text) == (constant == 0.25)
    assert ("lower what PEUM finds; " in text) == (found < 0.1)
    assert "were not counted" not in text
    (text,) = found_in(AERIAL, triage=rows[:1])
    assert "Constant maps were not counted in these tables on ResNet-50, aerial. " in text
    assert "lower what PEUM finds" not in text


def test_signals_name_chance_of_single_fine_tunes():
    for seeds, words in {
        (0.5, 0.4, 0.3): "",
        (0.5, 0.4, 0.1): "above with 2 of 3",
        (0.5, 0.1, 0.05): "above with 1 of 3, below with 1",
        (0.1, 0.05, 0.05): "above with 0 of 3, below with 2",
    }.items():
        each = {f"{TENTH}, seed {i}": one for i, one in enumerate(seeds)}
        (text,) = found_in(AERIAL, triage=levels(**{TENTH: 0.3}, **each))
        assert (f"not with every fine-tune, on ResNet-50, aerial ({words}). " in text) == bool(words)
        assert ("not above chance" in text) == bool(words)


@pytest.mark.parametrize(("value", "rewards"), [(0.9, True), (0.5, False), (0.704, False)])
def test_ignoring_the_image_can_say_no(value, rewards):
    (text,) = found_in(main=levels(**{"grad-cam": 0.7, COVERAGE: value, "equigrad-cam": 0.95}))
    word = "rewards" if rewards else "does not reward"
    assert f"The zero-filled full square {word} ignoring the image" in text
