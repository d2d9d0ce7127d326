"""Steady, unsteady or cannot say: the rule on made values, and that the word means something on a network."""

import math
import statistics
from collections import Counter

import pytest
import torch

import equicam
from equicam import steadiness
from equicam.demo import synthetic_patches
from equicam.reasons import Reason, describe
from equicam.steadiness import MIN_OTHER_VIEWS, WORDS, Steadiness, count_words, judge

LABELS = [f"{20 * i}°" for i in range(18)]


def judged(values, top1=None, flags=(), labels=LABELS, presented=0):
    return judge(values, [3] * len(values) if top1 is None else top1, labels[: len(values)], flags, presented)


def slow_word(others):
    """The rule of docs/method.md, written out with the standard library."""
    mean = statistics.mean(others)
    error = statistics.stdev(others) / len(others) ** 0.5
    if mean - 2 * error >= 0.7:
        return "steady"
    return "unsteady" if mean + 2 * error < 0.7 else "cannot say"


def test_the_word_is_that_of_the_rule():
    torch.manual_seed(0)
    found = Counter()
    for _ in range(300):
        centre, spread = torch.rand(2).tolist()
        others = (centre + 0.4 * spread * torch.randn(17)).clamp(-1, 1).double().tolist()
        word = judged([1.0, *others]).word
        assert word == slow_word(others)
        found[word] += 1
    assert min(found[word] for word in WORDS) > 20


@pytest.mark.parametrize(
    ("values", "word", "code"),
    [
        ([1.0] + [0.95, 0.9] * 6, "steady", "follows"),
        ([1.0] + [0.3, 0.2] * 6, "unsteady", "moves"),
        ([1.0] + [0.99, 0.4] * 6, "cannot say", "too-close"),
        ([1.0], "cannot say", "too-few-views"),
        ([1.0] + [0.95] * (MIN_OTHER_VIEWS - 1), "cannot say", "too-few-views"),
        ([1.0] + [0.95] * MIN_OTHER_VIEWS, "steady", "follows"),
        ([1.0] + [0.9] * 5 + [math.nan] * 6, "steady", "follows"),
        ([1.0] + [0.9] * 5 + [None] * 6, "steady", "follows"),
    ],
)
def test_each_word_has_its_reason(values, word, code):
    found = judged(values)
    assert (found.word, found.reason.code) == (word, code)
    assert str(found).startswith(f"{word}: ")


def test_a_prediction_that_changes_in_most_views_is_unsteady_however_well_the_map_follows():
    values = [1.0] + [0.95] * 11
    found = judged(values, [3] * 7 + [1] * 5)
    assert found.word == "steady"
    assert describe(found.reason).endswith("; the prediction changes in 5 of 11 other views")
    found = judged(values, [3] * 6 + [1] * 6)  # of the 11 others: the presented view cannot change
    assert (found.word, found.reason.code) == ("unsteady", "prediction-changes")
    assert "6 of 11 other views" in describe(found.reason)


@pytest.mark.parametrize("flag", ["blank", "constant", "none-kept"])
def test_a_flat_map_cannot_be_judged(flag):
    assert judged([1.0] + [0.95] * 11, flags={flag}) == Steadiness("cannot say", Reason(flag))


def test_the_presented_view_is_not_compared_with_itself():
    assert judged([0.69] * 6 + [1.0], presented=6).word == "unsteady"


def test_an_explanation_and_a_run_have_the_same_words(tmp_path, monkeypatch):
    monkeypatch.setattr(steadiness, "STEADY_FROM", 0.3)  # no map of the embedded model is steady
    model = equicam.load("embedded")
    paths = [tmp_path / f"{i:02}.png" for i in range(12)]
    for path, patch in zip(paths, synthetic_patches(12), strict=True):
        patch.save(path)
    run = equicam.audit(tmp_path, model, tmp_path / "run")
    explained = equicam.explain(model, paths)
    words = [one.word for one in explained.steadiness]
    assert len(set(words)) > 1, words
    assert run.items["id"].to_pylist() == [path.name for path in paths]
    assert run.items["steadiness"].to_pylist() == words
    assert run.items["steadiness_reason"].to_pylist() == [one.reason.code for one in explained.steadiness]
    assert count_words(run.items) == {word: words.count(word) for word in WORDS}
